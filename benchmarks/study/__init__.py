"""The study: training with an engine that differs from the trainer, uncorrected and with corrections.

    python -m benchmarks.study [main|baselines|long|realistic|bonus|...|all] [--data FILE] [--at-once 2]

See docs/study.md. ``design`` has the words of the design, ``settings`` the study's own, as data. ``task``, ``engine``
and ``late`` are the tasks and the engines. ``trainer`` makes one run; ``queue`` makes all that a block's data file
lacks. ``results`` has the measurements, ``comparison`` the tests of differences, ``document`` the tables.
"""
