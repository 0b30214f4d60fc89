"""Distances between the log-probs of each replica's engine and of the trainer, and their limit.

Each last-stage rank adds up its own tokens. Every rank gets all sums in an agreement of all ranks, which is made anyway
and returns element-wise maxima: each rank fills its own places of a list of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.launch.distributed import AgreedError
from megatron_rc.launch.rollouts.agreement import judge, lag_distances, tolerance
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.numerics import is_log_prob
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.groups import group_rank, group_size
from megatron_rc.training.micro_batch import MicroBatch

# Numbers of one rank: Σ|Δ log-prob|, number of tokens, and four sums of lag_distances.
_NUMBERS = 6
_MOST_NAMED = 8


@dataclass(frozen=True)
class Replica:
    """Distance of one replica's engine."""

    number: int  # data-parallel rank
    mean: float  # mean |Δ log-prob| of the replica's tokens, in nats
    by_lag: Sequence[float]  # sums of ``lag_distances``


class EngineDistance:
    """Mean |log π_train - log π_rollout| of each replica, over tokens that both scored with equal weights."""

    def __init__(self, config: RunConfig, groups: ParallelGroups) -> None:
        self.config, self.groups = config, groups
        self._cp = group_size(groups.cp)
        self._ranks = group_size(groups.dp) * self._cp
        self._place = group_rank(groups.dp) * self._cp + group_rank(groups.cp)
        self._sums: Tensor | None = None

    def clear(self) -> None:
        """Forget all tokens."""
        self._sums = None

    def add(self, train: Tensor, local: MicroBatch, positions: Tensor) -> None:
        """Add the tokens of a micro-batch, on the last stage. Collectives: none.

        ``train`` has the trainer's log-probs, ``positions`` the positions in whole sequences, both like the tokens.
        """
        train, rollout = train.detach(), local.rollout_log_probs
        usable = local.response_mask & is_log_prob(train) & is_log_prob(rollout)
        distance = torch.where(usable, (train.double() - rollout.double()).abs(), 0).sum()
        pairs = lag_distances(train, rollout, usable, positions)
        sums = torch.cat([torch.stack([distance, usable.sum().double()]), pairs])
        self._sums = sums if self._sums is None else self._sums + sums

    @property
    def numbers(self) -> list[float]:
        """This rank's list for an agreement, with zeros in other ranks' places. One host synchronisation."""
        found = [0.0] * (self._ranks * _NUMBERS)
        if self._sums is not None:
            found[self._place * _NUMBERS : (self._place + 1) * _NUMBERS] = self._sums.tolist()
        return found

    def replicas(self, shared: Sequence[float]) -> list[Replica]:
        """Replicas that have tokens, from the lists of all ranks."""
        found = torch.tensor(shared, dtype=torch.float64).view(-1, self._cp, _NUMBERS).sum(dim=1).tolist()
        return [
            Replica(number, total / tokens, by_lag)
            for number, (total, tokens, *by_lag) in enumerate(found)
            if tokens > 0
        ]

    def check(self, replicas: Sequence[Replica], step: int) -> dict[str, float]:
        """Compare the replicas with the limit; ``rollout/sync_error`` is the largest mean, absent without a replica.

        Raises AgreedError on every rank if an engine disagrees by more than rounding explains; it names ``step``, the
        number of optimizer steps that made the weights.
        """
        limit = tolerance(self.config)
        far = [one for one in replicas if not one.mean <= limit]
        if far:
            raise AgreedError(self._words(far, step, limit))
        return {"rollout/sync_error": max(one.mean for one in replicas)} if replicas else {}

    def _words(self, far: Sequence[Replica], step: int, limit: float) -> str:
        worst = max(far, key=lambda one: one.mean)
        configured = self.config.rollouts.rl_default_temperature
        shift = [found for found in judge({configured: worst.by_lag}, configured, limit) if found.about == "shift"]
        hint = "".join(f"; {found.words}" for found in shift if not found.agrees)
        return (
            f"after the weight sync of step {step} the rollout engine and the trainer disagree by "
            f"{worst.mean:.4f} nats a token{self._named(far)}, up to {limit} is rounding{hint}: does the engine keep "
            "older weights, or a prefix cache made with them? Compare engine and trainer with "
            "python -m megatron_rc.launch.check_engine; raise --rollout-check-tolerance only if the engine rounds more "
            "than --rollout-dtype says"
        )

    def _named(self, far: Sequence[Replica]) -> str:
        """The replicas with the addresses of their servers; empty if the run has one replica."""
        if self._ranks == self._cp:
            return ""
        urls = (self.config.engine.rollout_url or "").split(",")
        names = [f"{one.number} ({urls[one.number]})" if urls[0] else str(one.number) for one in far[:_MOST_NAMED]]
        more = ", ..." if len(far) > _MOST_NAMED else ""
        return f" on {len(far)} of {self._ranks // self._cp} data-parallel replicas ({', '.join(names)}{more})"
