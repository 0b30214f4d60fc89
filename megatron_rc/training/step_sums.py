"""Sums over the tokens of a mini-batch, by which the end of an optimizer step recognises them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from megatron_rc.correction.denominators import N
from megatron_rc.correction.inputs import on_device
from megatron_rc.numerics import NUM_SEQUENCE_IDS
from megatron_rc.parallel.layout import SequenceLayout


@dataclass(frozen=True)
class StepSums(Generic[N]):
    """Three sums over tokens: a step adds them up over its micro-batches, and its plan knows what they must be.

    The tokens are the accepted ones in decoupled mode, and those of the response mask if the loss corrects. A sum that
    is not known is NaN, and is not compared.
    """

    tokens: N  # number of tokens
    # Σ (id of the token's sequence + 1): a missing and a repeated micro-batch differ in it even if both have equally
    # many tokens. Ids are below 2²¹, so that the sum is exact in float64.
    ids: N
    weights: N  # Σ of the weights that the loss applies; 0 if it applies none


def micro_batch_sums(
    mask: Tensor, layout: SequenceLayout, sequence_ids: Tensor | None, weights: Tensor | None = None
) -> StepSums[Tensor]:
    """The sums over this rank's tokens of one micro-batch, 0-D float64. Collectives: none.

    Args:
        mask: bool, of the layout's local shape: the tokens.
        layout: which tokens these are.
        sequence_ids: [n] int64; None: the sum of ids is NaN, not known.
        weights: like ``mask``; None: no weights are applied.

    Raises:
        ValueError: ``sequence_ids`` does not have one id for each sequence.
    """
    tokens_of_sequences = layout.sum_sequences(mask)
    tokens = tokens_of_sequences.sum()

    if sequence_ids is None:
        ids = torch.full_like(tokens, torch.nan)
    elif sequence_ids.shape != (layout.num_sequences,):
        raise ValueError(
            f"sequence_ids or plan_ids has shape {tuple(sequence_ids.shape)}: expected one for each of "
            f"{layout.num_sequences} sequences"
        )
    else:
        # Out of range ids are reported by check(); here they are clamped as the plan clamps them.
        clamped = on_device(sequence_ids, mask.device).clamp(0, NUM_SEQUENCE_IDS - 1)
        ids = (tokens_of_sequences * (clamped + 1)).sum()

    weight_sum = torch.zeros_like(tokens)
    if weights is not None:
        weight_sum = torch.where(mask, weights, 0).sum(dtype=torch.float64)
    return StepSums(tokens=tokens, ids=ids, weights=weight_sum)
