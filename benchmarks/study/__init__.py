"""The study: training with an engine that is wrong in three ways, without correction and with four; see docs/study.md.

    python -m benchmarks.study [--runs runs/study] [--at-once 2]

``settings`` says which runs there are, ``task`` and ``engine`` what they learn and what samples for them; ``trainer``
is one of them, ``queue`` runs them all.
"""
