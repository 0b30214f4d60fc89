"""A line about a run whose rewards are all equal, so that nothing can be learned from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from megatron_rc.launch.rewards.rewarder import source_of
from megatron_rc.launch.run_config import RunConfig

# Rollout batches in a row whose rewards all have one value.
BATCHES = 20
_SHOWN = 120


class EqualRewards:
    """Looks at each rollout batch's largest and smallest reward over all replicas; on the rank that reports.

    The line is said once. A run that goes on from a checkpoint counts the batches before it.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._value: float | None = None  # reward of all responses of the newest batches; None: they differ
        self._batches = 0  # number of these batches
        self._has_said = False

    def go_on(self, rows: Iterable[Mapping[str, float]], iteration: int) -> None:
        """Count the batches before a checkpoint, from the rows of ``metrics.jsonl`` up to step ``iteration``."""
        steps_of_batch = self.config.updates_per_rollout
        for row in rows:
            is_first_of_batch = int(row["step"]) % steps_of_batch == 1 % steps_of_batch
            if is_first_of_batch and row["step"] <= iteration and "reward/max" in row:
                self._count(row)

    def batch(self, metrics: Mapping[str, float], response: Callable[[], str]) -> str | None:
        """Count a batch by its metrics; return the line if it is due.

        ``response`` returns the text of one of its responses.
        """
        if not self._count(metrics):
            return None
        text = response()
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"
        return (
            f"all rewards of the last {BATCHES} rollout batches are {self._value:g}, and nothing can be learned from "
            f"equal rewards: look at {self._causes()}, and at the responses, such as {shown!r}"
        )

    def _count(self, metrics: Mapping[str, float]) -> bool:
        """Count a batch; return whether it is the first that makes the line due."""
        largest = metrics["reward/max"]
        smallest = metrics["reward/min"]
        is_equal = largest == smallest
        if is_equal and largest == self._value:
            self._batches += 1
        else:
            self._value = largest if is_equal else None
            self._batches = int(is_equal)
        is_due = self._batches >= BATCHES and not self._has_said
        self._has_said = self._has_said or is_due
        return is_due

    def _causes(self) -> str:
        """Sources of the rewards, with the flags that name them."""
        if self.config.rollouts.load_rollouts:
            return f"the records in --load-rollouts {self.config.rollouts.load_rollouts}"
        rule = source_of(self.config).name
        if self.config.data.prompt_data:
            return f"the labels (--label-key {self.config.data.label_key}), at the rule that scores ({rule})"
        return f"the rule that scores ({rule})"
