"""Conditions that a run ends on: whether they can be read, and speak of metrics that a step has; the doctor."""

from __future__ import annotations

import difflib

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.guards import Condition

# What a row of an optimizer step holds, as far as flags say it: the first row of the run says the rest.
_FOLDERS = ("data", "loss", "perf", "policy", "reward", "rollout")
_SINGLE = ("grad_norm", "loss_scale", "lr", "skipped_steps", "bad_steps", "steps_without_signal")


def check_guards(config: RunConfig) -> None:
    """``--stop-if`` and ``--doctor-interval``."""
    interval, last = config.guards.doctor_interval, config.training.train_iters
    if interval is not None and interval > last:
        raise ConfigurationError(
            f"--doctor-interval {interval} does nothing in a run of {last} optimizer steps: give {last} or less"
        )
    for text in config.guards.stop_if or ():
        try:
            condition = Condition.parse(text)
        except ValueError as error:
            raise ConfigurationError(f"--stop-if '{text}' cannot be read: {error}") from error
        _check_metric(condition, config.correction.metric_prefix)
        _check_occasion(condition, config)


def _check_occasion(condition: Condition, config: RunConfig) -> None:
    """What only steps after a save or an evaluation have, where there is none on the way."""
    wanted = {
        "perf/save_seconds": ("--save-interval", config.checkpoints.save_interval),
        "perf/eval_seconds": ("--eval-interval", config.evaluation.eval_interval),
    }
    name, given = wanted.get(condition.metric, ("", True))
    if not given:
        raise ConfigurationError(
            f"--stop-if '{condition.text}' does nothing without {name}: no step has {condition.metric}"
        )


def _check_metric(condition: Condition, prefix: str) -> None:
    name = condition.metric
    if name.startswith("eval/"):
        raise ConfigurationError(
            f"--stop-if '{condition.text}': evaluations are no metrics of a step: use reward/mean, or another one"
        )
    folder, slash, rest = name.partition("/")
    if name in _SINGLE or name.startswith(prefix) or (slash and rest and folder in _FOLDERS):
        return
    close = difflib.get_close_matches(name, [*_SINGLE, f"{prefix}kl", f"{prefix}k3_kl", "reward/mean"], n=1)
    hint = f"did you mean {close[0]}?" if close else f"use one of docs/metrics.md, like {prefix}k3_kl or reward/mean"
    raise ConfigurationError(f"--stop-if '{condition.text}': no step has a metric {name}: {hint}")
