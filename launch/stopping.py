"""Ctrl-C, SIGTERM, a closed terminal: noted, answered with a line, and heeded where all ranks can save together."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from megatron_rc.launch import phases

# What is sent to end a run; the last one when its terminal is closed.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# torchrun's, and what it waits by default.
SHUTDOWN_SECONDS = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_SHUTDOWN_DEFAULT = 30
# A rank needs some of that time to save and to leave.
_FOR_THE_END = 10
# An event loop drops what is raised in one of its callbacks: the work is interrupted again until it ends.
_AGAIN_SECONDS = 1.0
_STDERR = 2


class Stopped(Exception):
    """Raised by all ranks together: one was told to stop, and what was under way is given up."""


class Interrupted(BaseException):
    """Raised by a signal inside :meth:`StopRequest.interrupts`; no engine takes it for an error of its own."""


class StopRequest:
    """Set by a signal of :data:`STOPPING`; the loop looks at it between two optimizer steps.

    Attributes:
        signal: name of the first that came.
        longest: seconds of the longest step so far.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self.longest = 0.0
        self._interrupts, self._answers = False, True

    def __call__(self, number: int, _: FrameType | None) -> None:
        """Take note of the signal; it can arrive more than once."""
        is_first, self.signal = self.signal is None, signal.Signals(number).name
        if is_first and self._answers and not self._interrupts and os.environ.get("RANK") == "0":
            # Not by sys.stderr, in the midst of whose work this may run.
            with suppress(OSError):  # whoever listened may be gone
                os.write(_STDERR, self._answer().encode())
        if self._interrupts:
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS, _AGAIN_SECONDS)
            raise Interrupted

    def took(self, times: Mapping[str, float]) -> None:
        """What a step took by its metrics: the pass before it, itself, and a save after it."""
        seconds = sum(times.get(f"perf/{part}_seconds", 0.0) for part in ("plan", "update", "save"))
        self.longest = max(self.longest, seconds)

    @contextmanager
    def installed(self) -> Iterator[StopRequest]:
        """Handle these signals inside the block, as before after it.

        After an error this goes on, so that torchrun, which ends the ranks when one fails, does not cut off what is
        said: see :func:`leaves_by_sigterm`.
        """
        before = {number: signal.signal(number, self) for number in STOPPING}
        try:
            yield self
        except BaseException:
            self._answers = False
            raise
        for number, handler in before.items():
            signal.signal(number, handler)

    @contextmanager
    def interrupts(self, limit: float, words: str) -> Iterator[None]:
        """Work that a signal ends at once, also one that came before; in the main thread.

        Args:
            limit: seconds after which the work is given up too.
            words: what is said then.

        Raises:
            Interrupted: a signal came.
            TimeoutError: the limit is over.
        """
        is_late = False

        def expire(*_: Any) -> None:
            nonlocal is_late
            is_late = True
            raise Interrupted

        handler = signal.signal(signal.SIGALRM, expire)
        began, timer = time.monotonic(), signal.setitimer(signal.ITIMER_REAL, limit, _AGAIN_SECONDS)
        self._interrupts = True
        try:
            if self.signal is not None:
                raise Interrupted
            yield
        except BaseException as error:
            # Whatever became of it on the way: a group of tasks wraps it, for one.
            if self.signal is not None:
                raise Interrupted from error
            if is_late:
                raise TimeoutError(words) from error
            raise
        finally:
            self._interrupts = False
            left = max(timer[0] - (time.monotonic() - began), 1e-3) if timer[0] else 0.0
            signal.setitimer(signal.ITIMER_REAL, left)
            signal.signal(signal.SIGALRM, handler)

    def _answer(self) -> str:
        """What the signal is answered with, and whether torchrun may be too impatient."""
        phase = phases.current()
        words = f"\n{self.signal}: the run stops after {phase.name}"
        try:
            patience = float(os.environ.get(SHUTDOWN_SECONDS, _SHUTDOWN_DEFAULT))
        except ValueError:
            patience = _SHUTDOWN_DEFAULT
        lasting = time.time() - phase.since
        longest = max(self.longest, lasting)
        if longest + _FOR_THE_END > patience:
            words += (
                f", which has been under way for {lasting:.0f} s; a step can take {longest:.0f} s, and torchrun kills "
                f"ranks {patience:.0f} s after a signal: export {SHUTDOWN_SECONDS}={_enough(longest)} before the next "
                "start"
            )
        return f"{words}\n"


def leaves_by_sigterm() -> bool:
    """Whether SIGTERM has come since a run failed; from now on it ends this process."""
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return isinstance(handler, StopRequest) and handler.signal == "SIGTERM"


def _enough(seconds: float) -> int:
    """Seconds that a step and a save fit into, as a round number."""
    return (int(2 * seconds + 60) // 60 + 1) * 60
