"""Check that the engines sampled a rollout batch from the trainer's weights; training computes its log-probs anyway.

The trainer scores each sampled token: before the steps in decoupled mode, else in the loss of the batch's first step.
Until a weight changes, trainer and engine have equal weights, so that their log-probs differ by rounding alone. All
ranks learn the result with the gradient norm, before the optimizer changes a weight, or at the end of a step that is
left out. Tokens that older weights sampled cannot be checked, nor rollouts from records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_rc.launch.errors import RunError
from megatron_rc.launch.rollouts.agreement import judge, lag_distances, tolerance
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.batches.micro_batches import LocalTokens
from megatron_rc.numerics import is_log_prob
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.groups import group_rank, group_size

# Numbers of one rank: Σ|Δ log-prob|, number of tokens, and four sums of lag_distances.
_NUMBERS = 6
_MOST_NAMED = 8


class EngineDistance:
    """Mean |log π_train - log π_rollout| of each replica, over tokens that both scored with equal weights.

    Each last-stage rank adds up its own tokens. Every rank gets all sums in a reduction that is made anyway, and that
    returns element-wise maxima (:func:`~megatron_rc.launch.distributed.largest_over_ranks`): each rank fills its own
    places of a list of zeros.
    """

    def __init__(self, config: RunConfig, groups: ParallelGroups) -> None:
        self.config = config
        self._cp = group_size(groups.cp)
        self._replicas = group_size(groups.dp)
        self._place = group_rank(groups.dp) * self._cp + group_rank(groups.cp)
        self._sums: Tensor | None = None

    def clear(self) -> None:
        """Forget all tokens."""
        self._sums = None

    def add(self, train: Tensor, local: LocalTokens) -> None:
        """Add the tokens of a micro-batch, on the last stage, with the trainer's log-probs. Collectives: none."""
        train = train.detach()
        rollout = local.rollout_log_probs
        usable = local.response_mask & is_log_prob(train) & is_log_prob(rollout)
        distance = torch.where(usable, (train.double() - rollout.double()).abs(), 0).sum()
        pairs = lag_distances(train, rollout, usable, local.positions)
        sums = torch.cat([torch.stack([distance, usable.sum().double()]), pairs])
        self._sums = sums if self._sums is None else self._sums + sums

    @property
    def numbers(self) -> list[float]:
        """This rank's list for the reduction, with zeros in other ranks' places. One host synchronisation."""
        numbers = [0.0] * (self._replicas * self._cp * _NUMBERS)
        if self._sums is not None:
            numbers[self._place * _NUMBERS : (self._place + 1) * _NUMBERS] = self._sums.tolist()
        return numbers

    def check(self, shared: Sequence[float], step: int) -> dict[str, float]:
        """Compare the replicas that have tokens with the limit, from the lists of all ranks.

        ``rollout/sync_error`` is the largest mean of a replica, absent if none has tokens. Raises RunError on every
        rank if an engine disagrees by more than rounding explains; it names ``step``, the number of optimizer steps
        that made the weights.
        """
        sums = torch.tensor(shared, dtype=torch.float64).view(-1, self._cp, _NUMBERS).sum(dim=1).tolist()
        means = {}
        for replica, (distance, tokens, *_) in enumerate(sums):
            if tokens > 0:
                means[replica] = distance / tokens
        limit = tolerance(self.config)
        far = [replica for replica, mean in means.items() if not mean <= limit]
        if far:
            worst = max(far, key=means.__getitem__)
            raise RunError(self._words(far, means[worst], sums[worst][2:], step, limit))
        return {"rollout/sync_error": max(means.values())} if means else {}

    def _words(self, far: Sequence[int], mean: float, by_lag: Sequence[float], step: int, limit: float) -> str:
        configured = self.config.rollouts.rl_default_temperature
        findings = judge({configured: by_lag}, configured, limit)
        hints = [f"; {finding.words}" for finding in findings if finding.about == "shift" and not finding.agrees]
        return (
            f"after the weight sync of step {step} the rollout engine and the trainer disagree by "
            f"{mean:.4f} nats a token{self._named(far)}, up to {limit} is rounding{''.join(hints)}: "
            "does the engine keep older weights, or a prefix cache made with them? Compare engine and trainer with "
            "python -m megatron_rc.launch.check_engine; raise --rollout-check-tolerance only if the engine rounds more "
            "than --rollout-dtype says"
        )

    def _named(self, far: Sequence[int]) -> str:
        """The replicas with the addresses of their servers; empty if the run has one replica."""
        if self._replicas == 1:
            return ""
        urls = (self.config.engine.rollout_url or "").split(",")
        names = [f"{replica} ({urls[replica]})" if urls[0] else str(replica) for replica in far[:_MOST_NAMED]]
        more = ", ..." if len(far) > _MOST_NAMED else ""
        return f" on {len(far)} of {self._replicas} data-parallel replicas ({', '.join(names)}{more})"


class BatchCheck:
    """Comparison of the engines' log-probs of the newest rollout batch with the trainer's.

    Attributes:
        is_on: compare batches; off until the trainer's weights go to engines.
        is_open: log-probs of the loss are needed.
        metrics: result for the newest batch; empty until all ranks have shared their numbers.
    """

    def __init__(self, config: RunConfig, groups: ParallelGroups) -> None:
        self._distance = EngineDistance(config, groups)
        self._is_pending = False
        self._step = 0
        self.is_on = False
        self.is_open = False
        self.metrics: dict[str, float] = {}

    def begin(self, step: int, old: Tensor | None, local: LocalTokens) -> None:
        """Begin a rollout batch, on every rank, from weights that ``step`` optimizer steps made. Collectives: none.

        ``old`` is log π_old of the local tokens; None before the last stage, and if the loss computes it.
        """
        self._distance.clear()
        self._is_pending = self.is_on
        self._step = step
        self.metrics = {}
        self.is_open = self.is_on and old is None
        if self.is_on and old is not None:
            self.add(old, local)

    def add(self, log_probs: Tensor, local: LocalTokens) -> None:
        """Add a micro-batch of a loss, before a weight has changed since ``begin``. Collectives: none."""
        if local.policy_versions is not None:
            local = replace(local, response_mask=local.response_mask & (local.policy_versions == self._step))
        self._distance.add(log_probs, local)

    @property
    def numbers(self) -> list[float]:
        """This rank's numbers for the next reduction over all ranks, equally many on each; empty if already shared."""
        return self._distance.numbers if self._is_pending else []

    def hear(self, shared: list[float]) -> None:
        """Judge ``shared``, the largest of each of the ``numbers`` over all ranks. Collectives: none.

        Raises RunError on every rank if an engine disagrees by more than rounding explains; it names the replica.
        """
        metrics = self._distance.check(shared, self._step) if shared else {}
        if metrics:
            self._is_pending = False
            self.is_open = False
            self.metrics = metrics
