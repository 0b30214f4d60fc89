"""The present phase of this rank's run; a process is one rank and has one phase."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Phase:
    """A part of a run.

    Attributes:
        name: in words, as in "rank 0 is in the rollout of step 3".
        engine: the engine that this rank waits for; may be empty.
        waits: this rank is ready and waits for other ranks.
        since: time of its beginning, in seconds since 1970.
    """

    name: str
    engine: str = ""
    waits: bool = False
    since: float = field(default_factory=time.time)


_current = Phase("start-up")


def enter(name: str, *, engine: str = "", waits: bool = False) -> None:
    """Begin a phase; the phase before ends."""
    global _current
    _current = Phase(name, engine, waits)


def current() -> Phase:
    """Return the present phase of this rank; from any thread."""
    return _current


def clock(seconds: float) -> str:
    """Return a time in seconds since 1970 as local HH:MM:SS."""
    return time.strftime("%H:%M:%S", time.localtime(seconds))
