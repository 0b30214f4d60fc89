"""Settings that end a run, leave out bad steps, or replace bad responses."""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass
from typing import Literal

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.run_config.options import Section, option

_COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_FORM = re.compile(r"\s*([^\s<>=]+)\s*(<=|>=|<|>)\s*([-+.\deE]+)(?:\s+for\s+([1-9]\d*))?\s*")


@dataclass(frozen=True, kw_only=True)
class GuardSection(Section):
    """Treatment of bad steps and bad responses, and conditions that end the run."""

    bad_steps: Literal["stop", "skip"] = option(
        "after a failed check of loss or gradient norm, or unusable log-probs of a batch: end the run, or skip the "
        "steps; the batch is written to bad/ in the run's folder",
        default="stop",
    )
    max_skipped_steps: int = option(
        "optimizer steps in a row without a change of the model (skipped, or gradient 0) that end the run", default=6
    )
    skip_steps_without_signal: bool = option(
        "skip an optimizer step whose policy gradient is exactly 0, because all advantages are 0 and there is no "
        "entropy, KL or auxiliary loss; Adam's momentum would still move the weights",
        default=True,
    )
    bad_samples: Literal["stop", "drop", "resample"] = option(
        "for a response that is empty, too long, or has invalid ids or log-probs (unless --bad-log-probs rejects it): "
        "end the run, drop it, or sample it again; it is written to bad/",
        default="stop",
    )
    bad_sample_attempts: int = option("times that a bad response is sampled again before it is dropped", default=3)
    stop_if: tuple[str, ...] | None = option(
        "end the run if a metric is out of bounds N steps in a row, as 'rollout_corr/k3_kl > 0.5 for 5'",
        metavar="CONDITION",
    )
    doctor_interval: int | None = option(
        "check the metrics every N optimizer steps, and log a line if the diagnosis changes; see docs/doctor.md"
    )

    def __post_init__(self) -> None:
        """Check that each ``--stop-if`` can be read; the first step shows whether it has the metric."""
        super().__post_init__()
        for text in self.stop_if or ():
            try:
                metric = Condition.parse(text).metric
            except ValueError as error:
                raise ConfigurationError(f"--stop-if '{text}' cannot be read: {error}") from error
            if metric.startswith("eval/"):
                raise ConfigurationError(
                    f"--stop-if '{text}' names a metric of evaluations, not of steps: use reward/mean, or another"
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
            raise ValueError("expected 'METRIC < NUMBER for STEPS', with <, <=, > or >=, and 1 or more steps")
        metric, comparison, number, steps = match.groups()
        limit = float(number)
        if not math.isfinite(limit):
            raise ValueError(f"{number} is no finite number")
        return cls(text, metric, comparison, limit, int(steps or 1))

    def holds(self, value: float) -> bool:
        """Whether a value meets the condition; NaN does."""
        return math.isnan(value) or bool(_COMPARISONS[self.comparison](value, self.limit))
