"""Signs of life: a thread of each rank tells torchrun's store every second what the rank does; who is silent is named.

Beyond 4096 ranks they tell it less often, since one store hears them all. No collective is made and no step waits for
it. Rank 0 watches all others, rank 1 watches rank 0. How long a rank is silent is counted in looks of the one who
watches, so that a job that was suspended as a whole goes on. Of a machine's own ranks each rank sees at once that a
process is gone, and ends, whatever it waits for: torchrun's signal alone would let it wait until it is killed.
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
# One store takes about 30,000 writes a second, and has the ranks' addresses to give out besides.
_BEATS_A_SECOND = 4096
LINE_SECONDS = 30.0
# So many missed beats make a rank silent for one that has just lost its connection to somebody.
_MISSED = 4
# The key of the rank that all others are to end for.
_OVER = "over"
_TELL_SECONDS = 3
_GONE = "its process is dead, stopped or cut off"
_DISTRIBUTED = str(Path("torch", "distributed")) + os.sep


@dataclass(frozen=True)
class Beat:
    """What a rank tells of itself.

    Attributes:
        count: how often it has told.
        host: its machine.
        process: its number there.
        phase: what it is doing.
        since: when it began to, in seconds since 1970.
        engine: what it waits for, if that is an engine.
        waits: it waits for other ranks.
        end: empty, or how it ended: ``ended`` or ``failed``.
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
        """The phase, and since when."""
        return f"in {self.phase} since {clock(self.since)}"


@dataclass(frozen=True)
class Missed:
    """A rank that the others wait for in vain.

    Attributes:
        rank: which.
        last_seen: its machine and what it did, in words.
        words: one sentence.
    """

    rank: int
    last_seen: str
    words: str


@dataclass
class _Heard:
    """What one rank knows of another: its last beat, when that came, and how often nothing came since."""

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
        """In words."""
        return f"{self.where} has not answered since {clock(self.time)}, {self.beat.doing}"

    @property
    def is_silent(self) -> bool:
        """For one that looks for the culprit."""
        return self.missed >= _MISSED - 1

    @property
    def dead(self) -> Missed:
        """As a rank whose process is gone."""
        return self.blamed(f"{self.where} is gone, {self.beat.doing}: its process {self.beat.process} has ended")

    @property
    def failed(self) -> Missed:
        """As a rank that met an error alone."""
        return self.blamed(f"{self.where} failed {self.beat.doing}: see what it said")

    def blamed(self, words: str) -> Missed:
        """As the rank that others wait for."""
        return Missed(self.rank, f"on {self.beat.host}, {self.beat.doing}", words)


class Heartbeats:
    """The thread that tells, and on ranks 0 and 1 watches.

    Args:
        limit: seconds after which a silent rank ends the run: that of a collective.
        end: ends this process because of a rank that is silent.

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
        """Begin, by a connection to torchrun's store that nothing else uses."""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # A late answer must not hold up the end of the run.
        self._store = _store(int(os.environ.get(ATTEMPT, "0")), host, port, self.limit)
        self._tell()
        self._thread.start()

    def close(self, *, failed: bool = False) -> None:
        """End the thread; the others hear that this rank ended, or failed by an error of its own."""
        self._stop()
        try:
            if self._store is not None:
                self._tell("failed" if failed else "ended")
        except RuntimeError:
            pass  # nobody is left who would hear it

    def who_is_missed(self, error: BaseException) -> Missed | None:
        """The rank that others wait for, after a collective of this rank failed.

        Takes a few beats: who is alive says so in each. None: the error is none of a collective, or no rank
        stands out.
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
        """Whether no rank below this one is left that could speak."""
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
        """No beat follows what this rank says last."""
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
                # It may have said its last word after the look before.
                heard = _Heard(rank, self._told_by(rank), time.time())
                if heard.beat.end != "ended":
                    self._end(heard.failed if heard.beat.end else heard.dead)

    def _watch_other_machines(self) -> None:
        """End this rank if a launcher of another machine told that a rank of its own is gone."""
        if len(self._neighbours) + 1 < self.world and self._store.check([_OVER]):
            self._end(Missed(**json.loads(self._store.get(_OVER))))

    def _told_by(self, rank: int) -> Beat:
        return _beat(self._store, rank)

    def _look(self) -> None:
        # Only what was never heard is asked for one by one: with thousands of ranks the number of requests decides.
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
        """Say who is silent, soon; end the run where it lasts."""
        if heard.missed * self.every >= self.limit:
            self._end(heard.blamed(f"{heard.silence}: {_GONE}"))
        if heard.missed == int(min(LINE_SECONDS, self.limit / 2) / self.every):
            say(f"{heard.silence}; the run ends if it stays so for {self.limit:.0f} s")

    def _say_who_is_slow(self, heard: _Heard) -> None:
        """Every half minute, who still works for an engine's answers."""
        beat, now = heard.beat, time.time()
        if heard.is_silent or now - max(self._lines.get(heard.rank, 0.0), beat.since) < LINE_SECONDS:
            return
        self._lines[heard.rank] = now
        say(f"waiting for {heard.where}: {beat.engine} is {beat.doing} ({now - beat.since:.0f} s)")


def tell_other_machines(folder: Path, ranks: Iterable[int]) -> None:
    """Let the ranks of other machines end, which may wait for a rank of this one; for the launcher.

    Args:
        folder: of the endings of this machine's ranks.
        ranks: those that failed.
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
    """A line on standard error that does not break a progress bar."""
    from tqdm import tqdm  # not in a base install, whose commands import this module

    tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()


def _is_there(process: int) -> bool:
    """Whether this machine has the process, or torchrun has not yet heard of its end."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _is_in_collective() -> bool:
    """Whether the main thread is where ranks wait for each other."""
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main) if main is not None else None
    return _waits(traceback.StackSummary.extract(traceback.walk_stack(frame), limit=1))


def _waits(stack: traceback.StackSummary) -> bool:
    """Whether the innermost frame is in ``torch.distributed``, or waits for what was begun there, as Megatron does."""
    return bool(stack) and (_DISTRIBUTED in stack[-1].filename or ".wait()" in (stack[-1].line or ""))
