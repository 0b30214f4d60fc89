"""Work of a replica's engine, for which the ranks of all replicas wait together."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from megatron_rc.launch import phases
from megatron_rc.launch.distributed import largest_over_ranks
from megatron_rc.launch.engines import EngineError
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.rollouts.work_threads import WorkThreads
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.stopping import Stopped, StopRequest

T = TypeVar("T")
# Seconds between two looks of the engine's rank at the request to stop.
_LOOK_SECONDS = 0.25
# Pauses between two looks of the other ranks: a share of the time waited, within bounds. The store's own wait warns at
# every timeout.
_SHARE = 0.01
_SHORTEST = 1e-3
_LONGEST = 0.5
# Time for engines that give up at the limit to report it.
_GRACE_SECONDS = 60


class EngineWork:
    """Lets the engine of each replica work while all ranks wait, until it ends, fails, is late, or a signal comes.

    The engine's rank raises one sentence if its engine fails or is late; that ends the rank, and so the run. A signal,
    seen in ``request``, gives the work up: all ranks raise Stopped. Waits go through torch's default store, because
    engines may need longer than a collective may.
    """

    def __init__(self, config: RunConfig, replica: int, is_engine_rank: bool, request: StopRequest) -> None:
        self.config = config
        self.replica = replica
        self.is_engine_rank = is_engine_rank
        self.request = request
        self.minutes = config.launch.rollout_wait_minutes
        self.meetings = 0
        self._thread = WorkThreads(1 if is_engine_rank else 0, "engine")
        self._replicas = [str(number) for number in range(config.data_parallel_size)]
        self._store: Any = None
        if dist.get_world_size() > 1:
            store = _get_default_store()
            # All ranks of the same collector compute the same number here.
            earlier_collectors = (store.add("collectors of rollouts", 1) - 1) // dist.get_world_size()
            self._store = PrefixStore(f"rollouts of collector {earlier_collectors}", store)
            for name in self._replicas:
                self._store.add(name, 0)  # reading a key that does not exist would wait

    def run(self, work: Callable[[], T], what: str) -> T | None:
        """Return the result of ``work`` on the engine's rank, None on others; ``what``: its name in words.

        Collectives: one MAX of one number over all ranks, after the meeting.

        Raises:
            EngineError: on the engine's rank: the work failed or exceeded ``--rollout-wait-minutes``.
            ConfigurationError: on the engine's rank: the work found wrong flags or files.
            Stopped: on every rank: one of them was told to stop.
        """
        result = None
        if self.is_engine_rank and self.request.signal is None:
            phases.enter(what)
            result = self._result(self._thread.submit(work), what)
        self.meet(what)
        (is_stopped,) = largest_over_ranks(self.config, [self.request.signal is not None])
        if is_stopped:
            raise Stopped
        return result

    def _result(self, future: concurrent.futures.Future[T], what: str) -> T | None:
        """Wait for the work; None if a signal came."""
        end = time.monotonic() + 60 * self.minutes
        while not future.done():
            concurrent.futures.wait([future], timeout=_LOOK_SECONDS)
            if self.request.signal is not None:
                return None
            if time.monotonic() > end and not future.done():
                raise EngineError(f"{what} failed: it did not end in {self.minutes:g} minutes (--rollout-wait-minutes)")
        try:
            return future.result()
        except ConfigurationError:  # it names a flag, so the engine did not fail
            raise
        # Engines, tasks and rewards may raise anything, or call sys.exit().
        except (Exception, SystemExit) as problem:
            raise EngineError(f"{what} failed: {type(problem).__name__}: {problem}") from problem

    def meet(self, what: str) -> None:
        """Wait until the engines of all replicas have ended their work; EngineError if one does not in time."""
        phases.enter(what)
        if self._store is None:
            return
        self.meetings += 1
        if self.is_engine_rank:
            # A growing number, because this rank may have ended the next meeting before a late rank looks.
            self._store.add(str(self.replica), 1)
        begun = time.monotonic()
        while (waited := time.monotonic() - begun) < 60 * self.minutes + _GRACE_SECONDS:
            meetings_of_replicas = zip(self._replicas, self._store.multi_get(self._replicas), strict=True)
            missing = [replica for replica, meetings in meetings_of_replicas if int(meetings) < self.meetings]
            if not missing:
                return
            time.sleep(min(max(_SHARE * waited, _SHORTEST), _LONGEST))
        raise EngineError(
            f"{what} did not end in {self.minutes} minutes (--rollout-wait-minutes) on the data-parallel replicas "
            f"{', '.join(missing)}"
        )

    def close(self) -> None:
        """End the thread of the engine; nobody waits for work that a signal gave up."""
        self._thread.close(waits=self.request.signal is None)
