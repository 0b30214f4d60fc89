"""Check that the engines sampled a rollout batch from the trainer's weights; training computes its log-probs anyway.

The trainer scores each sampled token: before the steps in decoupled mode, else in the loss of the batch's first step.
Until a weight changes, trainer and engine have equal weights, so that their log-probs differ by rounding alone. All
ranks learn the result with the gradient norm, before the optimizer changes a weight, or at the end of a step that is
left out. Tokens that older weights sampled cannot be checked, nor rollouts from records.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.batches.micro_batches import LocalTokens
from megatron_rc.launch.training.checks.engine_distance import EngineDistance
from megatron_rc.parallel import ParallelGroups


class BatchCheck:
    """Comparison of the engines' log-probs of the newest rollout batch with the trainer's.

    Attributes:
        is_on: compare batches; off until the trainer's weights go to engines.
        is_open: log-probs of the loss are needed.
        metrics: result for the newest batch; empty until all ranks have shared their numbers.
    """

    def __init__(self, config: RunConfig, groups: ParallelGroups) -> None:
        self._distance = EngineDistance(config, groups)
        self._is_pending, self._step = False, 0
        self.is_on = self.is_open = False
        self.metrics: dict[str, float] = {}

    def begin(self, step: int, old: Tensor | None, local: LocalTokens) -> None:
        """Begin a rollout batch, on every rank, from weights that ``step`` optimizer steps made. Collectives: none.

        ``old`` is log π_old of the local tokens; None before the last stage, and if the loss computes it.
        """
        self._distance.clear()
        self._is_pending, self._step, self.metrics = self.is_on, step, {}
        self.is_open = self.is_on and old is None
        if self.is_on and old is not None:
            self.add(old, local)

    def add(self, log_probs: Tensor, local: LocalTokens) -> None:
        """Add a micro-batch of a loss, before a weight has changed since ``begin``. Collectives: none."""
        if local.policy_versions is not None:
            local = replace(local, response_mask=local.response_mask & (local.policy_versions == self._step))
        self._distance.add(log_probs, local, local.positions)

    @property
    def numbers(self) -> list[float]:
        """This rank's numbers for the next agreement of all ranks, equally many on each; empty if already shared."""
        return self._distance.numbers if self._is_pending else []

    def hear(self, shared: list[float]) -> None:
        """Judge ``shared``, the largest of each of the ``numbers`` over all ranks. Collectives: none.

        Raises AgreedError on every rank if an engine disagrees by more than rounding explains; it names the replica.
        """
        replicas = self._distance.replicas(shared) if shared else []
        if replicas:
            self._is_pending = self.is_open = False
            self.metrics = self._distance.check(replicas, self._step)
