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
    sampled: SampledBatch | None, broadcast: ReplicaBroadcast, groups: ParallelGroups
) -> dict[str, float]:
    """Means of components over the responses that have them, and counts of errors and bad responses; equal everywhere.

    ``sampled`` is None except on the first rank of each replica.

    Collectives: one broadcast in the replica, one SUM over DP, both of a fixed size.
    """
    row = torch.zeros(_BYTES, dtype=torch.uint8)
    if sampled is not None:
        message = json.dumps({"counts": sampled.counts, "sums": sampled.sums}).encode()
        row[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    row = broadcast.tensor(row)
    table = torch.zeros(group_size(groups.dp), _BYTES, dtype=torch.uint8, device=row.device)
    table[group_rank(groups.dp)] = row
    rows = all_reduce_sum(table, groups.dp).cpu().numpy()
    return _merged([json.loads(row.tobytes().rstrip(b"\0")) for row in rows])


def _merged(replicas: Sequence[dict[str, Any]]) -> dict[str, float]:
    names = sorted({name for replica in replicas for name in replica["sums"]})
    means = {}
    for name in names:
        totals, counts = zip(*(replica["sums"][name] for replica in replicas if name in replica["sums"]), strict=True)
        means[f"reward/{name}"] = sum(totals) / sum(counts)
    counted = replicas[0]["counts"]
    return means | {name: float(sum(replica["counts"][name] for replica in replicas)) for name in counted}
