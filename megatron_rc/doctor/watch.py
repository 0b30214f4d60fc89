"""The doctor in a training run: one line if its verdicts change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_rc.doctor.programs import OWN
from megatron_rc.doctor.rules import judge
from megatron_rc.doctor.series import History, facts_of_series
from megatron_rc.doctor.tables import own_row


class Watch:
    """Judges the metrics of a run every ``interval`` optimizer steps, on the process that has them; no collectives.

    ``settings`` are flags of the run without leading dashes: ``policy-loss``, ``rollout-is``, ``rollout-is-apply``,
    ``grpo-entropy-term-weight``. ``prefix`` is the prefix of the correction's metrics.
    """

    def __init__(self, interval: int, settings: Mapping[str, str], prefix: str) -> None:
        self.interval = interval
        self.settings = settings
        self.prefix = prefix
        self.history = History()
        self._verdicts: tuple[str, ...] = ()

    def step(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """Add a step's row of ``metrics.jsonl``, of which NaN and infinite numbers are ignored.

        Returns one line if a judgement is due and its verdicts have changed, else None.
        """
        row = {name: value for name, value in own_row(metrics, self.prefix).items() if math.isfinite(value)}
        if row:
            self.history.add(row | {"step": float(step)})
        if step % self.interval or not self.history.num_rows:
            return None
        facts = facts_of_series(self.history, self.settings)
        # A line speaks of the present: batches beyond a limit that lie farther back had a line of their own.
        facts["beyond_share"] = 0.0
        verdicts = judge(facts)
        names = tuple(verdict.rule.name for verdict in verdicts)
        before = self._verdicts
        if names == before:
            return None
        self._verdicts = names
        if not verdicts:
            return f"doctor after step {step}: nothing wrong between engine and trainer (before: {', '.join(before)})"
        first, *others = verdicts
        more = f" Also: {', '.join(verdict.rule.name for verdict in others)}." if others else ""
        rule = first.rule
        return f"doctor after step {step}: {rule.title} ({rule.name}): {first.words}. Do: {rule.advice_in(OWN)}.{more}"
