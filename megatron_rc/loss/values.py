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
    """The losses of the local tokens, and their measures.

    Attributes:
        per_token: like the values, float32 or wider; 0 at masked positions.
        sums: [len(SUMS)] float64, sums over the tokens of the mask in the order of ``SUMS``, which add up over
            micro-batches and ranks; an error is R - V.
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

    Args:
        values: V of the state before each label, of the layout's local shape; differentiated.
        returns: R, like ``values``, detached.
        mask: bool, like ``values``: the tokens that count; others change no bit of result and gradient.
        old_values: V_old, like ``values``: of the critic before its steps on the rollout batch. Needed with ``clip``.
        clip: c, in the unit of the rewards; None: no clipping.
        weights: w, like ``values``, detached; default 1.

    Raises:
        ValueError: shapes that do not fit, a clip that is not positive, or one without old values.
    """
    check_tensors({"old_values": old_values, "weights": weights}, values=values, returns=returns, mask=mask)
    check_alike("values", values, returns=returns, mask=mask, old_values=old_values, weights=weights)
    check_mask("mask", mask)
    if clip is not None:
        expected = "must be positive and finite, and needs old_values: pass both, or neither"
        check_number("clip", clip, lambda c: 0 < c < torch.inf and old_values is not None, expected)
    dtype = arithmetic(values.dtype)
    # Masked positions may hold anything, NaN too.
    values = torch.where(mask, values.to(dtype), 0)
    returns = torch.where(mask, returns.detach().to(dtype), 0)

    loss = (values - returns).square()
    is_clipped = torch.zeros_like(mask)
    if clip is not None and old_values is not None:
        before = torch.where(mask, old_values.detach().to(dtype), 0)
        clipped_values = torch.maximum(torch.minimum(values, before + clip), before - clip)
        clipped_loss = (clipped_values - returns).square()
        is_clipped = clipped_loss > loss
        loss = torch.where(is_clipped, clipped_loss, loss)
    loss = 0.5 * loss
    if weights is not None:
        loss = loss * torch.where(mask, weights.detach(), 0).to(dtype)

    errors = (returns - values.detach()).double()
    measured = {
        "tokens": mask,
        "clipped": is_clipped,
        "values": values.detach(),
        "returns": returns,
        "squared_returns": returns.double().square(),
        "errors": errors,
        "squared_errors": errors.square(),
    }
    return ValueLoss(loss, torch.stack([measured[name].double().sum() for name in SUMS]))


def derive_value_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """The metrics of ``docs/metrics.md`` that begin with ``critic/``, from global sums by the names of ``SUMS``.

    The explained variance is 1 - Var(R - V) / Var(R), and 0 if all returns are equal.
    """
    tokens = max(sums["tokens"], 1)
    mean_return = sums["returns"] / tokens
    mean_error = sums["errors"] / tokens
    variance = sums["squared_returns"] / tokens - mean_return**2
    unexplained = sums["squared_errors"] / tokens - mean_error**2
    return {
        "critic/value_mean": sums["values"] / tokens,
        "critic/return_mean": mean_return,
        "critic/clip_fraction": sums["clipped"] / tokens,
        "critic/explained_variance": 1 - unexplained / variance if variance > 1e-12 else 0.0,
    }
