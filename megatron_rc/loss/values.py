"""The loss of a critic's values, token by token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.numerics import check_mask
from megatron_rc.parallel.arguments import check_alike, check_number, check_tensors
from megatron_rc.parallel.softmax import arithmetic

SUMS = ("tokens", "clipped", "values", "returns", "squared_returns", "errors", "squared_errors")


@dataclass(frozen=True)
class ValueLoss:
    """``per_token`` is like the values, float32 or wider, 0 if masked; ``sums`` add up over micro-batches and ranks.

    ``sums``: [len(SUMS)] float64, over the tokens of the mask, in the order of ``SUMS``; an error is R - V.
    """

    per_token: Tensor
    sums: Tensor


def value_loss(
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    old_values: Tensor | None = None,
    clip: float | None = None,
    weights: Tensor | None = None,
) -> ValueLoss:
    """½ w max((V - R)², (clip(V, V_old - c, V_old + c) - R)²) of every token; without c ½ w (V - R)².

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms", Eq. 9 (the squared error), and the clipping of its
    published implementation (Engstrom et al. 2020, "Implementation Matters in Deep Policy Gradients").

    Tensors are like ``values``, V of the state before each label, of the layout's local shape; differentiated.
    ``returns``: R. ``mask``: bool, the tokens that count; others change no bit of result and gradient. ``old_values``:
    V_old, of the critic before its steps on the rollout batch; needed with ``clip``, c, in the unit of the rewards.
    ``weights``: w, detached; default 1.

    Raises:
        ValueError: shapes that do not fit, a clip that is not positive, or one without old values.
    """
    check_tensors({"old_values": old_values, "weights": weights}, values=values, returns=returns, mask=mask)
    check_alike("values", values, returns=returns, mask=mask, old_values=old_values, weights=weights)
    check_mask("mask", mask)
    if clip is not None:
        words = "must be positive and finite, and needs old_values: pass both, or neither"
        check_number("clip", clip, lambda c: 0 < c < torch.inf and old_values is not None, words)
    values = values.to(arithmetic(values.dtype))
    values, returns = torch.where(mask, values, 0), torch.where(mask, returns.detach().to(values.dtype), 0)
    loss, clipped = (values - returns).square(), torch.zeros_like(mask)
    if clip is not None and old_values is not None:
        before = torch.where(mask, old_values.detach().to(values.dtype), 0)
        held = (torch.maximum(torch.minimum(values, before + clip), before - clip) - returns).square()
        clipped = held > loss
        loss = torch.where(clipped, held, loss)
    factor = 0.5 if weights is None else 0.5 * torch.where(mask, weights.detach(), 0).to(loss.dtype)
    errors = (returns - values.detach()).double()
    terms = (mask, clipped, values.detach(), returns, returns.double().square(), errors, errors.square())
    return ValueLoss(factor * loss, torch.stack([term.double().sum() for term in terms]))


def derive_value_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """The metrics of ``docs/metrics.md`` that begin with ``critic/``, from global sums on the host.

    The explained variance is 1 - Var(R - V) / Var(R), and 0 if all returns are equal.
    """
    tokens = max(sums["tokens"], 1)
    mean, error = sums["returns"] / tokens, sums["errors"] / tokens
    spread = sums["squared_returns"] / tokens - mean**2
    unexplained = sums["squared_errors"] / tokens - error**2
    return {
        "critic/value_mean": sums["values"] / tokens,
        "critic/return_mean": mean,
        "critic/clip_fraction": sums["clipped"] / tokens,
        "critic/explained_variance": 1 - unexplained / spread if spread > 1e-12 else 0.0,
    }
