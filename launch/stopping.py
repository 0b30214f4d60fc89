"""Ctrl-C, SIGTERM and a closed terminal: answered with a line; the run stops when all ranks can save together."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from megatron_rc.launch import phases

# Signals that end a run; SIGHUP comes when the terminal is closed.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# torchrun's variable for the seconds until it kills ranks, and its default.
SHUTDOWN_SECONDS = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_SHUTDOWN_DEFAULT = 30
# Seconds of that time for saving and leaving.
_FOR_THE_END = 10
# An event loop drops exceptions of its callbacks, so the work is interrupted again until it ends.
_AGAIN_SECONDS = 1.0
_STDERR = 2


class Stopped(Exception):
    """Raised by all ranks together after a signal to one: the rollout or evaluation under way is given up."""


class Interrupted(BaseException):
    """Raised by a signal inside :meth:`StopRequest.interrupts`; a BaseException, so that no engine catches it."""


class StopRequest:
    """Set by a signal of :data:`STOPPING`; the loop looks at it between two optimizer steps."""

    def __init__(self) -> None:
        self.signal: str | None = None  # name of the first that came
        self.longest = 0.0  # seconds of the longest step so far
        self._interrupts, self._answers = False, True

    def __call__(self, number: int, _: FrameType | None) -> None:
        """Take note of the signal; it can arrive more than once."""
        is_first, self.signal = self.signal is None, signal.Signals(number).name
        if is_first and self._answers and not self._interrupts and os.environ.get("RANK") == "0":
            # Not through sys.stderr, which this may have interrupted.
            with suppress(OSError):  # the reader may be gone
                os.write(_STDERR, self._answer().encode())
        if self._interrupts:
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS, _AGAIN_SECONDS)
            raise Interrupted

    def took(self, times: Mapping[str, float]) -> None:
        """Take note of a step's duration: scoring pass, update and save."""
        seconds = sum(times.get(f"perf/{part}_seconds", 0.0) for part in ("plan", "update", "save"))
        self.longest = max(self.longest, seconds)

    @contextmanager
    def installed(self) -> Iterator[StopRequest]:
        """Handle the signals of :data:`STOPPING` inside the block.

        After an error the handlers stay, so that torchrun's SIGTERM does not cut off the error's message: see
        :func:`leaves_by_sigterm`.
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
        """Let a signal interrupt the work inside at once, also a signal that came before; in the main thread.

        Raises:
            Interrupted: a signal came.
            TimeoutError: the work took more than ``limit`` seconds; ``words`` is its message.
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
            # The exception may have been wrapped on the way, as by a group of tasks.
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
        """Return the answer to the signal, with advice if torchrun would kill the ranks too early."""
        phase, now = phases.current(), time.time()
        lasting, patience = now - phase.since, float(os.environ.get(SHUTDOWN_SECONDS, _SHUTDOWN_DEFAULT))
        longest = max(self.longest, lasting)
        words = f"\n{self.signal}: the run stops after {phase.name}"
        if longest + _FOR_THE_END > patience:
            enough = (int(2 * longest + 60) // 60 + 1) * 60  # whole minutes
            words += (
                f", which has been under way for {lasting:.0f} s; a step can take {longest:.0f} s, and torchrun kills "
                f"ranks {patience:.0f} s after a signal: export {SHUTDOWN_SECONDS}={enough} before the next start"
            )
        return f"{words}\n"


@contextmanager
def first_signal() -> Iterator[None]:
    """End the ranks at the first signal inside this block; ignore later signals.

    A signal that is already ignored, as under ``nohup``, stays ignored.

    Raises:
        SignalException: a signal came.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    def end(number: int, _: object) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        raise SignalException(f"{signal.Signals(number).name} came", sigval=signal.Signals(number))

    handlers = {number: signal.getsignal(number) for number in STOPPING}
    before = {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, end)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leaves_by_sigterm() -> bool:
    """Whether SIGTERM has come since the run failed; from now on SIGTERM ends this process."""
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return isinstance(handler, StopRequest) and handler.signal == "SIGTERM"
