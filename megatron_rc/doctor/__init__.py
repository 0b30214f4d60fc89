"""Finds faults in a run's log-probs: ``python -m megatron_rc.doctor``. See ``docs/doctor.md``."""
