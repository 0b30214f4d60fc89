"""Broadcast of a rollout batch from the first rank of a replica to its other ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_rc.launch.rollouts.excluded import Excluded
from megatron_rc.launch.rollouts.routed_experts import ExpertsBroadcast
from megatron_rc.launch.rollouts.sampler import SampledBatch
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.parallel.collectives import broadcast
from megatron_rc.parallel.groups import ParallelGroups, group_rank, group_size
from megatron_rc.records.rollout import RolloutBatch

T = TypeVar("T")


class ReplicaBroadcast:
    """Broadcasts from TP, CP and PP rank 0 of a replica: over TP×CP on the first stage, then over PP."""

    def __init__(self, config: RunConfig, groups: ParallelGroups) -> None:
        self.groups = groups
        self.device = config.launch.device
        self.sampling = config.rollouts.sampling
        self._experts = ExpertsBroadcast(config, groups) if config.replays_rollouts else None
        self._sends_support = config.rollouts.replays_sampling
        self._sends_turn_rewards = config.has_turn_rewards

    def value(self, value: T | None) -> T:
        """The first rank's object, pickled; the other ranks give None. Its tensors are on the CPU.

        Collectives: broadcasts of its size and its bytes, over TP×CP on the first stage and over PP.
        """
        values = [value]
        groups = [self.groups.pp]
        if group_rank(self.groups.pp) == 0:
            groups.insert(0, parallel_state.get_tensor_and_context_parallel_group())
        for group in groups:
            if group is not None and group_size(group) > 1:
                first = dist.get_global_rank(group, 0)
                dist.broadcast_object_list(values, src=first, group=group, device=self.device)
        (shared,) = values
        return shared  # type: ignore[return-value]

    def batch(self, batch: RolloutBatch | None) -> RolloutBatch:
        """The first rank's batch, on the device; the other ranks give None.

        ``routed_experts`` has the layers of this rank's stage, see :class:`ExpertsBroadcast`; it is None unless the
        rollouts' experts are replayed. The supports are on the last stage, which scores, and on the first rank; they
        are None unless the trainer uses them.

        Collectives: those of :meth:`value`, and those of the experts and of the supports.
        """
        shared = self.value(None if batch is None else self._for_all(batch))
        shared = shared.to(self.device)
        if self._experts is not None:
            shared = replace(shared, routed_experts=self._experts(batch, *shared.tokens.shape))
        if shared.support_counts is not None:
            shared = self._with_support(shared, None if batch is None else batch.support_ids)
        return shared

    def summary(self, sampled: SampledBatch | None) -> tuple[dict[str, float], list[Excluded]]:
        """Metrics of a rollout batch over all replicas, and the responses that are not in it; equal on all ranks.

        The metrics are means of reward components over the responses that have them, and counts of errors and bad
        responses. ``sampled`` is None except on the first rank of each replica.

        Collectives: those of :meth:`value`, and one gather of objects over DP.
        """
        numbers = None
        if sampled is not None:
            numbers = dict(sampled.counts), dict(sampled.sums), list(sampled.excluded or ())
        of_replica = self.value(numbers)
        of_replicas = [of_replica]
        if self.groups.dp is not None and group_size(self.groups.dp) > 1:
            of_replicas = [of_replica] * group_size(self.groups.dp)
            dist.all_gather_object(of_replicas, of_replica, group=self.groups.dp)

        metrics: dict[str, float] = {}
        for name in sorted({name for _, sums, _ in of_replicas for name in sums}):
            totals_and_numbers = [sums[name] for _, sums, _ in of_replicas if name in sums]
            total = sum(total for total, _ in totals_and_numbers)
            metrics[f"reward/{name}"] = total / sum(number for _, number in totals_and_numbers)
        for name in of_replica[0]:
            metrics[name] = float(sum(counts[name] for counts, _, _ in of_replicas))
        return metrics, [response for _, _, excluded in of_replicas for response in excluded]

    def _for_all(self, batch: RolloutBatch) -> RolloutBatch:
        """The parts of a batch that all ranks get, in the dtypes of this project's engines; records may have others."""
        turn_rewards = None
        if self._sends_turn_rewards:
            turn_rewards = batch.turn_rewards
            if turn_rewards is None:
                turn_rewards = torch.zeros_like(batch.rollout_log_probs)
        support_counts = batch.support_counts if self._sends_support else None
        parts = RolloutBatch(
            tokens=batch.tokens.long(),
            response_mask=batch.response_mask.bool(),
            rollout_log_probs=batch.rollout_log_probs.float(),
            policy_versions=batch.policy_versions.int(),
            sample_ids=batch.sample_ids.long(),
            group_ids=batch.group_ids.long(),
            rewards=batch.rewards.float(),
            finish_reasons=batch.finish_reasons.long(),
            sampling=self.sampling,
            turn_rewards=None if turn_rewards is None else turn_rewards.float(),
            # Without ids each row is a rollout.
            rollout_ids=torch.arange(len(batch.tokens)) if batch.rollout_ids is None else batch.rollout_ids.long(),
            support_counts=None if support_counts is None else support_counts.int(),
        )
        # A part of a larger tensor would be pickled with all of it.
        copies: dict[str, Any] = {name: tensor.clone() for name, tensor in parts.tensors().items()}
        return replace(parts, **copies)

    def _with_support(self, shared: RolloutBatch, ids: Tensor | None) -> RolloutBatch:
        """The batch with the kept tokens, whose ``ids`` the first rank has; without them on stages that do not score.

        Collectives, on the first and the last stage: a message between their first ranks, a broadcast over the last
        stage's TP×CP. One host synchronisation.
        """
        pp = self.groups.pp
        stage = group_rank(pp)
        last_stage = group_size(pp) - 1
        if stage < last_stage and ids is None:
            return replace(shared, support_counts=None)
        counts = shared.support_counts
        size = 0 if counts is None else int(counts.sum())
        kept_ids = torch.zeros(size, dtype=torch.int32) if ids is None else ids
        kept_ids = kept_ids.to(self.device, torch.int32).contiguous()
        is_first_of_stage = group_rank(self.groups.tp) == group_rank(self.groups.cp) == 0
        if pp is not None and last_stage and is_first_of_stage:
            if stage == last_stage:
                dist.recv(kept_ids, dist.get_global_rank(pp, 0), group=pp)
            else:
                dist.send(kept_ids, dist.get_global_rank(pp, last_stage), group=pp)
        if stage == last_stage:
            kept_ids = broadcast(kept_ids, 0, parallel_state.get_tensor_and_context_parallel_group())
        return replace(shared, support_ids=kept_ids)
