"""Checks of conditions that end a run, and of profiles."""

from __future__ import annotations

import difflib

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.checks.refuse import refuse
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.guards import Condition

# Metrics of an optimizer step, as far as they are known before the first step: folders, and names without a folder.
_FOLDERS = ("data", "loss", "perf", "policy", "reward", "rollout")
_SINGLE = (
    *("grad_norm", "loss_scale", "lr", "lr_ess", "lr_ess_factor"),
    *("skipped_steps", "bad_steps", "steps_without_signal"),
)


def check_guards(config: RunConfig) -> None:
    """Check that each ``--stop-if`` can be read and names a metric of a step."""
    for text in config.guards.stop_if or ():
        try:
            condition = Condition.parse(text)
        except ValueError as error:
            raise ConfigurationError(f"--stop-if '{text}' cannot be read: {error}") from error
        _check_metric(condition, config)


def _check_metric(condition: Condition, config: RunConfig) -> None:
    name, prefix, given = condition.metric, config.correction.metric_prefix, f"--stop-if '{condition.text}'"
    needed = {
        "perf/save_seconds": ("--save-interval", config.checkpoints.save_interval),
        "perf/eval_seconds": ("--eval-interval", config.evaluation.eval_interval),
        **dict.fromkeys(("lr_ess", "lr_ess_factor"), ("--lr-ess-scaling", config.schedule.lr_ess_scaling)),
    }
    if name in needed and not needed[name][1]:
        raise ConfigurationError(f"{given} does nothing without {needed[name][0]}: no step has {name}")
    if name.startswith("eval/"):
        raise ConfigurationError(f"{given} names a metric of evaluations, not of steps: use reward/mean, or another")
    folder, slash, rest = name.partition("/")
    if name in _SINGLE or name.startswith(prefix) or (slash and rest and folder in _FOLDERS):
        return
    close = difflib.get_close_matches(name, [*_SINGLE, f"{prefix}kl", f"{prefix}k3_kl", "reward/mean"], n=1)
    hint = f"did you mean {close[0]}?" if close else f"use one of docs/metrics.md, like {prefix}k3_kl or reward/mean"
    raise ConfigurationError(f"{given} names {name}, which no step has: {hint}")


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
