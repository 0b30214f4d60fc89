"""The counts that the loss is divided by, and the sums that the mean weight w̄ is the quotient of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from megatron_rc.correction.inputs import Shards
from megatron_rc.correction.sequences import SequenceDecisions, SequenceSums
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


def mini_batch_columns(decisions: SequenceDecisions, shards: Shards) -> list[Tensor]:
    """Return the numbers of each sequence that are added up over its mini-batch, [n] each.

    They are: tokens and sequences under m, then under m'; over accepted tokens Σ w, 0 without weights, and
    Σ (sequence id + 1).
    """
    accepted = decisions.accepted_tokens
    weight = accepted_weights(decisions)
    return [
        decisions.tokens,
        decisions.tokens > 0,
        accepted,
        accepted > 0,
        torch.zeros_like(accepted) if weight is None else weight,
        accepted * (shards.sequence_ids + 1),
    ]


def accepted_weights(decisions: SequenceDecisions) -> Tensor | None:
    """Return Σ w over the accepted tokens of each sequence, [n]; None without weights."""
    if decisions.weights is not None:
        return decisions.weights.bounded * decisions.accepted_tokens
    return decisions.accepted_weight


def averaged_weights(
    sums: SequenceSums, decisions: SequenceDecisions, config: RolloutCorrectionConfig
) -> tuple[Tensor, Tensor]:
    """Return the weights that batch normalisation averages, [n] each: their sum in each sequence, and their number.

    A weight that the tokens of a sequence share counts once. Without weights the sum is 0.
    """
    only_accepted = config.rollout_is_batch_normalize_scope == "accepted"
    num_tokens = decisions.accepted_tokens if only_accepted else sums.valid
    if decisions.weights is not None:
        counted = num_tokens > 0
        return torch.where(counted, decisions.weights.bounded, 0), counted
    weight = decisions.accepted_weight if only_accepted else sums.sums.get("weight")
    return torch.zeros_like(num_tokens) if weight is None else weight, num_tokens
