"""The gradient of the policy loss with respect to log π_θ of each sampled token, with a correction and without.

It is a proxy of the gradient of the weights: it takes all tokens' own gradients as equally long and orthogonal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.loss.policy import policy_loss
from megatron_rc.replay.tokens import Recorded, Tokens
from megatron_rc.settings.config import RolloutCorrectionConfig

# A record does not hold the loss and the advantages of its run.
LOSS = "the mean policy loss (clipped at 1 ± 0.2) with GRPO's advantages, also if the run had others,"
PROXY = f"gradient of {LOSS} with respect to log π_θ of each sampled token"
ALIKE = "gradient of the mean log π_θ of the sampled tokens, since all rewards of each prompt are alike"
_BLOCK = 2**20  # tokens; bounds the memory of autograd
Gradient = list[Tensor]  # of the sampled tokens, for each batch [n, s] float64


@dataclass(frozen=True)
class Effect:
    """Effect of a correction on the gradient."""

    cosine: float | None  # of the angle to the uncorrected gradient; None if either is 0
    length: float  # over the length of the uncorrected gradient
    of: str  # the gradient in words
    change: Tensor  # [n] float64, each sequence's share of the squared distance; the sum is 1, or all are 0


def uncorrected(data: Recorded) -> Gradient:
    """Gradient of PPO with the trainer's π_old, every sampled token and no weights."""
    tokens, denominator = [], float(data.lengths.sum())
    for part, advantages in zip(data.parts, data.split(data.advantages), strict=True):
        gradient = torch.empty_like(part.theta)
        for rows in _blocks(part):
            gradient[rows] = _gradient(part, rows, part.old, advantages, "ppo_clip", None) / denominator
        tokens.append(gradient)
    return tokens


def effect(
    data: Recorded,
    base: Gradient,
    config: RolloutCorrectionConfig,
    masks: Sequence[Tensor],
    weights: Sequence[Tensor] | None,
) -> Effect:
    """The corrected gradient beside the uncorrected one; arguments as in :func:`corrected`."""
    dot, square, reference, changes = 0.0, 0.0, 0.0, []
    for index, rows, own in corrected(data, config, masks, weights):
        other = base[index][rows]
        dot += float((own * other).sum(dtype=torch.float64))
        square += float(own.square().sum(dtype=torch.float64))
        reference += float(other.square().sum(dtype=torch.float64))
        changes.append((own - other).square().sum(dim=1, dtype=torch.float64))
    change = torch.cat(changes)
    return Effect(
        *cosine_and_length(dot, square, reference),
        of=PROXY if data.has_advantages else ALIKE,
        change=change / change.sum() if change.any() else change,
    )


def cosine_and_length(dot: float, square: float, reference: float) -> tuple[float | None, float]:
    """Cosine and relative length of a gradient, from its product with another and both squares."""
    cosine = dot / (square * reference) ** 0.5 if square > 0 and reference > 0 else None
    return cosine, (square / reference) ** 0.5 if reference > 0 else 0.0


def corrected(
    data: Recorded,
    config: RolloutCorrectionConfig,
    masks: Sequence[Tensor],
    weights: Sequence[Tensor] | None,
) -> Iterator[tuple[int, slice, Tensor]]:
    """Yield the corrected gradient in blocks: index of the batch, rows, gradient [rows, s] float64.

    ``masks`` and ``weights`` are [n, s] for each batch: accepted tokens, and weights if the loss has any.
    """
    accepted = sum(int(mask.sum()) for mask in masks)
    tokens = accepted if config.rejection_denominator == "accepted" else int(data.lengths.sum())
    algorithm = str(config.loss_type) if config.bypass_mode else "ppo_clip"
    for index, (part, advantages) in enumerate(zip(data.parts, data.split(data.advantages), strict=True)):
        old = part.rollout if config.bypass_mode else part.old
        for rows in _blocks(part):
            held = None if weights is None else weights[index][rows]
            own = _gradient(part, rows, old, advantages, algorithm, held)
            yield index, rows, torch.where(masks[index][rows], own, 0.0) / max(tokens, 1)


def _gradient(
    part: Tokens, rows: slice, old: Tensor, advantages: Tensor, algorithm: str, weights: Tensor | None
) -> Tensor:
    """[rows, s] float64: gradient of the summed loss of the sampled tokens; 0 elsewhere."""
    mask = part.mask[rows]
    theta = torch.where(mask, part.theta[rows].detach(), 0.0).requires_grad_()
    with torch.enable_grad():
        loss = policy_loss(theta, old[rows], advantages[rows], mask, algorithm=algorithm, weights=weights)
        (gradient,) = torch.autograd.grad(loss.per_token.sum(), theta)
    return gradient


def _blocks(part: Tokens) -> Iterator[slice]:
    """Blocks of whole rows, of about a million tokens."""
    rows, columns = part.mask.shape
    step = max(_BLOCK // max(columns, 1), 1)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))
