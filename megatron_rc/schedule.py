"""The masked loss on its way into Megatron's pipeline schedule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossScale:
    """The global factors of one optimizer step: known before the schedule, equal on all ranks.

    Attributes:
        denominator: G, what the sum of the loss over the whole mini-batch is divided by; > 0.
        num_microbatches: of this step, on each data-parallel rank.
        dp_cp_size: number of ranks that hold different tokens.
        calculate_per_token_loss: Megatron's setting of that name.
        local_tokens: tokens of the local micro-batch, padding included.
        total_tokens: their sum over all micro-batches and ranks of the step.
    """

    denominator: float
    num_microbatches: int
    dp_cp_size: int
    calculate_per_token_loss: bool
    local_tokens: int
    total_tokens: int


def schedule_return(
    loss_sum: Tensor, log: dict[str, Tensor], scale: LossScale
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """What Megatron's ``loss_func`` returns for one micro-batch, so that the gradients are those of Σℓ/G.

    Without ``calculate_per_token_loss`` Megatron divides the loss by ``num_tokens`` and by the number of micro-batches,
    and DDP averages over DP×CP: the factors here undo that. With it, DDP sums, and ``finalize_model_grads`` divides by
    the sum of all ``num_tokens`` (megatron-core 0.16 to 0.19, ``pipeline_parallel/schedules.py``).

    Args:
        loss_sum: 0-D, Σ of the masked loss over this local micro-batch, in the graph even if nothing is counted.
        log: what the schedule hands back to the caller; values are cloned, since Megatron scales the loss in place.
        scale: the factors of this step.

    Returns:
        (loss, num_tokens, log).
    """
    loss = loss_sum / scale.denominator
    if scale.calculate_per_token_loss:
        loss, num_tokens = loss * scale.total_tokens, scale.local_tokens
    else:
        loss, num_tokens = loss * (scale.num_microbatches * scale.dp_cp_size), 1
    count = torch.tensor(num_tokens, dtype=torch.int32, device=loss.device)
    return loss, count, {name: value.detach().clone() for name, value in log.items()}
