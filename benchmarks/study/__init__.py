"""The study: training with an engine that is wrong in three ways, uncorrected and with ten corrections.

    python -m benchmarks.study [main|baselines|long|realistic|bonus|all] [--data docs/study.json] [--at-once 2]

See docs/study.md. ``settings`` has the runs in blocks, ``task`` and ``engine`` their tasks and engine. ``trainer``
makes one run; ``queue`` makes all that the data file lacks; ``results`` has the measurements, ``document`` the tables.
"""
