"""The study: training with an engine that is wrong in three ways, uncorrected and with ten corrections.

    python -m benchmarks.study [main|baselines|long|realistic|bonus|...|all] [--data FILE] [--at-once 2]

See docs/study.md. ``settings`` has the runs in blocks, ``task`` and ``engine`` their tasks and engine. ``trainer``
makes one run; ``queue`` makes all that a block's data file lacks; ``results`` has the measurements, ``comparison`` the
tests of differences with five seeds, ``document`` the tables.
"""
