"""Metrics that end a run: conditions that hold for some steps in a row, and what to do about the well-known ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

from megatron_rc.launch.distributed import AgreedError
from megatron_rc.launch.ending import GUARD
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.guards import Condition

# By the end of a metric's name and the side that it leaves its bounds on, the first that fits.
_ADVICE = {
    ("reference_kl", "<>"): "the policy leaves the model that it began from: raise --grpo-kl-beta, or lower --lr",
    ("approx_kl", "<>"): "one rollout batch moves the policy far: lower --lr, or --grpo-iterations",
    (
        "kl",
        "<>",
    ): "engine and trainer drift apart: look at stale weights, temperature and --rollout-dtype, or lower --lr",
    ("eff_sample_size", "<"): "few tokens carry the weights: bring engine and trainer closer, or truncate lower",
    ("grad_norm", ">"): "the gradients grow: lower --lr or --clip-grad, and look at the rewards of the last batches",
    ("masked_fraction", ">"): "much of the sampling is wasted: bring both policies closer, or widen "
    "--rollout-rs-threshold",
    (
        "reward/nonzero_advantages",
        "<",
    ): "few responses say what is better: give more prompts a step (--grpo-prompts-per-step), other prompts for those "
    "whose rewards are alike (--dynamic-sampling), or easier ones",
    ("steps_without_signal", ">"): "in these steps all rewards of each prompt were alike: give more prompts a step "
    "(--grpo-prompts-per-step), other prompts for those (--dynamic-sampling), or easier ones",
    ("reward/mean", "<"): "the policy gets worse: go on from an older checkpoint with a lower --lr or a higher "
    "--grpo-kl-beta",
    ("policy/entropy", "<>"): "the policy collapses or dissolves: lower --lr, or change --grpo-entropy-term-weight",
}
# Of some steps only: those after a save or an evaluation.
_NOW_AND_THEN = ("perf/save_seconds", "perf/eval_seconds")
# Of a low reward in steps of which half have no signal.
_COLLAPSED = (
    "the reward has gone, and with it the signal, since all rewards of each prompt are alike: go back to a checkpoint "
    "before the fall, or begin again, with more prompts a step (--grpo-prompts-per-step), other prompts for those "
    "whose rewards are alike (--dynamic-sampling), a warm-up (--lr-warmup-iters) or a lower --lr"
)
_OTHERWISE = "see docs/metrics.md for what moves it"


class Guards:
    """The conditions of a run, told of its steps one after the other on the rank that reports them.

    Args:
        config: of the run.
    """

    def __init__(self, config: RunConfig) -> None:
        self._met: dict[Condition, list[float]] = {Condition.parse(text): [] for text in config.guards.stop_if or ()}
        # Whether each of the steps had a signal.
        self._silent: dict[Condition, list[bool]] = {condition: [] for condition in self._met}
        self._unseen = {condition for condition in self._met if condition.metric not in _NOW_AND_THEN}

    def go_on(self, rows: Iterable[Mapping[str, float]], iteration: int) -> None:
        """Count what the run's file holds of the steps before a checkpoint: steps in a row may lie on both sides.

        Args:
            rows: of ``metrics.jsonl``, the last one first; they are read back to where no condition held.
            iteration: optimizer steps that lie behind; rows of later ones are of steps that are made again.
        """
        held, looked_at = set(self._met), []
        for row in rows if held else ():
            if row["step"] > iteration:
                continue
            looked_at.append(row)
            held -= {one for one in held if one.metric in row and not one.holds(row[one.metric])}
            if not held:
                break
        for row in reversed(looked_at):
            for condition in self._met:
                self._count(condition, int(row["step"]), row)

    def step(self, step: int, row: Mapping[str, float]) -> AgreedError | None:
        """Why the run is to end, if it is, and with which exit code; the weights are good.

        Args:
            step: number of the step.
            row: its metrics; a step that was left out has none of its loss, which changes nothing here.
        """
        errors = [self._missing(condition, step, row) or self._count(condition, step, row) for condition in self._met]
        return next(filter(None, errors), None)

    def _missing(self, condition: Condition, step: int, row: Mapping[str, float]) -> AgreedError | None:
        """Why a condition can never be met: the first whole step of this run has no such metric."""
        if condition.metric in row:
            self._unseen.discard(condition)
        elif "grad_norm" in row and condition in self._unseen:
            return _unknown(condition, step, row)
        return None

    def _count(self, condition: Condition, step: int, row: Mapping[str, float]) -> AgreedError | None:
        """One condition's verdict; where it is met its steps are counted anew: the run may be gone on from there."""
        if condition.metric not in row:
            return None
        values, silent = self._met[condition], self._silent[condition]
        values.append(row[condition.metric])
        silent.append(row.get("reward/nonzero_advantages") == 0)
        if condition.holds(values[-1]) and len(values) < condition.steps:
            return None
        met = _met(condition, step, values, silent) if condition.holds(values[-1]) else None
        values.clear()
        silent.clear()
        return met


def _met(condition: Condition, step: int, values: Sequence[float], silent: Sequence[bool]) -> AgreedError:
    side = condition.comparison[0]
    fitting = (words for (name, sides), words in _ADVICE.items() if condition.metric.endswith(name) and side in sides)
    advice = next(fitting, _OTHERWISE)
    if condition.metric == "reward/mean" and side == "<" and 2 * sum(silent) >= len(silent):
        advice = _COLLAPSED
    found = ", ".join(f"{value:.3g}" for value in values[-3:])
    words = f"stopped by --stop-if '{condition.text}' after step {step} ({condition.metric} was {found}): {advice}"
    return AgreedError(words, GUARD)


def _unknown(condition: Condition, step: int, row: Mapping[str, float]) -> AgreedError:
    close = difflib.get_close_matches(condition.metric, row, n=3) or sorted(row)[:3]
    return AgreedError(
        f"--stop-if '{condition.text}': step {step} has no metric {condition.metric}, and so could never end by it: "
        f"use one that metrics.jsonl has, like {', '.join(close)}"
    )
