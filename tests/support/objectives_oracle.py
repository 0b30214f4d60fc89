"""The policy objectives, token by token, in float64. Imports nothing of the library."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

RATIO_LIMIT = 20.0
CERTAIN = 1e-8


@dataclass(frozen=True)
class Bounds:
    """An objective and the numbers that it may use."""

    algorithm: str
    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    tau_pos: float = 1.0
    tau_neg: float = 1.05


def divergence_of(algorithm: str, log_probs: torch.Tensor) -> torch.Tensor | None:
    """Numbers that stand for the divergence from a teacher; None for objectives that need none.

    They are finite for every log-prob, and NaN for NaN, with a gradient of 0, as the library's divergences are.
    """
    if algorithm != "distill":
        return None
    wide = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32))
    return torch.where(wide.isnan(), torch.nan, torch.nn.functional.softplus(-wide.nan_to_num()))


def of_response(
    bounds: Bounds, log_probs: list[torch.Tensor], old: list[float], worths: list[float]
) -> list[tuple[torch.Tensor, str]]:
    """(loss, kind of clipping) of each token of a response, in order, from its own tokens alone."""
    log_ratios = [new - before for new, before in zip(log_probs, old, strict=True)]
    values = [log_ratio.item() for log_ratio in log_ratios]
    mean = sum(values) / max(len(values), 1)
    if bounds.algorithm == "gmpo":
        mean = sum(one_sided(bounds, value, worth) for value, worth in zip(values, worths, strict=True))
        mean /= max(len(values), 1)
    over = over_budget([new.item() for new in log_probs], old) if bounds.algorithm == "cppo" else [0.0] * len(old)
    return [
        of_token(bounds, new, log_ratio, before, worth, mean, excess)
        for new, log_ratio, before, worth, excess in zip(log_probs, log_ratios, old, worths, over, strict=True)
    ]


def of_token(
    bounds: Bounds,
    log_prob: torch.Tensor,
    log_ratio: torch.Tensor,
    old: float,
    worth: float,
    mean: float,
    excess: float,
) -> tuple[torch.Tensor, str]:
    """The loss of one token; ``mean`` and ``excess`` are of its response."""
    if bounds.algorithm == "reinforce":
        return -worth * log_prob, ""
    if bounds.algorithm == "distill":
        return (1 + (-log_prob).exp()).log(), ""
    if bounds.algorithm == "gspo":
        log_ratio = mean + log_prob - log_prob.detach()
    if bounds.algorithm == "gmpo":
        return geometric(bounds, log_ratio, worth, mean)
    ratio = log_ratio.clamp(-RATIO_LIMIT, RATIO_LIMIT).exp()
    if bounds.algorithm == "sapo":
        tau = bounds.tau_pos if worth > 0 else bounds.tau_neg
        return -worth * 4 / tau / (1 + (-tau * (ratio - 1)).exp()), ""
    if bounds.algorithm in ("dppo_tv", "dppo_kl"):
        return divergence_bounded(bounds, log_prob, ratio.item(), old, worth)
    if bounds.algorithm == "cppo":
        limit = bounds.high if worth > 0 else bounds.low
        if worth * (math.exp(log_ratio.item()) - 1) > 0 and excess > limit:
            return 0 * log_prob, "high" if worth > 0 else "low"
        return -worth * ratio, ""
    clipped_ratio = ratio.clamp(1 - bounds.low, 1 + bounds.high)
    value = ratio.item()
    bound = clipped_ratio.item()
    side = "low" if value < bound else "high" if value > bound else ""
    if bounds.algorithm == "cispo":
        return -worth * clipped_ratio.detach() * log_prob, side
    free = -worth * ratio
    clipped = -worth * clipped_ratio
    loss, how = (clipped, side) if clipped.item() > free.item() else (free, "")
    if bounds.dual is not None and worth < 0 and loss.item() > -worth * bounds.dual:
        return torch.as_tensor(-worth * bounds.dual, dtype=torch.float64), "dual"
    return loss, how


def divergence_bounded(
    bounds: Bounds, log_prob: torch.Tensor, ratio: float, old: float, worth: float
) -> tuple[torch.Tensor, str]:
    """DPPO's loss: 0 for a token that lies too far on the side to which its advantage pushes it."""
    new = log_prob.item()
    rise = math.exp(new) - math.exp(old)
    if bounds.algorithm == "dppo_tv":
        is_far = rise > bounds.high if worth > 0 else rise < -bounds.low
    else:
        is_far = two_point(old, new) > (bounds.high if worth > 0 else bounds.low)
        is_far = is_far and (new > old if worth > 0 else new < old)
    if is_far:
        return 0 * log_prob, "high" if worth > 0 else "low"
    limit = 20.0 if bounds.dual is None else bounds.dual
    return -worth * min(ratio, limit) * log_prob, "dual" if ratio > limit else ""


def two_point(log_p: float, log_q: float) -> float:
    """D(p‖q) of "this token" against any other, with 1 - p and 1 - q of at least 1e-8."""
    log_p = min(log_p, -CERTAIN)
    log_q = min(log_q, -CERTAIN)
    other_p = -math.expm1(log_p)
    other_q = -math.expm1(log_q)
    return math.exp(log_p) * (log_p - log_q) + other_p * math.log(other_p / other_q)


def one_sided(bounds: Bounds, log_ratio: float, worth: float) -> float:
    """The log ratio, clipped on the side to which the advantage pushes; an advantage of 0 pushes to none."""
    if worth < 0:
        return max(log_ratio, -bounds.low)
    if worth > 0:
        return min(log_ratio, bounds.high)
    return log_ratio


def geometric(bounds: Bounds, log_ratio: torch.Tensor, worth: float, mean: float) -> tuple[torch.Tensor, str]:
    """GMPO's loss; the gradient is of a token whose log ratio alone is in the exponential."""
    value = log_ratio.item()
    side = "" if one_sided(bounds, value, worth) == value else "low" if worth < 0 else "high"
    clamped_mean = max(min(mean, RATIO_LIMIT), -RATIO_LIMIT)
    own_log_ratio = 0.0 if side or clamped_mean != mean else log_ratio - log_ratio.detach()
    return -worth * math.exp(clamped_mean) * (1 + own_log_ratio) + 0 * log_ratio, side


def over_budget(new: list[float], old: list[float]) -> list[float]:
    """Of each token how large δ must be for CPPO to keep it: Z_t ≤ min(δ, δ + δ_b Σ w - Σ Z), sums before t."""
    distances = [
        abs(math.exp(new_log_prob) - math.exp(old_log_prob))
        for new_log_prob, old_log_prob in zip(new, old, strict=True)
    ]
    budget = max(min(quantile(distances, 0.9), 0.04), 0.02)
    needed = []
    weights = 0.0
    spent = 0.0
    for t, distance in enumerate(distances):
        weight = 1 - (1 - 0.8) * t / max(len(distances) - 1, 1)
        needed.append(weight * distance + max(0.0, spent - budget * weights))
        weights += weight
        spent += weight * distance
    return needed


def quantile(values: list[float], share: float) -> float:
    """Linear between the two nearest of the sorted values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    rank = share * (len(values) - 1)
    below = math.floor(rank)
    above = math.ceil(rank)
    return ordered[below] + (rank - below) * (ordered[above] - ordered[below])
