"""Order in which rollout batches are sampled, trained on, and followed by new weights.

With ``--rollout-staleness K`` the engines get new weights at every P-th rollout batch, P = K / (optimizer steps per
rollout batch). These weights sample the next P batches while the trainer goes on. For P = 2:

    trains on    0   1   2   3   4   5   ...        weights of batch 0 sample batches 1 and 2,
    sampled by   0   0   0   2   2   4   ...        weights of batch 2 sample batches 3 and 4

A batch's weights depend on its number and on the step at which the run began, never on timing. The last batch of a
window is taken before the weights change, so that the engine has no open request then and each token has one version.

With ``--rl-partial-rollouts`` the engine gets new weights at every batch, and P + 1 threads sample the newest P + 1
batches at once: a long response of one batch does not keep the engine from the next one. A batch consists of the next
prompts, not of the first responses to end: these would be the short ones.

Without staleness P is 0: sync the weights, sample, train.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from megatron_rc.launch.rollouts.work_threads import WorkThreads
from megatron_rc.launch.run_config import RunConfig

T = TypeVar("T")


@dataclass(frozen=True)
class Turn:
    """What is done around the collecting of a rollout batch, in the order of the fields.

    Unless rollouts are partial, the engines have no open request while weights are sent.
    """

    syncs_before: bool  # the engines get the trainer's weights, then the batch is collected
    orders_before: list[int] = field(default_factory=list)  # steps whose batches are ordered before it is collected
    syncs_after: bool = False  # the engines get the weights when the batch is there
    orders_after: list[int] = field(default_factory=list)  # steps whose batches are ordered last
    begins_window: bool = True  # the weights of the batch's step sample the next batches


class RolloutScheduler(Generic[T]):
    """Orders of rollout batches, by the optimizer step that they start at; equal on all ranks. Makes no collective.

    Args:
        config: settings of the run.
        sample: returns the batch of a step, on a rank with an engine. It is called by :meth:`take`, or, if the engine
            is another process, on threads as soon as the batch is ordered: with an engine in this process a thread
            would only take turns with the trainer.
        is_elsewhere: whether this rank has an engine that is another process.
    """

    def __init__(self, config: RunConfig, sample: Callable[[int], T], *, is_elsewhere: bool) -> None:
        is_recorded = config.rollouts.load_rollouts is not None
        staleness = 0 if is_recorded else config.rollouts.rollout_staleness or 0
        self.num_ahead = staleness // config.updates_per_rollout
        self.is_partial = config.engine.rl_partial_rollouts and not is_recorded
        self._sample = sample
        self._steps_per_batch = config.updates_per_rollout
        self._last_step = config.training.train_iters
        self._window_end = -1
        self._orders: dict[int, Future[T] | None] = {}
        num_threads = 0
        if is_elsewhere and self.num_ahead:
            num_threads = self.num_ahead + 1 if self.is_partial else 1
        self._threads = WorkThreads(num_threads, "rollouts") if num_threads else None

    def turn(self, step: int, *, evaluates: bool) -> Turn:
        """Decide what is done around the batch that starts at optimizer step ``step``; call it once for each batch.

        ``evaluates``: the engines need the trainer's weights although no rollout follows, because an evaluation is due.
        """
        following = self._following(step)
        if self.is_partial:
            return Turn(syncs_before=True, orders_before=[step, *following])
        is_fresh = step not in self._orders
        if not is_fresh and step != self._window_end:
            return Turn(syncs_before=False, begins_window=False)
        # Orders end at --train-iters, but a window does not: a longer run continues it after a resume.
        self._begin_window(step)
        syncs_after = not is_fresh and (bool(following) or evaluates)
        return Turn(syncs_before=is_fresh, syncs_after=syncs_after, orders_after=following)

    def go_on(self, step: int, version: int) -> list[int]:
        """Continue, after a resume at ``step``, the window of the ended run, whose engines had weights of ``version``.

        Returns:
            The steps whose batches the ended run was sampling: order them when the engines have these weights again.
        """
        following = self._following(version) if version >= 0 else []
        if step not in following:
            return []
        self._begin_window(version)
        return [later for later in following if later >= step]

    def order(self, steps: Sequence[int]) -> None:
        """Order the batches of these steps, unless they are ordered."""
        for step in steps:
            if step in self._orders:
                continue
            future: Future[T] | None = None
            if self._threads is not None:
                future = self._threads.submit(partial(self._sample, step))
            self._orders[step] = future

    def forget(self, step: int) -> None:
        """Delete the order of a step on a rank without an engine."""
        self._orders.pop(step, None)

    def take(self, step: int) -> T:
        """Return the batch of a step, ordered before or not; waits for it, and re-raises the sampling's exception."""
        future = self._orders.pop(step, None)
        return self._sample(step) if future is None else future.result()

    def close(self) -> None:
        """Cancel all orders, and wait a little for the batches that are being sampled."""
        for future in self._orders.values():
            if future is not None:
                future.cancel()
        self._orders.clear()
        if self._threads is not None:
            self._threads.close()

    def _begin_window(self, version: int) -> None:
        self._window_end = version + self.num_ahead * self._steps_per_batch

    def _following(self, version: int) -> list[int]:
        """Steps whose batches are sampled ahead by the weights of step ``version``."""
        steps = [version + number * self._steps_per_batch for number in range(1, self.num_ahead + 1)]
        return [step for step in steps if step < self._last_step]
