"""Runs of the study, a few at a time; runs that a data file has are not repeated."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.study.design import GAVE_UP, ROOT, Run
from benchmarks.study.results import Outcome, measured, read, write
from megatron_rc.launch.training.checks.folder_locks import lock

LOG = "log.txt"


class StudyError(RuntimeError):
    """The study cannot go on; the message is one sentence with the remedy."""


def missing(runs: Sequence[Run], data: Path) -> list[Run]:
    """The runs that a data file does not have.

    Raises:
        StudyError: it has one that was made with other flags.
    """
    made = {outcome.key: outcome.flags for outcome in read(data)}
    for run in runs:
        if made.get(run.key, " ".join(run.flags)) != " ".join(run.flags):
            raise StudyError(f"{data} has {run.name} with other flags than the study now: remove it, or give --data")
    return [run for run in runs if run.key not in made]


def run_all(
    runs: Sequence[Run],
    data: Path,
    folder: Path,
    at_once: int,
    say: Callable[[str], None],
    model: Path | None = None,
) -> None:
    """Make the runs that a data file lacks, in the given order, and add each to the file as soon as it ends.

    Args:
        runs: the runs.
        data: the data file.
        folder: folder of the runs' own folders; an earlier try's folder is removed.
        at_once: number of runs at the same time.
        say: called with a line at every end of a run.
        model: folder of the model, for settings that need one.

    Raises:
        StudyError: a run was killed, or its flags cannot work. Other running ones are ended and will be run again.
        RunError: another process makes runs in the folder.
    """
    with ExitStack() as stack:
        lock(f"--runs {folder}", folder, stack)
        _run_all(runs, data, folder, at_once, say, model)


def _run_all(
    runs: Sequence[Run], data: Path, folder: Path, at_once: int, say: Callable[[str], None], model: Path | None
) -> None:
    waiting = missing(runs, data)
    total = len(waiting)
    begun = time.monotonic()
    say(f"{len(runs) - total} of {len(runs)} runs are in {data}, {total} to go, {at_once} at a time")
    under_way: dict[Run, subprocess.Popen[bytes]] = {}
    commits: dict[Run, str] = {}
    try:
        while waiting or under_way:
            while waiting and len(under_way) < at_once:
                run = waiting.pop(0)
                # Each process imports the code of its start, and hours may be between the first and the last.
                commits[run] = _commit()
                under_way[run] = _start(run, folder, model)
            time.sleep(0.2)
            for run, process in list(under_way.items()):
                outcome = _end(run, process, folder, commits[run])
                if outcome is None:
                    continue
                del under_way[run]
                earlier = [other for other in read(data) if other.key != outcome.key]
                write([*earlier, outcome], data)
                made = total - len(waiting) - len(under_way)
                left = (time.monotonic() - begun) / made * (total - made) / 60
                how = "finished" if outcome.error is None else f"ended: {outcome.error}"
                say(f"{made}/{total} {run.name} {how}, {outcome.seconds:.0f} s of processor; about {left:.0f} min left")
    finally:
        for process in under_way.values():
            process.terminate()
            process.wait()


def _commit() -> str:
    """The commit of this code, with a + if files outside of docs/ differ from it; empty outside of a repository."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs")
    return git("rev-parse", "--short", "HEAD") + "+" * bool(changed)


def _start(run: Run, folder: Path, model: Path | None) -> subprocess.Popen[bytes]:
    run_folder = folder / run.name
    # Nothing of an earlier try may be measured. No other queue can be using it, because this one has the folder's lock.
    if run_folder.exists():
        shutil.rmtree(run_folder)
    run_folder.mkdir(parents=True)
    # The folder is no part of the data's flags, because it depends on the machine.
    of_model = [f"--load-hf={model}"] if run.setting.needs_model else []
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with (run_folder / LOG).open("w", encoding="utf-8") as log:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.study.trainer", *run.flags, *of_model),
                *(f"--runs-dir={folder}", f"--run-name={run.name}"),
            ],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _end(run: Run, process: subprocess.Popen[bytes], folder: Path, commit: str) -> Outcome | None:
    """The outcome of a run that has ended; None while it runs."""
    number, status, used = os.wait4(process.pid, os.WNOHANG)
    if not number:
        return None
    process.returncode = os.waitstatus_to_exitcode(status)
    run_folder = folder / run.name
    log = (run_folder / LOG).read_text(encoding="utf-8", errors="replace")
    lines = [line for line in log.splitlines() if line.strip()]
    last = lines[-1] if lines else "it said nothing"
    error = last if process.returncode else None
    outcome = None
    if process.returncode in (0, GAVE_UP):
        outcome = measured(run, run_folder, commit, round(used.ru_utime + used.ru_stime, 1), error)
    if outcome is None:
        raise StudyError(
            f"{run.name} ended with code {process.returncode} ({last}): see {run_folder / LOG}, then start again"
        )
    return outcome
