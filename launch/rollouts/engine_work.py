"""Work of a replica's engine, for which the ranks of all replicas wait together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megatron_rc.launch import phases
from megatron_rc.launch.distributed import agree
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.rollouts.waiting import EngineWaits
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.stopping import Interrupted, Stopped, StopRequest

T = TypeVar("T")


class EngineWork:
    """Runs work on the rank with the replica's engine, while all other ranks wait in ``waits``.

    A ``request`` to stop the run interrupts the work.
    """

    def __init__(self, config: RunConfig, replica: int, is_engine_rank: bool, request: StopRequest) -> None:
        self.config, self.replica, self.is_engine_rank, self.request = config, replica, is_engine_rank, request
        self.waits = EngineWaits(config, replica, is_engine_rank)

    def run(self, work: Callable[[], T], what: str) -> T | None:
        """Return the result of ``work`` on the engine's rank, None on others.

        Raises, on every rank, AgreedError if the work failed on any or exceeded ``--rollout-wait-minutes``, and Stopped
        if any rank was told to stop.
        """
        result, error = None, None
        if self.is_engine_rank:
            minutes = self.config.launch.rollout_wait_minutes
            late = f"it did not end in {minutes:g} minutes (--rollout-wait-minutes)"
            phases.enter(what, engine=self._engine())
            try:
                with self.request.interrupts(60 * minutes, late):
                    result = work()
            except Interrupted:
                pass  # agree() below reads the request
            except ConfigurationError as problem:  # it names a flag, so the engine did not fail
                error = str(problem)
            # Engines, tasks and rewards may raise anything, or call sys.exit(); the other ranks must know.
            except (Exception, SystemExit) as problem:
                error = f"{what} failed: {type(problem).__name__}: {problem}"
        phases.enter(what, waits=True)
        self.waits.meet(what)
        if agree(self.config, error, stop=self.request.signal is not None):
            raise Stopped
        return result

    def _engine(self) -> str:
        """Name of the engine, or of the records, for reports of ranks that hang."""
        if self.config.rollouts.load_rollouts:
            return f"the reader of {self.config.rollouts.load_rollouts}"
        urls = (self.config.engine.rollout_url or "").split(",")
        place = f" at {urls[self.replica % len(urls)]}" if urls[0] else ""
        return f"the engine {self.config.engine.rollout_engine}{place}"
