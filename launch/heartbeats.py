"""Heartbeats: a thread of each rank writes the rank's phase to torchrun's store every second; silent ranks are named.

Beyond 4096 ranks the beats are rarer, since one store takes them all. There is no collective, and no step waits. Rank
0 watches all others, rank 1 watches rank 0. Silence is counted in looks of the watching rank, so that a job that was
suspended as a whole goes on. Each rank also watches the processes of its machine, and ends within a beat or two when
one is gone; torchrun's SIGTERM alone would let it wait until it is killed. The launcher tells ranks of other machines.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from megatron_rc.launch import phases
from megatron_rc.launch.ending import ATTEMPT, read_store
from megatron_rc.launch.phases import clock

BEAT_SECONDS = 1.0
# One store takes about 30,000 writes a second, and also serves the ranks' addresses.
_BEATS_A_SECOND = 4096
LINE_SECONDS = 30.0
# Missed beats after which a rank counts as silent, for a rank that has just lost a connection.
_MISSED = 4
# The key of the rank that all others are to end for.
_OVER = "over"
_TELL_SECONDS = 3
_GONE = "its process is dead, stopped or cut off"
_DISTRIBUTED = str(Path("torch", "distributed")) + os.sep


@dataclass(frozen=True)
class Beat:
    """A rank's report of itself.

    Attributes:
        count: number of its reports.
        host: its machine.
        process: its process number there.
        phase: name of its phase.
        since: beginning of the phase, in seconds since 1970.
        engine: the engine that it waits for; may be empty.
        waits: it waits for other ranks.
        end: empty, ``ended`` or ``failed``.
    """

    count: int
    host: str
    process: int
    phase: str
    since: float
    engine: str
    waits: bool
    end: str = ""

    @property
    def doing(self) -> str:
        """The phase and its beginning, in words."""
        return f"in {self.phase} since {clock(self.since)}"


@dataclass(frozen=True)
class Missed:
    """A rank that keeps the others waiting.

    Attributes:
        rank: its number.
        last_seen: its machine and phase, in words.
        words: one sentence.
    """

    rank: int
    last_seen: str
    words: str


@dataclass
class _Heard:
    """One rank's knowledge of another: the last beat, its time, and the number of looks without a new one."""

    rank: int
    beat: Beat
    time: float
    missed: int = 0

    @property
    def where(self) -> str:
        """Rank and machine."""
        return f"rank {self.rank} on {self.beat.host}"

    @property
    def silence(self) -> str:
        """The silence of this rank, in words."""
        return f"{self.where} has not answered since {clock(self.time)}, {self.beat.doing}"

    @property
    def is_silent(self) -> bool:
        """Whether it counts as silent in a search for the culprit."""
        return self.missed >= _MISSED - 1

    @property
    def dead(self) -> Missed:
        """This rank as one whose process is gone."""
        return self.blamed(f"{self.where} is gone, {self.beat.doing}: its process {self.beat.process} has ended")

    @property
    def failed(self) -> Missed:
        """This rank as one that met an error alone."""
        return self.blamed(f"{self.where} failed {self.beat.doing}: see what it said")

    def blamed(self, words: str) -> Missed:
        """Return this rank as the one that others wait for."""
        return Missed(self.rank, f"on {self.beat.host}, {self.beat.doing}", words)


