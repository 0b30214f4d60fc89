"""Messages from ranks to the launcher about their ends: a small file each, in a folder that the launcher names.

Under plain torchrun there is no such folder, and ranks write nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDER = "MEGATRON_RC_ENDINGS"
# Environment variable of a reward's worker and of all processes that it starts: the folder and the trainer's number.
SCORES_FOR = "MEGATRON_RC_SCORES_FOR"
_PR_SET_PDEATHSIG = 1
# torchrun's number of this start of the ranks, from 0.
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
# Exit code of a run that a condition of the user's ended; such a run is never started again.
GUARD = 3


@dataclass(frozen=True)
class Ending:
    """A rank's message about its end."""

    rank: int  # its number
    attempt: int  # number of times that torchrun had started the ranks again
    time: float  # time of the end, in seconds since 1970
    kept: bool = True  # every step is made, or a checkpoint holds the steps made
    error: str | None = None  # one sentence, if the rank failed
    code: int = 0  # the exit code that the error asks for
    lost: int | None = None  # another rank that the error is about
    lost_in: str = ""  # machine and phase of that rank at its last beat


def tell_start() -> None:
    """Tell the launcher that the ranks are started (again), and their store's address; earlier starts count no more."""
    if os.environ.get(FOLDER):
        place = f"{os.environ.get('MASTER_ADDR', '')} {os.environ.get('MASTER_PORT', '')}"
        (Path(os.environ[FOLDER]) / f"{os.environ.get(ATTEMPT, '0')}.start").write_text(place, encoding="utf-8")


def tell_ending(**fields: Any) -> bool:
    """Write an :class:`Ending` with these fields for the launcher; return False if there is no launcher."""
    folder = os.environ.get(FOLDER)
    if folder:
        rank, attempt = (int(os.environ.get(name, "0")) for name in ("RANK", ATTEMPT))
        ending = Ending(rank, attempt, time.time(), **fields)
        partial = Path(folder) / f"{attempt}-{rank}.partial"
        partial.write_text(json.dumps(asdict(ending)), encoding="utf-8")
        partial.replace(partial.with_suffix(".json"))
    return bool(folder)


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


def mark_of_scores(trainer: int | None = None) -> str:
    """Return the value of :data:`SCORES_FOR` for a trainer; None: the common beginning of this run's values."""
    return f"{os.environ.get(FOLDER, '')}:{'' if trainer is None else f'{trainer}:'}"


def end_what_scores(mark: str) -> None:
    """Kill processes that rewards started and left, also in sessions of their own; needs ``/proc``.

    Their environment has :data:`SCORES_FOR`, which begins with ``mark``.
    """
    wanted = f"{SCORES_FOR}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # of another user, or just ended
            if any(entry.startswith(wanted) for entry in path.read_bytes().split(b"\0")):
                os.kill(int(path.parent.name), signal.SIGKILL)


def read_endings(folder: Path) -> list[Ending]:
    """Return the endings of this machine's ranks since their last start, in order of time."""
    told = [Ending(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("*.json")]
    newest = _newest_start(folder)
    return sorted((ending for ending in told if ending.attempt == newest), key=lambda ending: ending.time)


def read_store(folder: Path) -> tuple[int, str, int] | None:
    """Return the number of the ranks' last start, and host and port of their store; None: not written."""
    newest = _newest_start(folder)
    try:
        host, port = (folder / f"{newest}.start").read_text(encoding="utf-8").split()
        return newest, host, int(port)
    except (OSError, ValueError):
        return None


def _newest_start(folder: Path) -> int:
    return max((int(path.stem) for path in folder.glob("*.start")), default=0)
