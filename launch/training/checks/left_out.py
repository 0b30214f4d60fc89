"""Counts of steps that were not made; checkpoints carry them from run to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

_NAME = "left_out"


@dataclass
class LeftOut:
    """Numbers of steps, equal on all ranks.

    Attributes:
        steps: steps that were not made, without an accepted token, a weight or an advantage, or bad.
        bad: bad steps among them.
        without_signal: steps without an advantage among them (``--skip-steps-without-signal``).
        in_a_row: last steps, made or not, that did not change the model.
    """

    steps: int = 0
    bad: int = 0
    without_signal: int = 0
    in_a_row: int = 0

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {_NAME: asdict(self)}

    def load(self, loaded: Mapping[str, Any]) -> None:
        """Restore the counts from a checkpoint; older checkpoints have none."""
        for name, number in loaded.get(_NAME, {}).items():
            setattr(self, name, int(number))
