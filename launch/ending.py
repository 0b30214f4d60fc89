"""How a rank ended, told to the launcher that started it: a small file each, in a folder that the launcher names.

Ranks that plain torchrun started have no such folder, and tell nothing.
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

FOLDER = "MEGATRON_RC_ENDINGS"
# What each process that scores, and all that it starts, has in its environment: the folder and the trainer's number.
SCORES_FOR = "MEGATRON_RC_SCORES_FOR"
_PR_SET_PDEATHSIG = 1
# torchrun's number of this start of the ranks, from 0.
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
# Exit code of a run that a condition of the user's ended: it is meant, and never started again.
GUARD = 3


@dataclass(frozen=True)
class Ending:
    """What a rank knew when it ended.

    Attributes:
        rank: which.
        attempt: how often torchrun had started the ranks again.
        time: when, in seconds since 1970.
        kept: every step is made, or a checkpoint holds those that were.
        error: one sentence, if it failed.
        code: the exit code that the error asks for.
        lost: the rank that the error is about, if that is another one.
        lost_in: where that one was and what it did, when it was last heard of.
    """

    rank: int
    attempt: int
    time: float
    kept: bool = True
    error: str | None = None
    code: int = 0
    lost: int | None = None
    lost_in: str = ""


def tell_start() -> None:
    """Tell the launcher that the ranks are started (again) and where their store is; earlier starts no longer count."""
    if os.environ.get(FOLDER):
        place = f"{os.environ.get('MASTER_ADDR', '')} {os.environ.get('MASTER_PORT', '')}"
        (Path(os.environ[FOLDER]) / f"{os.environ.get(ATTEMPT, '0')}.start").write_text(place, encoding="utf-8")


def tell_ending(
    *, kept: bool = True, error: str | None = None, code: int = 0, lost: int | None = None, lost_in: str = ""
) -> bool:
    """Leave word for the launcher, see :class:`Ending`; whether there is one that reads it."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return False
    rank, attempt = int(os.environ.get("RANK", "0")), int(os.environ.get(ATTEMPT, "0"))
    ending = Ending(rank, attempt, time.time(), kept, error, code, lost, lost_in)
    partial = Path(folder) / f"{attempt}-{rank}.partial"
    partial.write_text(json.dumps(asdict(ending)), encoding="utf-8")
    partial.replace(partial.with_suffix(".json"))
    return True


def end_forks_with_this_process() -> None:
    """Let the system kill what this process forks from now on, when this process ends in whatever way.

    A checkpoint's writer that outlived its rank would hold the rank's connections open: the other ranks would not see
    that it is gone.
    """
    if sys.platform == "linux":
        libc, parent = ctypes.CDLL(None), os.getpid()

        def note_parent() -> None:
            nonlocal parent
            parent = os.getpid()

        def follow_parent() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it ended before the system knew
                os._exit(1)

        os.register_at_fork(before=note_parent, after_in_child=follow_parent)


def mark_of_scores(trainer: int | None = None) -> str:
    """The value of :data:`SCORES_FOR` for a trainer; without one, the beginning of all values of this run."""
    return f"{os.environ.get(FOLDER, '')}:{'' if trainer is None else f'{trainer}:'}"


def end_what_scores(mark: str) -> None:
    """Kill processes that rewards started and left, in sessions of their own too, where the system lists processes.

    Args:
        mark: the value of :data:`SCORES_FOR` in their environment, or how it begins.
    """
    wanted = f"{SCORES_FOR}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # of another user, or just ended
            if any(entry.startswith(wanted) for entry in path.read_bytes().split(b"\0")):
                os.kill(int(path.parent.name), signal.SIGKILL)


def read_endings(folder: Path) -> list[Ending]:
    """What the ranks of this machine told of their last start, in the order in which they ended."""
    told = [Ending(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("*.json")]
    newest = _newest_start(folder)
    return sorted((ending for ending in told if ending.attempt == newest), key=lambda ending: ending.time)


def read_store(folder: Path) -> tuple[int, str, int] | None:
    """Return the number of the ranks' last start, and the host and port of their store; None: no rank told them."""
    newest = _newest_start(folder)
    try:
        host, port = (folder / f"{newest}.start").read_text(encoding="utf-8").split()
        return newest, host, int(port)
    except (OSError, ValueError):
        return None


def _newest_start(folder: Path) -> int:
    return max((int(path.stem) for path in folder.glob("*.start")), default=0)
