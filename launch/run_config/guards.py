"""What is done about steps that must not be made and bad responses, and which metrics end a run."""

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
    """Bad steps, steps that change nothing, bad responses, and conditions that a run ends on."""

    bad_steps: Literal["stop", "skip"] = option(
        "a step whose loss or gradient norm fails a check, and the steps of a rollout batch whose log-probs cannot be "
        "used, end the run, or are left out on all ranks; the batch is written to bad/ in the run's folder",
        default="stop",
    )
    max_skipped_steps: int = option(
        "steps in a row that may leave the model as it was, left out or with a gradient of 0, before the run ends",
        default=6,
        positive=True,
    )
    skip_steps_without_signal: bool = option(
        "leave out an optimizer step whose policy gradient is exactly 0: all advantages of the mini-batch are 0, and "
        "the loss has no entropy, KL or auxiliary term; Adam's momentum would move the weights all the same",
        default=True,
    )
    bad_samples: Literal["stop", "drop", "resample"] = option(
        "a response with a log-prob that is none (unless --bad-log-probs rejects it), with ids out of the vocabulary, "
        "empty or too long ends the run, is left out, or is sampled again before it is left out; it is written to bad/",
        default="stop",
    )
    bad_sample_attempts: int = option("tries more of such a response", default=3, positive=True)
    stop_if: tuple[str, ...] | None = option(
        "end the run when a metric is out of bounds in each of N steps in a row, like 'rollout_corr/k3_kl > 0.5 for 5'",
        metavar="CONDITION",
    )
    doctor_interval: int | None = option(
        "look at the metrics every N steps, and say in one line what is wrong with the log-probs when that changes; "
        "docs/doctor.md",
        metavar="N",
        positive=True,
    )


@dataclass(frozen=True)
class Condition:
    """``METRIC < NUMBER``, with ``<=``, ``>`` or ``>=``, in each of some steps in a row.

    Attributes:
        text: as the user wrote it.
        metric: its name in ``metrics.jsonl``.
        comparison: of the metric and the limit.
        limit: a finite number.
        steps: at least 1.
    """

    text: str
    metric: str
    comparison: str
    limit: float
    steps: int = 1

    @classmethod
    def parse(cls, text: str) -> Condition:
        """The condition that a text spells.

        Raises:
            ValueError: it spells none.
        """
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
        """Whether it holds of a value; of one that is no number it does."""
        return math.isnan(value) or bool(_COMPARISONS[self.comparison](value, self.limit))
