"""Rollout batches that are sampled ahead of the trainer, on a thread if the engine is another process.

With ``--rollout-staleness K`` the engines get new weights at every P-th rollout batch, P = K / (optimizer steps per
rollout batch). These weights sample the next P batches while the trainer goes on. For P = 2:

    trains on    0   1   2   3   4   5   ...        weights of batch 0 sample batches 1 and 2,
    sampled by   0   0   0   2   2   4   ...        weights of batch 2 sample batches 3 and 4

A batch's weights depend on its number and on the step at which the run began, never on timing. The last batch of a
window is taken before the weights change, so that the engine has no open request then and each token has one version.

With ``--rl-partial-rollouts`` the engine gets new weights at every batch, and P + 1 threads sample the newest P + 1
batches at once: a long response of one batch does not keep the engine from the next one. A batch consists of the next
prompts, not of the first responses to end: these would be the short ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeVar

from megatron_rc.records.rollout import RolloutBatch

GRACE_SECONDS = 5.0
T = TypeVar("T")


class PrefetchedRollouts(Generic[T]):
    """Ordered batches that nobody took yet, by the optimizer step that they start at. Makes no collective.

    All ranks keep the same orders; only a rank with an engine takes batches. ``obtain`` returns the batch of a step.
    ``threads`` threads call it, in the order of the batches, as soon as a batch is ordered. Without threads
    :meth:`take` calls it: with an engine in this process, a thread would only take turns with the trainer.
    """

    def __init__(self, obtain: Callable[[int], T], threads: int) -> None:
        self._obtain = obtain
        self._ordered: dict[int, Future[T] | None] = {}
        self._queue: SimpleQueue[tuple[int, Future[T]] | None] = SimpleQueue()
        # Daemon threads: a run that failed reports it without waiting for the sampling.
        self._threads = [threading.Thread(target=self._work, name="rollouts", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def __contains__(self, step: int) -> bool:
        return step in self._ordered

    def order(self, steps: Sequence[int]) -> None:
        """Order the batches of these steps; without ``--rl-partial-rollouts`` weights must stay until all are taken."""
        for step in steps:
            future: Future[T] | None = None
            if self._threads:
                future = Future()
                self._queue.put((step, future))
            self._ordered[step] = future

    def forget(self, step: int) -> None:
        """Delete the order of a step on a rank without an engine."""
        self._ordered.pop(step, None)

    def take(self, step: int) -> T:
        """Return the batch of a step, ordered before or not; waits for it, and re-raises the sampling's exception."""
        future = self._ordered.pop(step, None)
        return self._obtain(step) if future is None else future.result()

    def close(self) -> None:
        """Cancel all orders, and wait at most 5 seconds for the batches that are being sampled."""
        for future in self._ordered.values():
            if future is not None:
                future.cancel()
        self._ordered.clear()
        for _ in self._threads:
            self._queue.put(None)
        end = time.monotonic() + GRACE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _work(self) -> None:
        while (order := self._queue.get()) is not None:
            step, future = order
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._obtain(step))
            except BaseException as error:  # take() raises it
                future.set_exception(error)


def check_versions(batch: RolloutBatch, step: int, limit: int) -> None:
    """Raise ValueError for tokens whose weights are newer than ``step``, or more than ``limit`` steps older."""
    versions = batch.policy_versions.long()
    odd = batch.response_mask & ((versions > step) | (versions < step - limit))
    if not odd.any():
        return
    row, token = odd.nonzero()[0].tolist()
    sample, version = int(batch.sample_ids[row]), int(versions[row, token])
    where = f"sample {sample}, token {token} was sampled by weights of version {version}"
    if version > step:
        raise ValueError(
            f"{where}, newer than the trainer's at step {step}: rollouts of another run or program count other steps, "
            "leave --rollout-staleness out"
        )
    raise ValueError(
        f"{where}, {step - version} steps behind the trainer at step {step}: --rollout-staleness allows {limit}"
    )
