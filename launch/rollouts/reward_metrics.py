"""Metrics of reward components, sent from the first rank of each replica to all ranks in messages of fixed size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from megatron_rc.launch.rollouts.broadcast import ReplicaBroadcast
from megatron_rc.launch.rollouts.sampler import SampledBatch
from megatron_rc.parallel.collectives import all_reduce_sum
from megatron_rc.parallel.groups import ParallelGroups, group_rank, group_size

# Enough for MAX_COMPONENTS with the longest names, and for the overlong penalty.
_BYTES = 8192


def gather_reward_metrics(
    sampled: SampledBatch | None, broadcast: ReplicaBroadcast, groups: ParallelGroups, *, may_replace: bool
) -> dict[str, float]:
    """Mean of each component over the responses that have it, and counts of errors and bad responses; equal everywhere.

    ``sampled`` is None except on the first rank of each replica. With ``may_replace`` the prompts that dynamic sampling
    replaced are counted too.

    Collectives: one broadcast in the replica, one SUM over DP, both of a fixed size.
    """
    row = torch.zeros(_BYTES, dtype=torch.uint8)
    if sampled is not None and sampled.rewards is not None:
        counts = {
            "reward/errors": sampled.rewards.errors,
            "rollout/bad_samples": sampled.bad,
            "rollout/dropped_samples": sampled.dropped,
        }
        if may_replace:
            counts |= {"rollout/replaced_prompts": sampled.replaced, "rollout/flat_prompts": sampled.flat}
        sums = sampled.rewards.sums()
        if sampled.baselines is not None:
            sums["greedy"] = (float(sampled.baselines.double().sum()), len(sampled.baselines))
        message = json.dumps({"counts": counts, "sums": sums}).encode()
        row[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    row = broadcast.tensor(row)
    table = torch.zeros(group_size(groups.dp), _BYTES, dtype=torch.uint8, device=row.device)
    table[group_rank(groups.dp)] = row
    rows = all_reduce_sum(table, groups.dp).cpu().numpy()
    return _merged([json.loads(row.tobytes().rstrip(b"\0")) for row in rows])


def _merged(replicas: Sequence[dict[str, Any]]) -> dict[str, float]:
    sums: dict[str, tuple[float, int]] = {}
    for replica in replicas:
        for name, (total, count) in replica["sums"].items():
            before = sums.get(name, (0.0, 0))
            sums[name] = (before[0] + total, before[1] + count)
    means = {f"reward/{name}": total / count for name, (total, count) in sorted(sums.items())}
    names = replicas[0]["counts"]
    return means | {name: float(sum(replica["counts"][name] for replica in replicas)) for name in names}
