"""The gradient of the policy loss with respect to log π_θ of each sampled token, with a correction and without.

It stands for the gradient of the weights as far as the tokens' own gradients are alike in length and at right angles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.correction.result import CorrectionResult
from megatron_rc.loss.policy import policy_loss
from megatron_rc.replay.tokens import Recorded, Tokens
from megatron_rc.settings.config import RolloutCorrectionConfig

PROXY = (
    "gradient of the mean policy loss (clipped at 1 ± 0.2) with respect to log π_θ of each sampled token; "
    "advantages: rewards against those of the prompt's other responses"
)
ALIKE = "gradient of the mean log π_θ of the sampled tokens, since all rewards of each prompt are alike"
_BLOCK = 2**20  # tokens, so that what autograd keeps stays small


@dataclass(frozen=True)
class Uncorrected:
    """The gradient without a correction.

    Attributes:
        tokens: for each batch [n, s] float32, before the division by the number of tokens.
        denominator: the number of tokens.
    """

    tokens: tuple[Tensor, ...]
    denominator: float


@dataclass(frozen=True)
class Effect:
    """What a correction does to the gradient.

    Attributes:
        cosine: of the angle to the uncorrected gradient; None where either is 0.
        length: relative to the uncorrected gradient's.
        change: [n] float64: each sequence's share of the squared distance between the two; sums to 1, or all are 0.
    """

    cosine: float | None
    length: float
    change: Tensor


def uncorrected(data: Recorded) -> Uncorrected:
    """PPO with π_old as the trainer scored it, every sampled token, no weights."""
    tokens = []
    for part, advantages in zip(data.parts, data.split(data.advantages), strict=True):
        gradient = torch.empty_like(part.theta, dtype=torch.float32)
        for rows in _blocks(part):
            gradient[rows] = _gradient(part, rows, part.old, advantages, "ppo_clip", None)
        tokens.append(gradient)
    return Uncorrected(tuple(tokens), float(data.lengths.sum()))


def effect(data: Recorded, base: Uncorrected, config: RolloutCorrectionConfig, result: CorrectionResult) -> Effect:
    """The corrected gradient beside the uncorrected one."""
    masks, weights = listed(result.mask), listed(result.weights)
    column = 2 if config.rejection_denominator == "accepted" else 0
    denominator = max(float(result.denominators[0, column]), 1.0)
    algorithm = str(config.loss_type) if config.bypass_mode else "ppo_clip"
    dot, square, reference, changes = 0.0, 0.0, 0.0, []
    for index, (part, advantages) in enumerate(zip(data.parts, data.split(data.advantages), strict=True)):
        old = part.rollout if config.bypass_mode else part.old
        for rows in _blocks(part):
            held = weights[index][rows] if config.applies_weights else None
            own = _gradient(part, rows, old, advantages, algorithm, held)
            own = torch.where(masks[index][rows], own, 0.0) / denominator
            other = base.tokens[index][rows] / base.denominator
            dot += float((own * other).sum(dtype=torch.float64))
            square += float(own.square().sum(dtype=torch.float64))
            reference += float(other.square().sum(dtype=torch.float64))
            changes.append((own - other).square().sum(dim=1, dtype=torch.float64))
    change = torch.cat(changes)
    return Effect(
        cosine=dot / (square * reference) ** 0.5 if square > 0 and reference > 0 else None,
        length=(square / reference) ** 0.5 if reference > 0 else 0.0,
        change=change / change.sum() if change.any() else change,
    )


def _gradient(
    part: Tokens, rows: slice, old: Tensor, advantages: Tensor, algorithm: str, weights: Tensor | None
) -> Tensor:
    """[rows, s] float32: of the sum over the sampled tokens; 0 elsewhere."""
    mask = part.mask[rows]
    theta = torch.where(mask, part.theta[rows].detach().float(), 0.0).requires_grad_()
    with torch.enable_grad():
        loss = policy_loss(theta, old[rows].float(), advantages[rows], mask, algorithm=algorithm, weights=weights)
        (gradient,) = torch.autograd.grad(loss.per_token.sum(), theta)
    return gradient


def _blocks(part: Tokens) -> Iterator[slice]:
    """Whole rows, a million tokens at a time."""
    rows, columns = part.mask.shape
    step = max(_BLOCK // max(columns, 1), 1)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def listed(values: Tensor | list[Tensor] | None) -> list[Tensor]:
    """What a result holds of each batch; empty for what it does not have."""
    return values if isinstance(values, list) else []
