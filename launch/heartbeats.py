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
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from megatron_rc.launch import phases
from megatron_rc.launch.ending import ATTEMPT, read_store
from megatron_rc.launch.phases import Phase, clock

BEAT_SECONDS = 1.0
# One store takes about 30,000 writes a second, and also serves the ranks' addresses.
_BEATS_A_SECOND = 4096
LINE_SECONDS = 30.0
# Missed beats after which a rank counts as silent, for a rank that has just lost a connection.
_MISSED = 4
# The key of the rank that all others are to end for.
_OVER = "over"
_TELL_SECONDS = 3
_FAULTS = {
    "failed": "{heard.where} failed {beat.phase}: see what it said",
    "gone": "{heard.where} is gone, {beat.phase}: its process {beat.process} has ended",
    "silent": "{heard.silence}: its process is dead, stopped or cut off",
    "elsewhere": "{heard.where} did not come to where the others wait: it is {beat.phase}",
}


@dataclass(frozen=True)
class Beat:
    """A rank's report of itself."""

    count: int  # number of its reports
    host: str  # its machine
    process: int  # its process number there
    phase: Phase
    end: str = ""  # empty, ``ended`` or ``failed``

    @classmethod
    def read(cls, text: str | bytes) -> Beat:
        """Read a beat from the store."""
        given = json.loads(text)
        return cls(**given | {"phase": Phase(**given["phase"])})


@dataclass(frozen=True)
class Missed:
    """A rank that keeps the others waiting."""

    rank: int  # its number
    last_seen: str  # its machine and phase, in words
    words: str  # one sentence


@dataclass
class _Heard:
    """The last beat of another rank, its time, and the number of looks without a new one."""

    rank: int
    beat: Beat
    time: float = field(default_factory=time.time)
    missed: int = 0

    @property
    def where(self) -> str:
        """Rank and machine."""
        return f"rank {self.rank} on {self.beat.host}"

    @property
    def silence(self) -> str:
        """The silence of this rank, in words."""
        return f"{self.where} has not answered since {clock(self.time)}, {self.beat.phase}"

    @property
    def is_silent(self) -> bool:
        """Whether it counts as silent in a search for the culprit."""
        return self.missed >= _MISSED - 1

    def lost(self) -> Missed | None:
        """Blame this rank for an end before its work was done; None: its work was done."""
        return None if self.beat.end == "ended" else self.blamed("failed" if self.beat.end else "gone")

    def blamed(self, fault: str) -> Missed:
        """Name this rank as the one that keeps others waiting, by a fault of :data:`_FAULTS`."""
        words = _FAULTS[fault].format(heard=self, beat=self.beat)
        return Missed(self.rank, f"on {self.beat.host}, {self.beat.phase}", words)


