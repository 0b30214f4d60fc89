"""Ends of other machines' ranks: told through the ranks' store, or seen from machines that are silent.

torchrun's agent ends the ranks of its own machine when one of them is gone. Ranks of other machines may wait in a
collective, or for an engine, without a sign of that end, so a thread of each rank looks into the store every second. A
call of the store may wait for ever if the machine of rank 0, which holds it, is cut off. So a second thread looks at
nothing but the number of its looks since the last answer. Rank 0 looks at signs of life of the other machines likewise.
Silence is counted in looks, so that a job that was suspended as a whole goes on.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

from megatron_rc.launch.ending import ATTEMPT, messages_of_ranks

LOOK_SECONDS = 1.0
# Seconds without an answer after which an error of a collective is taken for that of a cut-off machine.
_SILENT_SECONDS = 5.0
_TELL_SECONDS = 3
_LOST = "lost"
# Added to the signs of life of a machine whose work is done.
_ENDED = 1 << 40


class LostRanks:
    """Threads that end this rank because of another machine; they do nothing in a run on one machine.

    Args:
        limit: seconds without an answer of the store that end the rank.
        leave: ends this process with a sentence; the second argument says whether it is about a machine that is cut
            off. It may be called from a thread.
    """

    def __init__(self, limit: float, leave: Callable[[str, bool], NoReturn]) -> None:
        self.limit = limit
        self._leave = leave
        self._host = os.environ.get("MASTER_ADDR", "")
        self._port = int(os.environ.get("MASTER_PORT", "0"))
        self._attempt = int(os.environ.get(ATTEMPT, "0"))
        self._is_first = os.environ.get("RANK") == "0"
        self._is_first_of_machine = os.environ.get("LOCAL_RANK") == "0"
        self._machine = int(os.environ.get("GROUP_RANK", "0"))
        self._num_machines = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        self._looks_without_answer = 0
        # By the number of the machine, on rank 0.
        self._signs: dict[int, int] = {}
        self._looks_without_sign: dict[int, int] = {}
        self._is_over = threading.Event()
        self._is_started = False

    def start(self) -> None:
        """Start the threads."""
        if os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE"):
            return
        self._is_started = True
        threading.Thread(target=self._look_into_store, name="lost ranks", daemon=True).start()
        threading.Thread(target=self._watch_answers, name="cut-off machine", daemon=True).start()

    def close(self) -> None:
        """Let the threads end this rank no more."""
        self._is_over.set()

    def cut_off(self) -> str | None:
        """Return a sentence if the store has not answered for some seconds, as after an error of a collective."""
        if not self._is_started:
            return None
        time.sleep(_SILENT_SECONDS + 2 * LOOK_SECONDS)
        if self._looks_without_answer * LOOK_SECONDS < _SILENT_SECONDS:
            return None
        return self._in_words(self._first_machine, self._looks_without_answer)

    def _look_into_store(self) -> None:
        """Look for ranks that are lost, and give signs of life, while the store answers."""
        with suppress(RuntimeError):  # the store is gone, which the other thread sees
            store = _store(self._host, self._port, self.limit)
            if self._attempt:
                # Ranks of the start before may still wait on other machines.
                store.set(f"{_LOST} {self._attempt - 1}", "a rank failed: all are started again")
            machines = [f"machine {number} of start {self._attempt}" for number in range(self._num_machines)]
            while not self._is_over.wait(LOOK_SECONDS):
                self._look(store, machines)
            if self._is_first_of_machine:
                store.add(machines[self._machine], _ENDED)

    def _look(self, store: Any, machines: list[str]) -> None:
        """Look once; ``machines``: the keys under which the machines count up their signs of life."""
        lost = f"{_LOST} {self._attempt}"
        is_lost = store.check([lost])
        self._looks_without_answer = 0
        if is_lost:
            self._leave(store.get(lost).decode(), False)
        if self._is_first_of_machine:
            store.add(machines[self._machine], 1)
        if self._is_first:
            for number, key in enumerate(machines):
                signs = store.add(key, 0)
                is_alive = signs != self._signs.get(number) or signs >= _ENDED
                self._looks_without_sign[number] = 0 if is_alive else self._looks_without_sign[number] + 1
                self._signs[number] = signs
                if self._looks_without_sign[number] * LOOK_SECONDS >= self.limit:
                    store.set(lost, self._in_words(f"machine {number} of this run", self._looks_without_sign[number]))

    def _watch_answers(self) -> None:
        """End this rank when the store has not answered for too long; touches nothing that may wait."""
        while not self._is_over.wait(LOOK_SECONDS):
            self._looks_without_answer += 1
            if self._looks_without_answer * LOOK_SECONDS >= self.limit:
                self._leave(self._in_words(self._first_machine, self._looks_without_answer), True)

    @property
    def _first_machine(self) -> str:
        return f"the machine of rank 0 ({self._host})"

    def _in_words(self, machine: str, looks: int) -> str:
        return (
            f"{machine} has not answered for {looks * LOOK_SECONDS:.0f} s (--distributed-timeout-minutes "
            f"{self.limit / 60:g}): it is cut off, or stands still"
        )


def tell_other_machines(words: str) -> None:
    """Let the ranks of other machines end with these words; for the launcher of ranks that failed."""
    started = [message for message in messages_of_ranks() if message.store is not None]
    if not started or started[0].store is None:
        return
    host, port = started[0].store
    key = f"{_LOST} {started[0].attempt}"

    def tell() -> None:
        with suppress(RuntimeError):  # the store has ended with its machine, and every rank sees that
            _store(host, port, _TELL_SECONDS).set(key, words)

    # A store that does not answer would keep the launcher waiting.
    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    thread.join(_TELL_SECONDS)


def _store(host: str, port: int, seconds: float) -> Any:
    """Connect to the ranks' store, apart from its other users."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    timeout = timedelta(seconds=seconds)
    return PrefixStore("lost ranks", dist.TCPStore(host, port, is_master=False, timeout=timeout))  # type: ignore[attr-defined]
