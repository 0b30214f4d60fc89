"""Steps that were not made, counted over the runs that go on from each other's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

_NAME = "left_out"


@dataclass
class LeftOut:
    """Numbers of steps, equal on all ranks.

    Attributes:
        steps: that were not made: no token was accepted, none had a weight, none had an advantage, or they were bad.
        bad: the bad ones among them.
        without_signal: those without an advantage among them (``--skip-steps-without-signal``).
        in_a_row: the last ones, made or not, that left the model as it was.
    """

    steps: int = 0
    bad: int = 0
    without_signal: int = 0
    in_a_row: int = 0

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {_NAME: asdict(self)}

    def load(self, loaded: Mapping[str, Any]) -> None:
        """From a checkpoint; one that was written before they were counted says nothing."""
        for name, number in loaded.get(_NAME, {}).items():
            setattr(self, name, int(number))
