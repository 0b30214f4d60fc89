"""What is wrong with a run's log-probs, in plain words: ``python -m megatron_rc.doctor``. See ``docs/doctor.md``."""
