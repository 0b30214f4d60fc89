"""Rollout batches that are sampled before their turn, on a thread where the engine works in another process.

With ``--rollout-staleness K`` weights are handed over every P-th rollout batch, where P = K / (optimizer steps of a
rollout batch), and the P batches after that one are sampled from them while the trainer goes on:

    trains on    0   1   2   3   4   5   ...        P = 2: weights of batch 0 sample 1 and 2, those of batch 2 sample
    sampled by   0   0   0   2   2   4   ...        3 and 4; every batch is at most P batches old, half of them less

Which weights sample a batch follows from its number and from where the run began, not from how fast anything is. The
last batch of a window is taken before the weights change, so the engine has no request under way then, and every token
has one version.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeVar

from megatron_rc.records.rollout import RolloutBatch

GRACE_SECONDS = 5.0
T = TypeVar("T")


class PrefetchedRollouts(Generic[T]):
    """The batches that were ordered and not yet taken, by the optimizer step that they start at.

    Every rank keeps the same orders; only a rank with an engine has something to take. Nothing here is a collective.

    Args:
        obtain: gives the batch of a step; called for one at a time, in the order of the orders.
        in_background: on a thread, as soon as it is ordered; else when it is taken, by the caller: with an engine in
            this process a thread would only take turns with the trainer.
    """

    def __init__(self, obtain: Callable[[int], T], *, in_background: bool) -> None:
        self._obtain = obtain
        self._ordered: dict[int, Future[T] | None] = {}
        self._queue: SimpleQueue[tuple[int, Future[T]] | None] = SimpleQueue()
        # A daemon: a run that failed does not wait for what is being sampled before it says so.
        self._thread = threading.Thread(target=self._work, name="rollouts", daemon=True) if in_background else None
        if self._thread is not None:
            self._thread.start()

    def __contains__(self, step: int) -> bool:
        return step in self._ordered

    def __len__(self) -> int:
        return len(self._ordered)

    def order(self, steps: Sequence[int]) -> None:
        """Have the batches of these steps sampled, from the weights that the engine has until all are taken."""
        for step in steps:
            future: Future[T] | None = None
            if self._thread is not None:
                future = Future()
                self._queue.put((step, future))
            self._ordered[step] = future

    def forget(self, step: int) -> None:
        """On a rank without an engine: the batch of a step was taken elsewhere."""
        self._ordered.pop(step, None)

    def take(self, step: int) -> T:
        """The batch of a step, ordered before or not; waits for it. Raises what sampling it raised."""
        future = self._ordered.pop(step, None)
        return self._obtain(step) if future is None else future.result()

    def close(self) -> None:
        """Drop what is ordered, and give the batch under way a few seconds: what comes later comes to nothing."""
        for future in self._ordered.values():
            if future is not None:
                future.cancel()
        self._ordered.clear()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(GRACE_SECONDS)

    def _work(self) -> None:
        while (order := self._queue.get()) is not None:
            step, future = order
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._obtain(step))
            except BaseException as error:  # raised where the batch is taken
                future.set_exception(error)


def check_versions(batch: RolloutBatch, step: int, limit: int) -> None:
    """Refuse tokens of weights that are too old for the trainer, or that it does not have yet.

    Args:
        batch: the records.
        step: optimizer steps made when they train, the version of the trainer's weights.
        limit: the largest staleness, ``--rollout-staleness``.

    Raises:
        ValueError: names the first such sample, the version of its weights and the limit.
    """
    versions = batch.policy_versions.long()
    odd = batch.response_mask & ((versions > step) | (versions < step - limit))
    places = odd.nonzero()
    if not len(places):
        return
    row, token = places[0].tolist()
    sample, version = int(batch.sample_ids[row]), int(versions[row, token])
    where = f"sample {sample}, token {token} was sampled by weights of version {version}"
    if version > step:
        raise ValueError(
            f"{where}, which the trainer at step {step} does not have yet: rollouts of another run or program count "
            "other steps, leave --rollout-staleness out"
        )
    raise ValueError(
        f"{where}, {step - version} steps behind the trainer at step {step}: --rollout-staleness allows {limit}"
    )
