"""Sums by staleness of tokens that have a version each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rc.correction.denominators import into_buckets
from megatron_rc.correction.inputs import Shards
from megatron_rc.correction.tokens import decide_tokens, token_blocks
from megatron_rc.measures.sequence_measures import staleness_bucket
from megatron_rc.settings.config import RolloutCorrectionConfig


def token_staleness(
    shards: Shards, accepted: Sequence[Tensor], config: RolloutCorrectionConfig
) -> tuple[Tensor, Tensor]:
    """([buckets, 3] valid tokens, rejected tokens and Σ log ρ; 0-D tokens above the current version), float64.

    Args:
        shards: the local tokens; zeros are returned unless they have versions of their own.
        accepted: m' of each micro-batch.
        config: the correction.
    """
    table = torch.zeros(shards.counts.max_staleness + 1, 3, dtype=torch.float64, device=shards.device)
    newer = table.new_zeros(())
    if shards.parts[0].versions is None:
        return table, newer
    for number, block, tokens, _ in token_blocks(shards, config):
        decisions = decide_tokens(tokens, config)
        versions = block.take(shards.parts[number].versions).reshape(-1)  # type: ignore[arg-type]
        valid, kept = decisions.valid.reshape(-1), block.take(accepted[number]).reshape(-1)
        columns = torch.stack([valid.double(), (valid & ~kept).double(), decisions.log_ratio.reshape(-1).double()], 1)
        table = table + into_buckets(staleness_bucket(versions, shards), len(table), columns)
        newer = newer + (valid & (versions > (shards.counts.current_version or 0))).sum()
    return table, newer
