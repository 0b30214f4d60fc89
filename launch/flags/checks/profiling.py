"""What is recorded of a run, for PyTorch's viewers."""

from __future__ import annotations

from megatron_rc.launch.errors import ConfigurationError, flag
from megatron_rc.launch.run_config import RunConfig

# Of Megatron's timers.
_FINEST = 2
_OF_PROFILE = ("profile_step_start", "profile_step_end", "profile_ranks")


def _check_timers(level: int | None, *, is_logged: bool) -> None:
    if level is not None and not is_logged:
        raise ConfigurationError(
            f"--timing-log-level {level} does nothing without --log-timers-to-tensorboard: give both, or neither"
        )
    if level is not None and level > _FINEST:
        raise ConfigurationError(f"--timing-log-level {level} must be 0, 1 or {_FINEST}")


def check_profiling(config: RunConfig) -> None:
    """Whether something would be recorded."""
    logging, world = config.logging, config.launch.world_size
    if logging.record_memory_history and config.launch.on_cpu:
        raise ConfigurationError(
            "--record-memory-history needs GPUs: PyTorch records no other memory; drop it, or use --profile"
        )
    _check_timers(logging.timing_log_level, is_logged=logging.log_timers_to_tensorboard)
    if not logging.profile:
        for name in _OF_PROFILE:
            value = getattr(logging, name)
            if value is not None:
                shown = value if isinstance(value, int) else " ".join(map(str, value))
                raise ConfigurationError(f"{flag(name)} {shown} does nothing without --profile: give both, or neither")
        return
    (start, end), last = logging.profiled_steps, config.training.train_iters
    if not start < end <= last:
        raise ConfigurationError(
            f"--profile records from --profile-step-start {start} to --profile-step-end {end}: the first must be below "
            f"the second, and that at most --train-iters {last}"
        )
    for rank in logging.profile_ranks or ():
        if not 0 <= rank < world:
            raise ConfigurationError(
                f"--profile-ranks {rank} must be one of 0 to {world - 1}: the run has {world} ranks"
            )
