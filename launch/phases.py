"""The present phase of this rank's run; a process is one rank and has one phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Phase:
    """A part of a run."""

    name: str  # name in words, as in "rank 0 is in the rollout of step 3"
    engine: str = ""  # the engine that this rank waits for; may be empty
    waits: bool = False  # this rank meets the other ranks in collectives, and works for none of them alone
    since: float = field(default_factory=time.time)  # time of its beginning, in seconds since 1970

    def __str__(self) -> str:
        return f"in {self.name} since {clock(self.since)}"


_current = Phase("start-up")


def enter(name: str, *, engine: str = "", waits: bool = False) -> None:
    """Begin a phase; the phase before ends."""
    global _current
    _current = Phase(name, engine, waits)


@contextmanager
def waiting() -> Iterator[None]:
    """Say inside the block that this rank waits in a collective; after an error the phase says so still."""
    global _current
    before, _current = _current, replace(_current, waits=True)
    yield
    _current = before


def current() -> Phase:
    """Return the present phase of this rank; from any thread."""
    return _current


def clock(seconds: float) -> str:
    """Return a time in seconds since 1970 as local HH:MM:SS."""
    return time.strftime("%H:%M:%S", time.localtime(seconds))
