"""Broadcast of a rollout batch from the first rank of a replica to its other ranks, in tensors of fixed shapes."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_rc.launch.rollouts.routed_experts import ExpertsBroadcast
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.parallel.collectives import broadcast
from megatron_rc.parallel.groups import ParallelGroups, group_rank
from megatron_rc.records.rollout import RolloutBatch, SamplingParams


class ReplicaBroadcast:
    """Broadcasts from TP, CP and PP rank 0 of a replica: over TP×CP on the first stage, then over PP."""

    def __init__(self, config: RunConfig, groups: ParallelGroups, sampling: SamplingParams) -> None:
        self.groups, self.device, self.sampling = groups, config.launch.device, sampling
        self._experts = ExpertsBroadcast(config, groups) if config.replays_rollouts else None

    def tensor(self, tensor: Tensor) -> Tensor:
        """The first rank's tensor; shape and dtype are equal on all ranks."""
        tensor = tensor.to(self.device)
        if group_rank(self.groups.pp) == 0:
            tensor = broadcast(tensor, 0, parallel_state.get_tensor_and_context_parallel_group())
        return broadcast(tensor, 0, self.groups.pp)

    def batch(self, batch: RolloutBatch | None, rows: int, length: int) -> RolloutBatch:
        """The first rank's batch of ``rows`` responses and ``length`` columns; the other ranks give None.

        ``routed_experts`` has the layers of this rank's stage, see :class:`ExpertsBroadcast`; it is None unless the
        rollouts' experts are replayed.

        Collectives: two broadcasts over TP×CP and two over PP, and those of the experts.
        """
        integers = torch.zeros(rows, 3 * length + 3, dtype=torch.int64)
        floats = torch.zeros(rows, length + 1)
        if batch is not None:
            per_row = [batch.sample_ids, batch.group_ids, batch.finish_reasons]
            # The receivers expect these dtypes; records may have others.
            columns = [values.unsqueeze(1) for values in per_row]
            whole = [batch.tokens, batch.response_mask, batch.policy_versions, *columns]
            integers = torch.cat([values.long() for values in whole], dim=1)
            floats = torch.cat([batch.rollout_log_probs.float(), batch.rewards.float().unsqueeze(1)], dim=1)
        integers, floats = self.tensor(integers), self.tensor(floats)
        tokens, mask, versions, rest = integers.split([length, length, length, 3], dim=1)
        return RolloutBatch(
            tokens=tokens,
            response_mask=mask.bool(),
            rollout_log_probs=floats[:, :-1],
            policy_versions=versions.int(),
            sample_ids=rest[:, 0],
            group_ids=rest[:, 1],
            rewards=floats[:, -1],
            finish_reasons=rest[:, 2],
            sampling=self.sampling,
            routed_experts=None if self._experts is None else self._experts(batch, rows, length),
        )
