"""The counts that the loss is divided by, and the sums that the mean weight w̄ is the quotient of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from megatron_rc.correction.decisions import SequenceDecisions, SequenceSums
from megatron_rc.correction.inputs import Shards
from megatron_rc.settings.config import RolloutCorrectionConfig

N = TypeVar("N")  # Tensor on the device, float on the host


@dataclass(frozen=True)
class Denominators(Generic[N]):
    """Sums over the whole batch from which the loss's denominators follow."""

    counts: Any  # [num_mini_batches, 4] tokens and sequences under m, then under m'; lists on the host, like the next
    weights: Any  # [num_mini_batches] Σ w over accepted tokens, bounded and not normalised; 0 without weights
    id_sums: Any  # [num_mini_batches] Σ over accepted tokens of (sequence id + 1)
    total_weight: N  # the sum of weights that w̄ is the mean of: of valid or accepted tokens, or of such sequences
    weight_count: N  # the number of these weights


def count_batch(
    sums: SequenceSums, decisions: SequenceDecisions, shards: Shards, config: RolloutCorrectionConfig
) -> Denominators[Tensor]:
    """The part of this rank: each sequence counts on its first CP rank, since all of them know it whole."""
    first, accepted = shards.counts_here, decisions.accepted.tokens
    shared = None if decisions.weights is None else decisions.weights.bounded
    weight = decisions.accepted.weight if shared is None else shared * accepted
    weight = torch.zeros_like(accepted) if weight is None else weight
    columns = [decisions.tokens, decisions.tokens > 0, accepted, accepted > 0, weight]
    columns.append(accepted * (shards.sequence_ids + 1))
    counts = accepted.new_zeros(shards.counts.num_mini_batches, 6)
    counts.index_add_(0, shards.mini_batch_ids, torch.stack(columns, dim=1) * first.unsqueeze(1))
    # The weights that batch normalisation averages, and how many each sequence has.
    only_accepted = config.rollout_is_batch_normalize_scope == "accepted"
    if shared is not None:
        count = (accepted if only_accepted else sums.valid) > 0
        total = torch.where(count, shared, 0)
    elif only_accepted or sums.weight is None:
        total, count = weight, accepted
    else:
        total, count = sums.weight, sums.valid
    return Denominators(
        counts[:, :4], counts[:, 4], counts[:, 5], (total * first).sum(), (count.double() * first).sum()
    )
