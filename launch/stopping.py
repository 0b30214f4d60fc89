"""Ctrl-C, SIGTERM and a closed terminal: all ranks save after the step under way, and end together.

The launcher takes these signals itself and sends its ranks SIGUSR1, so that a SIGTERM from torchrun's agent always
means that another rank is gone: it ends a rank at once, by the system's default, whatever the rank waits for. Under
plain torchrun a SIGTERM means to save, and the ranks leave shortly before torchrun would kill them.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

from megatron_rc.launch import phases
from megatron_rc.launch.ending import MESSAGES, signal_of_launcher, tell

# Signals that end a run; SIGHUP comes when the terminal is closed.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The launcher's signal to its ranks.
SAVE_AND_END = signal.SIGUSR1
# torchrun's variable for the seconds until it kills ranks, and its default.
SHUTDOWN_SECONDS = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_SHUTDOWN_DEFAULT = 30
# Seconds before that time at which ranks leave.
_EARLIER = 5.0
_STDERR = 2
_FAILURE = 1
# Bytes through the pipe of the signals; no signal has these numbers.
_END_OF_THREAD = 0
# Seconds in which a main thread that runs Python code hears a signal.
_HEARD_WITHIN = 2.0


class Stopped(Exception):
    """Raised by all ranks together after a signal to one: the rollout or evaluation under way is given up."""


class StopRequest:
    """Set by a signal; the loop looks at it between two optimizer steps.

    Attributes:
        signal: name of the first signal that came, for the launcher or for this rank; None: none.
        is_saved: the last save is made; a rank that leaves from now on loses nothing.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self.is_saved = False
        self._leave: threading.Timer | None = None

    @contextmanager
    def installed(self) -> Iterator[StopRequest]:
        """Take the signals inside the block; in the main thread."""
        numbers = (SAVE_AND_END, signal.SIGINT, signal.SIGHUP) if MESSAGES in os.environ else STOPPING
        try:
            with _heard_at_once(numbers, self._take_note):
                before = {number: signal.signal(number, lambda *_: None) for number in numbers}
                try:
                    yield self
                finally:
                    for number, handler in before.items():
                        # The system's default would end this rank, which has made its last save.
                        signal.signal(number, signal.SIG_IGN if number == SAVE_AND_END else handler)
        finally:
            if self._leave is not None:
                self._leave.cancel()

    def _take_note(self, number: signal.Signals) -> None:
        """Set the request by the first signal, say so, and without a launcher see to it that this process leaves."""
        if self.signal is not None:
            return
        self.signal = (signal_of_launcher() or number.name) if number == SAVE_AND_END else number.name
        within = ""
        if MESSAGES not in os.environ:
            patience = max(0.0, float(os.environ.get(SHUTDOWN_SECONDS, _SHUTDOWN_DEFAULT)) - _EARLIER)
            self._leave = threading.Timer(patience, self._leave_in_time, [patience])
            self._leave.daemon = True
            self._leave.start()
            within = f", if that ends within {patience:.0f} s"
        if os.environ.get("RANK") == "0":
            _write(f"\n{self.signal}: the run stops after {phases.current()}{within}\n")

    def _leave_in_time(self, patience: float) -> None:
        """End this process before torchrun kills it; say so if that costs steps."""
        if self.is_saved:
            os._exit(0)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            _write(
                f"error: {phases.current()} did not end within {patience:.0f} s of {self.signal}: steps since the "
                f"last checkpoint are lost; export {SHUTDOWN_SECONDS}=600 before the next start\n"
            )
        os._exit(_FAILURE)


@contextmanager
def signals_to_ranks(leave: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Pass the first signal that ends a run on to the ranks inside the block; for the launcher's main thread.

    Later ones have no effect. A signal that is already ignored, as under ``nohup``, stays ignored.

    Args:
        leave: ends this process; called in another thread if a signal comes while there are no ranks and the main
            thread is in compiled code, as torchrun is while it waits for other machines, for up to ten minutes.

    Raises:
        SignalException: a signal came while there were no ranks.
    """
    import psutil  # type: ignore[import-untyped]
    from torch.distributed.elastic.multiprocessing.api import SignalException

    has_come = False
    main_thread_heard = threading.Event()

    def tell_ranks(number: signal.Signals) -> None:
        """In the thread of the signals."""
        nonlocal has_come
        if has_come:
            return
        has_come = True
        # First for ranks that are started from now on, which end at once.
        tell(stop=number.name)
        ranks = psutil.Process().children()
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(SAVE_AND_END)
        if not ranks and not main_thread_heard.wait(_HEARD_WITHIN):
            leave(number)

    def end_without_ranks(number: int, _: object) -> None:
        """In the main thread."""
        is_first = not main_thread_heard.is_set()
        main_thread_heard.set()
        if is_first and not psutil.Process().children():
            raise SignalException(f"{signal.Signals(number).name} came", sigval=signal.Signals(number))

    handlers = {number: signal.getsignal(number) for number in STOPPING}
    before = {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}
    with _heard_at_once(before, tell_ranks):
        try:
            for number in before:
                signal.signal(number, end_without_ranks)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _heard_at_once(numbers: Collection[signal.Signals], hear: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call ``hear`` in a thread with each of these signals that comes inside the block; they need Python handlers.

    Python's own handlers wait until the main thread is back from compiled code, as from a collective. So the system's
    part of the handler wakes the thread through a pipe.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def listen() -> None:
        while (number := os.read(reader, 1)[0]) != _END_OF_THREAD:
            # Others, with handlers of other code, come through the pipe too.
            if number in numbers:
                hear(signal.Signals(number))

    wakeup_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup_before)
        os.write(writer, bytes([_END_OF_THREAD]))
        thread.join()
        os.close(reader)
        os.close(writer)


def _write(words: str) -> None:
    """Write to standard error, not through ``sys.stderr``, whose lock another thread may hold."""
    with suppress(OSError):  # the reader may be gone
        os.write(_STDERR, words.encode())
