"""Conditions of ``--stop-if`` on metrics, which end a run after some steps in a row, with advice for known metrics."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

from megatron_rc.launch.ending import GUARD
from megatron_rc.launch.errors import RunError
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.guards import Condition

_MORE_PROMPTS = "more prompts a step (--grpo-prompts-per-step), other prompts for those whose rewards are alike "
# By the end of a metric's name and the comparisons; the first fit is used.
_ADVICE = {
    ("reference_kl", "<>"): "the policy leaves the model that it began from: raise --grpo-kl-beta, or lower --lr",
    ("approx_kl", "<>"): "one rollout batch moves the policy far: lower --lr, or --grpo-iterations",
    ("kl", "<>"): "engine and trainer drift apart: look at stale weights, temperature and --rollout-dtype, or lower "
    "--lr",
    ("eff_sample_size", "<"): "few tokens carry the weights: bring engine and trainer closer, or truncate lower",
    ("grad_norm", ">"): "the gradients grow: lower --lr or --clip-grad, and look at the rewards of the last batches",
    ("masked_fraction", ">"): "much of the sampling is wasted: bring both policies closer, or widen "
    "--rollout-rs-threshold",
    ("reward/nonzero_advantages", "<"): "few responses have an advantage: give "
    f"{_MORE_PROMPTS}(--dynamic-sampling), or easier ones",
    ("steps_without_signal", ">"): "in these steps all rewards of each prompt were alike: give "
    f"{_MORE_PROMPTS}(--dynamic-sampling), or easier ones",
    ("reward/mean", "<"): "the policy gets worse: go on from an older checkpoint with a lower --lr or a higher "
    "--grpo-kl-beta",
    ("policy/entropy", "<>"): "the policy collapses or dissolves: lower --lr, or change --grpo-entropy-term-weight",
}
# Advice about a low reward if half of the steps or more have no signal.
_COLLAPSED = (
    "the reward has gone, and with it the signal, because all rewards of each prompt are alike: go back to an older "
    f"checkpoint, or begin again, with {_MORE_PROMPTS}(--dynamic-sampling), a warm-up (--lr-warmup-iters) or a "
    "lower --lr"
)
_OTHERWISE = "see docs/metrics.md for what moves it"
# Metrics of some steps only, after a save or an evaluation.
_NOW_AND_THEN = ("perf/save_seconds", "perf/eval_seconds")


class Guards:
    """The run's conditions, on the rank that reports steps."""

    def __init__(self, config: RunConfig) -> None:
        # For each condition the steps in a row: value of the metric, and whether the step had no signal.
        self._met: dict[Condition, list[tuple[float, bool]]] = {
            Condition.parse(text): [] for text in config.guards.stop_if or ()
        }
        self._unseen = {condition for condition in self._met if condition.metric not in _NOW_AND_THEN}

    def go_on(self, rows: Iterable[Mapping[str, float]], iteration: int) -> None:
        """Count the steps before a checkpoint, because steps in a row may lie on both sides of it.

        ``rows``: the rows of ``metrics.jsonl``. Rows of steps after ``iteration``, the checkpoint's, are made again and
        do not count.
        """
        if not self._met:
            return
        for row in rows:
            if row["step"] <= iteration:
                for condition in self._met:
                    self._count(condition, int(row["step"]), row)

    def step(self, step: int, row: Mapping[str, float]) -> RunError | None:
        """Count a step; returns an error, with its exit code, if the run is to end. The weights are good.

        Metrics that a step lacks because it was left out do not count.
        """
        errors = [self._missing(condition, step, row) or self._count(condition, step, row) for condition in self._met]
        return next(filter(None, errors), None)

    def _missing(self, condition: Condition, step: int, row: Mapping[str, float]) -> RunError | None:
        """Error of a condition whose metric is absent in the run's first whole step, and so will never come."""
        if condition.metric in row:
            self._unseen.discard(condition)
        elif "grad_norm" in row and condition in self._unseen:
            close = difflib.get_close_matches(condition.metric, row, n=3) or sorted(row)[:3]
            return RunError(
                f"--stop-if '{condition.text}': step {step} has no metric {condition.metric}, so that the run could "
                f"never end by it: use a metric of metrics.jsonl, such as {', '.join(close)}"
            )
        return None

    def _count(self, condition: Condition, step: int, row: Mapping[str, float]) -> RunError | None:
        """Count a step of one condition; an error clears the count, because the run may be resumed from there."""
        if condition.metric not in row:
            return None
        value = row[condition.metric]
        steps_in_a_row = self._met[condition]
        steps_in_a_row.append((value, row.get("reward/nonzero_advantages") == 0))
        error = None
        if condition.holds(value):
            if len(steps_in_a_row) < condition.steps:
                return None
            error = _met(condition, step, steps_in_a_row)
        steps_in_a_row.clear()
        return error


def _met(condition: Condition, step: int, steps_in_a_row: Sequence[tuple[float, bool]]) -> RunError:
    """The error of a condition, from each step's value and whether that step had no signal."""
    side = condition.comparison[0]
    fitting = (words for (name, sides), words in _ADVICE.items() if condition.metric.endswith(name) and side in sides)
    advice = next(fitting, _OTHERWISE)
    without_signal = sum(is_without_signal for _, is_without_signal in steps_in_a_row)
    if condition.metric == "reward/mean" and side == "<" and 2 * without_signal >= len(steps_in_a_row):
        advice = _COLLAPSED
    values = ", ".join(f"{value:.3g}" for value, _ in steps_in_a_row[-3:])
    sentence = f"stopped by --stop-if '{condition.text}' after step {step} ({condition.metric} was {values}): {advice}"
    return RunError(sentence, GUARD)
