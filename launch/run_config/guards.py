"""Settings that end a run, leave out bad steps, or replace bad responses."""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass
from typing import Literal

from megatron_rc.launch.run_config.options import option

_COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_FORM = re.compile(r"\s*([^\s<>=]+)\s*(<=|>=|<|>)\s*(\S+?)(?:\s+for\s+(\S+))?\s*")


@dataclass(frozen=True, kw_only=True)
class GuardSection:
    """Treatment of bad steps and bad responses, and conditions that end the run."""

    bad_steps: Literal["stop", "skip"] = option(
        "a step with a loss or gradient norm that fails a check, or a rollout batch with unusable log-probs: end the "
        "run, or skip the steps on all ranks; the batch is written to bad/ in the run's folder",
        default="stop",
    )
    max_skipped_steps: int = option(
        "optimizer steps in a row that leave the model unchanged (skipped, or gradient 0) before the run ends",
        default=6,
        positive=True,
    )
    skip_steps_without_signal: bool = option(
        "leave out an optimizer step whose policy gradient is exactly 0: all advantages of the mini-batch are 0, and "
        "the loss has no entropy, KL or auxiliary term; Adam's momentum would move the weights all the same",
        default=True,
    )
    bad_samples: Literal["stop", "drop", "resample"] = option(
        "a response that is empty, too long, has ids out of the vocabulary or a log-prob that is no number (unless "
        "--bad-log-probs rejects it): end the run, drop it, or sample it again; it is written to bad/",
        default="stop",
        needs="!load_rollouts",
    )
    bad_sample_attempts: int = option(
        "times that a bad response is sampled again before it is dropped",
        default=3,
        needs="bad_samples=resample !load_rollouts",
        positive=True,
    )
    stop_if: tuple[str, ...] | None = option(
        "end the run if a metric is out of bounds in N steps in a row, as in 'rollout_corr/k3_kl > 0.5 for 5'",
        metavar="CONDITION",
    )
    doctor_interval: int | None = option(
        "check the metrics every N optimizer steps, and log one line if the diagnosis of the log-probs changes; see "
        "docs/doctor.md",
        metavar="N",
        positive=True,
        most="train_iters",
    )


@dataclass(frozen=True)
class Condition:
    """Bound on a metric that ends the run: ``METRIC < NUMBER for STEPS``."""

    text: str  # the user's words
    metric: str  # name of the metric in ``metrics.jsonl``
    comparison: str  # one of ``<``, ``<=``, ``>``, ``>=``
    limit: float  # a finite number
    steps: int = 1  # number of steps in a row, at least 1

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read a condition, or raise ValueError."""
        match = _FORM.fullmatch(text)
        if match is None:
            raise ValueError("expected 'METRIC < NUMBER for STEPS', with <, <=, > or >=")
        metric, comparison, number, times = match.groups()
        try:
            limit = float(number)
        except ValueError:
            limit = math.nan
        if not math.isfinite(limit):
            raise ValueError(f"{number} is no finite number to compare {metric} with")
        if times is not None and not (times.isdecimal() and int(times) > 0):
            raise ValueError(f"'for {times}' is no number of steps: expected 1 or more")
        return cls(text, metric, comparison, limit, int(times or 1))

    def holds(self, value: float) -> bool:
        """Whether a value meets the condition; NaN does."""
        return math.isnan(value) or bool(_COMPARISONS[self.comparison](value, self.limit))
