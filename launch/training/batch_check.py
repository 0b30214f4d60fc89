"""The check that a rollout batch is of the trainer's weights, from log-probs that training computes anyway.

The trainer scores each token that the engine has sampled: before the steps in decoupled mode, else in the loss of the
first step that is made. Until a weight changes both have the same weights, so that the two log-probs differ by rounding
alone. Every rank hears of it before the optimizer changes a weight, with the norm of the gradient; or at the end of the
step, if none is made. It cannot tell with rollouts of older weights, or of records.
"""

from __future__ import annotations

from torch import Tensor

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.engine_distance import EngineDistance
from megatron_rc.launch.training.micro_batches import LocalTokens
from megatron_rc.parallel import ParallelGroups


class BatchCheck:
    """The engines' log-probs of the newest rollout batch beside the trainer's.

    Args:
        config: of the run.
        groups: of this rank.

    Attributes:
        is_on: the batches are compared; off until somebody hands the trainer's weights to engines.
        is_open: log-probs of the loss are wanted.
        metrics: of the newest batch; empty until the ranks have heard of it.
    """

    def __init__(self, config: RunConfig, groups: ParallelGroups) -> None:
        self._distance = EngineDistance(config, groups)
        self._is_pending, self._step = False, 0
        self.is_on = self.is_open = False
        self.metrics: dict[str, float] = {}

    def begin(self, step: int, old: Tensor | None, local: LocalTokens) -> None:
        """A rollout batch begins, on every rank. Collectives: none.

        Args:
            step: optimizer steps that the weights have behind them, those of the trainer and of the engines.
            old: log π_old of the local tokens; None before the last stage, and if the loss finds the log-probs.
            local: the tokens.
        """
        self._distance.clear()
        self._is_pending, self._step, self.metrics = self.is_on, step, {}
        self.is_open = self.is_on and old is None
        if self.is_on and old is not None:
            self._distance.add(old, local, local.positions)

    def add(self, log_probs: Tensor, local: LocalTokens) -> None:
        """Add a micro-batch of a loss, before any weight has changed since ``begin``. Collectives: none."""
        self._distance.add(log_probs, local, local.positions)

    @property
    def numbers(self) -> list[float]:
        """The numbers that the next agreement of all ranks carries: as many on each, none if nothing is to be told."""
        return self._distance.numbers if self._is_pending else []

    def hear(self, shared: list[float]) -> None:
        """Judge the numbers of all ranks. Collectives: none.

        Args:
            shared: what the agreement made of ``numbers``.

        Raises:
            AgreedError: on every rank alike, if an engine is further off than rounding explains: it names the replica.
        """
        replicas = self._distance.replicas(shared) if shared else []
        if replicas:
            self._is_pending = self.is_open = False
            self.metrics = self._distance.check(replicas, self._step)
