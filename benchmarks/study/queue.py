"""Runs of the study, a few at a time; finished runs are not repeated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.study.settings import GAVE_UP, ROOT, Run

DONE, LOG = "done.json", "log.txt"


class StudyError(RuntimeError):
    """The study cannot go on; the message is one sentence with the remedy."""


@dataclass(frozen=True)
class Done:
    """The record of a finished run in its folder, besides its metrics.

    Attributes:
        flags: the launcher's flags.
        seconds: processor time, user's and system's, of the run and all its processes.
        error: the error that ended it before its last step, or None.
    """

    flags: list[str]
    seconds: float
    error: str | None = None


def finished(run: Run, folder: Path) -> Done | None:
    """The record of a run, or None if it was not finished.

    Raises:
        StudyError: it was finished with other settings.
    """
    path = folder / run.name / DONE
    if not path.is_file():
        return None
    done = Done(**json.loads(path.read_text(encoding="utf-8")))
    if done.flags != run.flags:
        raise StudyError(f"{path.parent} was run with other flags than the study has now: remove it, or give --runs")
    return done


def run_all(runs: Sequence[Run], folder: Path, at_once: int, say: Callable[[str], None]) -> None:
    """Run all unfinished runs, in the given order; ``say`` is told of every end.

    Raises:
        StudyError: a run was killed, or its flags cannot work. Other running ones are ended and will be run again.
    """
    waiting = [run for run in runs if finished(run, folder) is None]
    total, begun = len(waiting), time.monotonic()
    say(f"{len(runs) - total} of {len(runs)} runs are finished, {total} to go, {at_once} at a time")
    under_way: dict[Run, subprocess.Popen[bytes]] = {}
    try:
        while waiting or under_way:
            while waiting and len(under_way) < at_once:
                run = waiting.pop(0)
                under_way[run] = _start(run, folder)
            time.sleep(0.2)
            for run, process in list(under_way.items()):
                done = _end(run, process, folder)
                if done is None:
                    continue
                del under_way[run]
                made = total - len(waiting) - len(under_way)
                left = (time.monotonic() - begun) / made * (total - made) / 60
                how = "finished" if done.error is None else f"ended: {done.error}"
                say(f"{made}/{total} {run.name} {how}, {done.seconds:.0f} s of processor; about {left:.0f} min left")
    finally:
        for process in under_way.values():
            process.terminate()
            process.wait()


def _start(run: Run, folder: Path) -> subprocess.Popen[bytes]:
    own = folder / run.name
    own.mkdir(parents=True, exist_ok=True)
    place = [f"--runs-dir={folder}", f"--run-name={run.name}"]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with (own / LOG).open("w", encoding="utf-8") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.study.trainer", *run.flags, *place],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _end(run: Run, process: subprocess.Popen[bytes], folder: Path) -> Done | None:
    """The record of a run that has ended, written to its folder; None while it runs."""
    number, status, used = os.wait4(process.pid, os.WNOHANG)
    if not number:
        return None
    process.returncode = os.waitstatus_to_exitcode(status)
    own = folder / run.name
    lines = [line for line in (own / LOG).read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    last = lines[-1] if lines else "it said nothing"
    if process.returncode not in (0, GAVE_UP):
        raise StudyError(f"{run.name} ended with code {process.returncode} ({last}): see {own / LOG}, then start again")
    error = last if process.returncode else None
    done = Done(run.flags, round(used.ru_utime + used.ru_stime, 1), error)
    (own / DONE).write_text(json.dumps(asdict(done), indent=1), encoding="utf-8")
    return done