class Heartbeats:
    """The thread that reports this rank; it also watches others on ranks 0 and 1.

    Args:
        limit: seconds of silence that end the run; the time limit of collectives.
        end: ends this process because of another rank.

    Attributes:
        every: seconds between two beats.
    """

    def __init__(self, limit: float, end: Callable[[Missed], NoReturn]) -> None:
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.every = BEAT_SECONDS * max(1.0, self.world / _BEATS_A_SECOND)
        self.limit, self._end = limit, end
        self.heard: dict[int, _Heard] = {}
        self._store: Any = None
        self._count, self._over = 0, threading.Event()
        self._lines: dict[int, float] = {}
        first = self.rank - int(os.environ.get("LOCAL_RANK", "0"))
        here = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self._neighbours = [rank for rank in here if rank != self.rank]
        self._processes: dict[int, int] = {}
        self._thread = threading.Thread(target=self._work, name="heartbeats", daemon=True)

    def start(self) -> None:
        """Begin, by a connection of its own to torchrun's store."""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # A late answer must not hold up the end of the run.
        self._store = _store(int(os.environ.get(ATTEMPT, "0")), host, port, self.limit)
        self._tell()
        self._thread.start()

    def close(self, *, failed: bool = False) -> None:
        """End the thread; report that this rank ended, or failed by an error of its own."""
        self._stop()
        try:
            if self._store is not None:
                self._tell("failed" if failed else "ended")
        except RuntimeError:
            pass  # the store is gone, and so are the readers

    def who_is_missed(self, error: BaseException) -> Missed | None:
        """Return the rank that others wait for, after a collective of this rank failed.

        Takes a few beats, in which living ranks report. None: the error is none of a collective, or no rank stands
        out.
        """
        if self._store is None or not _waits(traceback.extract_tb(error.__traceback__)):
            return None
        self._stop()
        try:
            self._tell("ended")
            for _ in range(_MISSED):
                self._look()
                time.sleep(self.every)
            self._look()
        except RuntimeError:
            return None
        return self._culprit()

    def is_first_alive(self) -> bool:
        """Whether all ranks below this one are gone."""
        gone = {rank for rank, heard in self.heard.items() if heard.is_silent or heard.beat.end == "failed"}
        return all(rank in gone for rank in range(self.rank))

    def _culprit(self) -> Missed | None:
        others = [heard for _, heard in sorted(self.heard.items()) if heard.beat.end != "ended"]
        for heard in others:
            if heard.beat.end == "failed":
                return heard.failed
        for heard in others:
            if heard.is_silent:
                return heard.blamed(f"{heard.silence}: {_GONE}")
        for heard in others:
            if not heard.beat.waits:
                return heard.blamed(f"{heard.where} did not come to where the others wait: it is {heard.beat.doing}")
        return None

    def _stop(self) -> None:
        """Stop the thread, so that no beat follows this rank's last report."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(_MISSED * self.every)

    def _work(self) -> None:
        try:
            while not self._over.wait(self.every):
                self._tell()
                self._watch_processes()
                self._watch_other_machines()
                if self.rank < 2:
                    self._look()
                    self._watch()
        except RuntimeError:
            pass  # the store is gone: torchrun has ended, or ends this process

    def _tell(self, end: str = "") -> None:
        self._count += 1
        phase = phases.current()
        waits = phase.waits or _is_in_collective()
        doing = phase.name, phase.since, phase.engine, waits
        beat = Beat(self._count, socket.gethostname(), os.getpid(), *doing, end)
        self._store.set(str(self.rank), json.dumps(asdict(beat)))

    def _watch_processes(self) -> None:
        """End this rank if the process of another one of its machine is gone before its work was done."""
        for rank in self._neighbours:
            if rank not in self._processes and self._store.check([str(rank)]):
                self._processes[rank] = self._told_by(rank).process
            if rank in self._processes and not _is_there(self._processes[rank]):
                # Its last report may be newer than the last look.
                heard = _Heard(rank, self._told_by(rank), time.time())
                if heard.beat.end != "ended":
                    self._end(heard.failed if heard.beat.end else heard.dead)

    def _watch_other_machines(self) -> None:
        """End this rank if another machine's launcher has reported a failed rank."""
        if len(self._neighbours) + 1 < self.world and self._store.check([_OVER]):
            self._end(Missed(**json.loads(self._store.get(_OVER))))

    def _told_by(self, rank: int) -> Beat:
        return _beat(self._store, rank)

    def _look(self) -> None:
        # Only ranks without any beat are asked for one by one; all others in one request.
        there = [rank for rank in range(self.world) if rank in self.heard or self._store.check([str(rank)])]
        for rank, said in zip(there, self._store.multi_get([str(rank) for rank in there]), strict=True):
            beat, before = Beat(**json.loads(said)), self.heard.get(rank)
            if before is None or before.beat.count != beat.count:
                self.heard[rank] = _Heard(rank, beat, time.time())
            else:
                before.missed += 1

    def _watch(self) -> None:
        for rank, heard in self.heard.items():
            if heard.beat.end:
                continue
            if (self.rank == 1) == (rank == 0):
                self._watch_silence(heard)
            if self.rank == 0 and heard.beat.engine:
                self._say_who_is_slow(heard)

    def _watch_silence(self, heard: _Heard) -> None:
        """Name a silent rank soon; end the run at the limit."""
        if heard.missed * self.every >= self.limit:
            self._end(heard.blamed(f"{heard.silence}: {_GONE}"))
        if heard.missed == int(min(LINE_SECONDS, self.limit / 2) / self.every):
            say(f"{heard.silence}; the run ends if it stays so for {self.limit:.0f} s")

    def _say_who_is_slow(self, heard: _Heard) -> None:
        """Say every half minute that a rank still waits for its engine."""
        beat, now = heard.beat, time.time()
        if heard.is_silent or now - max(self._lines.get(heard.rank, 0.0), beat.since) < LINE_SECONDS:
            return
        self._lines[heard.rank] = now
        say(f"waiting for {heard.where}: {beat.engine} is {beat.doing} ({now - beat.since:.0f} s)")


def tell_other_machines(folder: Path, ranks: Iterable[int]) -> None:
    """Report failed ranks of this machine to the ranks of other machines, which then end; for the launcher.

    Args:
        folder: of the endings of this machine's ranks.
        ranks: the failed ranks.
    """
    place = read_store(folder)
    if place is None:
        return
    try:
        store = _store(*place, _TELL_SECONDS)
        for rank in ranks:
            if store.check([_OVER]) or not store.check([str(rank)]):
                continue
            heard = _Heard(rank, _beat(store, rank), time.time())
            if heard.beat.end != "ended":
                store.set(_OVER, json.dumps(asdict(heard.failed if heard.beat.end else heard.dead)))
    except RuntimeError:
        pass  # the store has ended with its machine, and every rank sees that


def _store(attempt: int, host: str, port: int, seconds: float) -> Any:
    """Connect to the store of the ranks' heartbeats."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    timeout = timedelta(seconds=seconds)
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    return PrefixStore(f"heartbeats of start {attempt}", store)


def _beat(store: Any, rank: int) -> Beat:
    return Beat(**json.loads(store.get(str(rank))))


def say(text: str) -> None:
    """Write a line to standard error without breaking a progress bar."""
    from tqdm import tqdm  # not in a base install, whose commands import this module

    tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()


def _is_there(process: int) -> bool:
    """Whether this machine has the process; True also until torchrun has collected a dead one."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _is_in_collective() -> bool:
    """Whether the main thread waits for other ranks."""
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main) if main is not None else None
    return _waits(traceback.StackSummary.extract(traceback.walk_stack(frame), limit=1))


def _waits(stack: traceback.StackSummary) -> bool:
    """Whether the innermost frame is in ``torch.distributed``, or waits for work begun there, as Megatron does."""
    return bool(stack) and (_DISTRIBUTED in stack[-1].filename or ".wait()" in (stack[-1].line or ""))
