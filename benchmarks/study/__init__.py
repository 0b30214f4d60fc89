"""The study: training with an engine that is wrong in three ways, uncorrected and with four corrections.

    python -m benchmarks.study [--runs runs/study] [--at-once 2]

See docs/study.md. ``settings`` has the runs, ``task`` and ``engine`` their task and engine; ``trainer`` makes one run,
``queue`` all of them.
"""
