"""Messages between the launcher and its ranks about the end of the run, and processes that end with their parent.

The launcher holds the messages in memory (a file on systems other than Linux), so that neither a full nor a cleaned
folder of temporary files loses one. Under plain torchrun there is no launcher, and ranks tell nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Environment variable with the file of the messages.
MESSAGES = "MEGATRON_RC_MESSAGES"
# Environment variable with the launcher's folder for temporary files, which outlasts a killed rank.
FOLDER = "MEGATRON_RC_FOLDER"
# torchrun's number of this start of the ranks, from 0.
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
# Exit code of a run that a condition of the user's ended; such a run is never started again.
GUARD = 3
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Message:
    """A message of the launcher or of a rank."""

    attempt: int = 0  # number of times that torchrun had started the ranks again
    rank: int = -1  # number of the rank; −1: the launcher
    time: float = 0.0  # seconds since 1970
    store: tuple[str, int] | None = None  # the rank has started, and its store is at this host and port
    stop: str | None = None  # the launcher got this signal
    has_ended: bool = False  # the rank's work is done
    is_kept: bool = False  # every step is made, or a checkpoint holds the steps made
    error: str | None = None  # one sentence, if the rank failed
    code: int = 0  # the exit code that the error asks for
    is_cut_off: bool = False  # the error is that the machine of rank 0 does not answer


@contextmanager
def messages() -> Iterator[None]:
    """Receive messages inside the block, by this process and by processes that it starts; for the launcher."""
    with contextlib.ExitStack() as stack:
        if sys.platform == "linux":
            descriptor = os.memfd_create("megatron-rc-messages")
            stack.callback(os.close, descriptor)
            os.environ[MESSAGES] = f"/proc/{os.getpid()}/fd/{descriptor}"
        else:
            os.environ[MESSAGES] = stack.enter_context(tempfile.NamedTemporaryFile()).name
        try:
            yield
        finally:
            del os.environ[MESSAGES]


def tell(**fields: Any) -> bool:
    """Add a :class:`Message` with these fields; return False if there is no launcher to read it."""
    path = os.environ.get(MESSAGES)
    if path is None:
        return False
    message = Message(
        attempt=int(os.environ.get(ATTEMPT, "0")),
        rank=int(os.environ.get("RANK", "-1")),
        time=time.time(),
        **fields,
    )
    line = json.dumps(asdict(message))
    with suppress(OSError):  # the launcher has ended
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, f"{line}\n".encode())
        finally:
            os.close(descriptor)
    return True


def tell_start() -> None:
    """Tell the launcher that this rank has started, and the address of the ranks' store."""
    tell(store=(os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))))


def tell_ending(*, kept: bool) -> None:
    """Tell the launcher that this rank's work is done, and whether it is ``kept``: made, or in a checkpoint."""
    tell(has_ended=True, is_kept=kept)


def read_messages() -> list[Message]:
    """Return all messages so far, in the order in which they came."""
    path = os.environ.get(MESSAGES)
    if path is None:
        return []
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [Message(**json.loads(line)) for line in lines]


def messages_of_ranks() -> list[Message]:
    """Return the messages of this machine's ranks since their last start, in order of time."""
    told = [message for message in read_messages() if message.rank >= 0]
    newest = max((message.attempt for message in told), default=0)
    return [message for message in told if message.attempt == newest]


def signal_of_launcher() -> str | None:
    """Return the name of the first signal that the launcher got; None: none yet, or no launcher."""
    return next((message.stop for message in read_messages() if message.stop is not None), None)


def end_forks_with_this_process() -> None:
    """Let the system kill all later forks of this process when this process ends in any way.

    A checkpoint's writer that outlived its rank would hold the rank's connections open, and the other ranks would not
    see that the rank is gone.
    """
    parents: list[int] = []
    if sys.platform == "linux":
        os.register_at_fork(
            before=lambda: parents.append(os.getpid()), after_in_child=lambda: end_with_parent(parents[-1])
        )


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process, on Linux, when the thread that started it ends; end if ``parent`` has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
