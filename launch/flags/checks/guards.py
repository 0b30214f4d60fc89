"""Checks of conditions that end a run, and of profiles."""

from __future__ import annotations

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.checks.refuse import refuse
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.guards import Condition


def check_guards(config: RunConfig) -> None:
    """Check that each ``--stop-if`` can be read; the first step shows whether it has the metric."""
    scaling = ("--lr-ess-scaling", config.schedule.lr_ess_scaling)
    needed = {
        "perf/save_seconds": ("--save-interval", config.checkpoints.save_interval),
        "perf/eval_seconds": ("--eval-interval", config.evaluation.eval_interval),
        "lr_ess": scaling,
        "lr_ess_factor": scaling,
    }
    for text in config.guards.stop_if or ():
        try:
            metric = Condition.parse(text).metric
        except ValueError as error:
            raise ConfigurationError(f"--stop-if '{text}' cannot be read: {error}") from error
        other, is_given = needed.get(metric, ("", True))
        if not is_given:
            raise ConfigurationError(f"--stop-if '{text}' does nothing without {other}: no step has {metric}")
        if metric.startswith("eval/"):
            words = "names a metric of evaluations, not of steps: use reward/mean, or another"
            raise ConfigurationError(f"--stop-if '{text}' {words}")


def check_profiling(config: RunConfig) -> None:
    """Check that the steps and ranks to profile exist, and that there is a GPU whose memory can be recorded."""
    logging, world = config.logging, config.launch.world_size
    start, end = logging.profiled_steps
    strangers = [rank for rank in logging.profile_ranks or () if not 0 <= rank < world]
    wrong = {
        "{record_memory_history} needs GPUs: drop it, or use --profile": (
            logging.record_memory_history and config.launch.on_cpu
        ),
        "--profile-step-start {start} must be below --profile-step-end {end}, at most {train_iters}": (
            logging.profile and not start < end <= config.training.train_iters
        ),
        "--profile-ranks {found[0]} must be one of 0 to {last}": strangers,
    }
    refuse(config, wrong, start=start, end=end, last=world - 1)
