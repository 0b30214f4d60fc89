"""Broadcast of a rollout batch from the first rank of a replica to its other ranks, in tensors of fixed shapes."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_rc.launch.rollouts.routed_experts import ExpertsBroadcast
from megatron_rc.launch.rollouts.sampler import SampledBatch
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.parallel.collectives import all_reduce_sum, broadcast
from megatron_rc.parallel.groups import ParallelGroups, group_rank, group_size
from megatron_rc.records.rollout import RolloutBatch, SamplingParams

# Bytes of a replica's metrics: enough for MAX_COMPONENTS with the longest names, and for the overlong penalty.
_BYTES = 8192


class ReplicaBroadcast:
    """Broadcasts from TP, CP and PP rank 0 of a replica: over TP×CP on the first stage, then over PP."""

    def __init__(self, config: RunConfig, groups: ParallelGroups, sampling: SamplingParams) -> None:
        self.groups, self.device, self.sampling = groups, config.launch.device, sampling
        self._experts = ExpertsBroadcast(config, groups) if config.replays_rollouts else None
        self._sends_support = config.rollouts.replays_sampling
        self._sends_turn_rewards = config.has_turn_rewards

    def tensor(self, tensor: Tensor) -> Tensor:
        """The first rank's tensor; shape and dtype are equal on all ranks."""
        tensor = tensor.to(self.device)
        if group_rank(self.groups.pp) == 0:
            tensor = broadcast(tensor, 0, parallel_state.get_tensor_and_context_parallel_group())
        return broadcast(tensor, 0, self.groups.pp)

    def batch(self, batch: RolloutBatch | None, rows: int, length: int) -> RolloutBatch:
        """The first rank's batch of ``rows`` responses and ``length`` columns; the other ranks give None.

        ``routed_experts`` has the layers of this rank's stage, see :class:`ExpertsBroadcast`; it is None unless the
        rollouts' experts are replayed. The supports are on the last stage, which scores, and on the first rank; they
        are None unless the trainer uses them.

        Collectives: two broadcasts over TP×CP and two over PP, and those of the experts and of the supports.
        """
        columns_per_token = 4 if self._sends_support else 3
        integers = torch.zeros(rows, columns_per_token * length + 4, dtype=torch.int64)
        floats = torch.zeros(rows, (2 if self._sends_turn_rewards else 1) * length + 1)
        if batch is not None:
            # Without ids each row is a rollout.
            rollout_ids = torch.arange(rows) if batch.rollout_ids is None else batch.rollout_ids
            per_row = (batch.sample_ids, batch.group_ids, batch.finish_reasons, rollout_ids)
            columns = [values.unsqueeze(1) for values in per_row]
            # The receivers expect these dtypes; records may have others.
            whole = [batch.tokens, batch.response_mask, batch.policy_versions, *columns]
            if self._sends_support and batch.support_counts is not None:
                whole.insert(3, batch.support_counts)
            integers = torch.cat([values.long() for values in whole], dim=1)
            per_token = [batch.rollout_log_probs]
            if self._sends_turn_rewards:
                early = batch.turn_rewards
                per_token.append(torch.zeros_like(batch.rollout_log_probs) if early is None else early)
            floats = torch.cat([values.float() for values in (*per_token, batch.rewards.unsqueeze(1))], dim=1)
        integers, floats = self.tensor(integers), self.tensor(floats)
        tokens, mask, versions, *counts, rest = integers.split([*[length] * columns_per_token, 4], dim=1)
        return RolloutBatch(
            tokens=tokens,
            response_mask=mask.bool(),
            rollout_log_probs=floats[:, :length],
            turn_rewards=floats[:, length:-1] if self._sends_turn_rewards else None,
            policy_versions=versions.int(),
            sample_ids=rest[:, 0],
            group_ids=rest[:, 1],
            rewards=floats[:, -1],
            finish_reasons=rest[:, 2],
            rollout_ids=rest[:, 3],
            sampling=self.sampling,
            routed_experts=None if self._experts is None else self._experts(batch, rows, length),
            **(self._support(None if batch is None else batch.support_ids, counts[0].int()) if counts else {}),
        )

    def reward_metrics(self, sampled: SampledBatch | None) -> dict[str, float]:
        """Means of reward components over the responses that have them, and counts of errors and bad responses.

        They are equal on all ranks. ``sampled`` is None except on the first rank of each replica.

        Collectives: one broadcast in the replica, one SUM over DP, both of a fixed size.
        """
        row = torch.zeros(_BYTES, dtype=torch.uint8)
        if sampled is not None:
            message = json.dumps({"counts": sampled.counts, "sums": sampled.sums}).encode()
            row[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        row = self.tensor(row)
        table = torch.zeros(group_size(self.groups.dp), _BYTES, dtype=torch.uint8, device=row.device)
        table[group_rank(self.groups.dp)] = row
        rows = all_reduce_sum(table, self.groups.dp).cpu().numpy()
        replicas = [json.loads(row.tobytes().rstrip(b"\0")) for row in rows]
        means = {}
        for name in sorted({name for replica in replicas for name in replica["sums"]}):
            pairs = [replica["sums"][name] for replica in replicas if name in replica["sums"]]
            means[f"reward/{name}"] = sum(total for total, _ in pairs) / sum(count for _, count in pairs)
        counted = replicas[0]["counts"]
        return means | {name: float(sum(replica["counts"][name] for replica in replicas)) for name in counted}

    def _support(self, ids: Tensor | None, counts: Tensor) -> dict[str, Tensor | None]:
        """The fields of the supports, whose ``ids`` the first rank has; ``counts``, [rows, length], are on all ranks.

        Collectives, on the first and the last stage: a message between their first ranks, a broadcast over the last
        stage's TP×CP. One host synchronisation.
        """
        pp = self.groups.pp
        stage, last = group_rank(pp), group_size(pp) - 1
        if stage < last and ids is None:
            return {}
        here = torch.zeros(int(counts.sum()), dtype=torch.int32) if ids is None else ids
        here = here.to(self.device, torch.int32).contiguous()
        if pp is not None and last and group_rank(self.groups.tp) == group_rank(self.groups.cp) == 0:
            first_rank, last_rank = dist.get_global_rank(pp, 0), dist.get_global_rank(pp, last)
            if stage == last:
                dist.recv(here, first_rank, group=pp)
            else:
                dist.send(here, last_rank, group=pp)
        if stage == last:
            here = broadcast(here, 0, parallel_state.get_tensor_and_context_parallel_group())
        return {"support_ids": here, "support_counts": counts}
