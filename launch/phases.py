"""What this rank is doing: a phase of the run, entered where it begins. A process is one rank, and has one phase."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Phase:
    """A part of a run.

    Attributes:
        name: in words, as in "rank 0 is in the rollout of step 3".
        engine: what a rollout or an evaluation waits for on this rank, if anything.
        waits: this rank is through, and waits for others.
        since: when it began, in seconds since 1970.
    """

    name: str
    engine: str = ""
    waits: bool = False
    since: float = field(default_factory=time.time)


_current = Phase("start-up")


def enter(name: str, *, engine: str = "", waits: bool = False) -> None:
    """Begin a phase, which ends the one before."""
    global _current
    _current = Phase(name, engine, waits)


def current() -> Phase:
    """The phase that this rank is in; from any thread."""
    return _current


def clock(seconds: float) -> str:
    """A time since 1970 as a clock on the wall shows it."""
    return time.strftime("%H:%M:%S", time.localtime(seconds))