class Heartbeats:
    """The thread that reports this rank; it also watches others on ranks 0 and 1.

    Args:
        limit: seconds of silence that end the run; the time limit of collectives.
        end: ends this process because of another rank.

    Attributes:
        every: seconds between two beats.
    """

    def __init__(self, limit: float, end: Callable[[Missed], NoReturn]) -> None:
        self.rank, self.world = _number("RANK", 0), _number("WORLD_SIZE", 1)
        self.every = BEAT_SECONDS * max(1.0, self.world / _BEATS_A_SECOND)
        self.limit, self._end = limit, end
        self.heard: dict[int, _Heard] = {}
        self._store: Any = None
        self._count, self._over = 0, threading.Event()
        self._lines: dict[int, float] = {}
        first = self.rank - _number("LOCAL_RANK", 0)
        here = range(first, first + _number("LOCAL_WORLD_SIZE", 1))
        self._neighbours = [rank for rank in here if rank != self.rank]
        self._processes: dict[int, int] = {}
        self._thread = threading.Thread(target=self._work, name="heartbeats", daemon=True)

    def start(self) -> None:
        """Begin, by a connection of its own to torchrun's store."""
        # A late answer must not hold up the end of the run.
        self._store = _store(_number(ATTEMPT, 0), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), self.limit)
        self._tell()
        self._thread.start()

    def close(self, *, failed: bool = False) -> None:
        """End the thread; report that this rank ended, or failed by an error of its own."""
        self._stop()
        if self._store is not None:
            with suppress(RuntimeError):  # the store is gone, and so are the readers
                self._tell("failed" if failed else "ended")

    def who_is_missed(self, error: BaseException) -> Missed | None:
        """Return the rank that others wait for, after this error of a collective.

        It is the first rank that failed, else that is silent, else that works elsewhere if this one has waited. Takes a
        few beats, in which living ranks report. None: no collective raises such errors, or no rank stands out.
        """
        if self._store is None or not _may_be_of_collective(error):
            return None
        has_waited = phases.current().waits
        self._stop()
        try:
            self._tell("ended")
            for _ in range(_MISSED):
                self._look()
                time.sleep(self.every)
            self._look()
        except RuntimeError:
            return None
        others = [heard for _, heard in sorted(self.heard.items()) if heard.beat.end != "ended"]
        found = [heard.blamed("failed") for heard in others if heard.beat.end]
        found += [heard.blamed("silent") for heard in others if heard.is_silent]
        if has_waited:
            found += [heard.blamed("elsewhere") for heard in others if not heard.beat.phase.waits]
        return found[0] if found else None

    def _stop(self) -> None:
        """Stop the thread, so that no beat follows this rank's last report."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(_MISSED * self.every)

    def _work(self) -> None:
        with suppress(RuntimeError):  # the store is gone: torchrun has ended, or ends this process
            while not self._over.wait(self.every):
                self._tell()
                self._watch_processes()
                # Another machine's launcher has reported a failed rank.
                if len(self._neighbours) + 1 < self.world and self._store.check([_OVER]):
                    self._end(Missed(**json.loads(self._store.get(_OVER))))
                if self.rank < 2:
                    self._look()
                    self._watch()

    def _tell(self, end: str = "") -> None:
        self._count += 1
        beat = Beat(self._count, socket.gethostname(), os.getpid(), phases.current(), end)
        self._store.set(str(self.rank), json.dumps(asdict(beat)))

    def _watch_processes(self) -> None:
        """End this rank if the process of another one of its machine is gone before its work was done."""
        import psutil  # type: ignore[import-untyped]

        for rank in self._neighbours:
            if rank not in self._processes and self._store.check([str(rank)]):
                self._processes[rank] = _heard(self._store, rank).beat.process
            # Its last report may be newer than the last look.
            if rank in self._processes and not psutil.pid_exists(self._processes[rank]):
                lost = _heard(self._store, rank).lost()
                if lost is not None:
                    self._end(lost)

    def _look(self) -> None:
        # Only ranks without any beat are asked for one by one; all others in one request.
        there = [rank for rank in range(self.world) if rank in self.heard or self._store.check([str(rank)])]
        for rank, said in zip(there, self._store.multi_get([str(rank) for rank in there]), strict=True):
            beat, before = Beat.read(said), self.heard.get(rank)
            if before is None or before.beat.count != beat.count:
                self.heard[rank] = _Heard(rank, beat)
            else:
                before.missed += 1

    def _watch(self) -> None:
        """Name silent ranks soon, and end the run at the limit; name slow engines every half minute."""
        for rank, heard in self.heard.items():
            if heard.beat.end:
                continue
            if (self.rank == 1) == (rank == 0):
                if heard.missed * self.every >= self.limit:
                    self._end(heard.blamed("silent"))
                if heard.missed == int(min(LINE_SECONDS, self.limit / 2) / self.every):
                    say(f"{heard.silence}; the run ends if it stays so for {self.limit:.0f} s")
            phase, now = heard.beat.phase, time.time()
            is_slow = now - max(self._lines.get(rank, 0.0), phase.since) >= LINE_SECONDS
            if self.rank == 0 and phase.engine and not heard.is_silent and is_slow:
                self._lines[rank] = now
                say(f"waiting for {heard.where}: {phase.engine} is {phase} ({now - phase.since:.0f} s)")


def tell_other_machines(folder: Path, ranks: Iterable[int]) -> None:
    """Report failed ranks of this machine to the ranks of other machines, which then end; for the launcher.

    ``folder`` has the endings of this machine's ranks.
    """
    place = read_store(folder)
    if place is None:
        return
    with suppress(RuntimeError):  # the store has ended with its machine, and every rank sees that
        store = _store(*place, _TELL_SECONDS)
        for rank in ranks:
            lost = _heard(store, rank).lost() if store.check([str(rank)]) else None
            if lost is not None and not store.check([_OVER]):
                store.set(_OVER, json.dumps(asdict(lost)))


def say(text: str) -> None:
    """Write a line to standard error without breaking a progress bar."""
    from tqdm import tqdm  # not in a base install, whose commands import this module

    tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()


def _number(variable: str, default: int) -> int:
    return int(os.environ.get(variable, default))


def _store(attempt: int, host: str, port: int, seconds: float) -> Any:
    """Connect to the store of the ranks' heartbeats."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    timeout = timedelta(seconds=seconds)
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    return PrefixStore(f"heartbeats of start {attempt}", store)


def _heard(store: Any, rank: int) -> _Heard:
    return _Heard(rank, Beat.read(store.get(str(rank))))


def _may_be_of_collective(error: BaseException) -> bool:
    """Whether gloo (a plain RuntimeError), NCCL or the store raises such errors."""
    from torch.distributed import DistError

    return type(error) is RuntimeError or isinstance(error, DistError)
