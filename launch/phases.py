"""The present phase of this rank's run, in words; a process is one rank and has one phase."""

from __future__ import annotations

_current = "start-up"


def enter(name: str) -> None:
    """Begin a phase, such as "the rollout of step 3"; the phase before ends."""
    global _current
    _current = name


def current() -> str:
    """Return the present phase of this rank; from any thread."""
    return _current
