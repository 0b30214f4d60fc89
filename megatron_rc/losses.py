"""Policy objectives per token, and what is measured of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
ALGORITHMS = ("ppo_clip", "reinforce")
AGGREGATIONS = (*("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),)
STATISTICS = ("tokens", "log_ratio", "abs_log_ratio", "clipped_low", "clipped_high", "dual_clipped", "entropy", "kl")


@dataclass(frozen=True)
class PolicyLossConfig:
    """What the objective is.

    Attributes:
        algorithm: ``ppo_clip`` or ``reinforce``; None: ``ppo_clip``, or in bypass mode what the correction's
            ``loss_type`` names.
        aggregation: how the per-token loss becomes one number: ``token-mean``, ``token-sum``, ``seq-mean-token-sum``,
            ``seq-mean-token-mean`` or ``seq-mean-token-sum-norm``.
        loss_scale_factor: what ``token-sum`` and ``seq-mean-token-sum-norm`` divide by; needed there, and only there.
        clip_low: PPO clips the ratio below 1 - this.
        clip_high: PPO clips the ratio above 1 + this.
        dual_clip: c > 1: the loss of a token with A < 0 is at most c·|A|; None: no such cap.
        kl_coef: weight of the KL penalty (k3) to the reference policy, per token.
        entropy_coef: weight of the entropy bonus, per token.

    Raises:
        ValueError: at construction: names the field and the value.
    """

    algorithm: str | None = None
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    aggregation: str = "token-mean"
    loss_scale_factor: float | None = None
    kl_coef: float = 0.0
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.algorithm not in (None, *ALGORITHMS):
            raise ValueError(f"algorithm={self.algorithm!r} is unknown: use one of {', '.join(ALGORITHMS)}")
        if self.aggregation not in AGGREGATIONS:
            raise ValueError(f"aggregation={self.aggregation!r} is unknown: use one of {', '.join(AGGREGATIONS)}")
        scaled = self.aggregation in ("token-sum", "seq-mean-token-sum-norm")
        if scaled != (self.loss_scale_factor is not None):
            raise ValueError(
                f"loss_scale_factor={self.loss_scale_factor} with aggregation={self.aggregation!r}: token-sum and "
                "seq-mean-token-sum-norm need it, the others do not use it"
            )
        if self.loss_scale_factor is not None and not 0 < self.loss_scale_factor < torch.inf:
            raise ValueError(f"loss_scale_factor={self.loss_scale_factor} must be positive and finite")
        if not 0 <= self.clip_low < 1:
            raise ValueError(f"clip_low={self.clip_low} (--grpo-clamp-eps-lower) must lie in [0, 1)")
        if not 0 <= self.clip_high < torch.inf:
            raise ValueError(f"clip_high={self.clip_high} (--grpo-clamp-eps-upper) must be 0 or more, and finite")
        if self.dual_clip is not None and not 1 < self.dual_clip < torch.inf:
            raise ValueError(f"dual_clip={self.dual_clip} (--ppo-dual-clip) must be above 1; leave it out for no cap")
        if not 0 <= self.kl_coef < torch.inf:
            raise ValueError(f"kl_coef={self.kl_coef} (--grpo-kl-beta) must be 0 or more, and finite")
        if not 0 <= self.entropy_coef < torch.inf:
            raise ValueError(f"entropy_coef={self.entropy_coef} (--grpo-entropy-term-weight) must be 0 or more")


@dataclass(frozen=True)
class PolicyLoss:
    """``per_token`` is like the log-probs, 0 where masked; ``statistics`` are sums by name, which add up."""

    per_token: Tensor
    statistics: dict[str, Tensor]


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """PPO-clip with importance weights: w · max(-A r, -A clip(r, 1 - low, 1 + high)), r = π_θ / π_old.

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms"; with ``dual_clip`` c at most -A c where A < 0
    (Ye et al. 2020, "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning").

    Args:
        log_probs: log π_θ, any shape, nats; differentiated.
        old_log_probs: log π_old, of the same shape.
        advantages: [n] with one row of ``log_probs`` a sequence, or like ``log_probs``.
        response_mask: bool, like ``log_probs``; what stands elsewhere changes no bit of the result or the gradient.
        clip_low: the ratio is clipped below 1 - this.
        clip_high: the ratio is clipped above 1 + this.
        dual_clip: c, or None.
        weights: like ``log_probs``, detached; default 1.

    Collectives: none.

    Raises:
        ValueError: shapes that do not fit.
    """
    advantages = _per_token(advantages, log_probs)
    for name, value in (("old_log_probs", old_log_probs), ("response_mask", response_mask), ("weights", weights)):
        if value is not None and value.shape != log_probs.shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}: expected {tuple(log_probs.shape)} of log_probs")
    zero = log_probs.new_zeros(())
    log_ratio = torch.where(response_mask, log_probs, zero) - torch.where(response_mask, old_log_probs, zero)
    advantages = torch.where(response_mask, advantages, zero)
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    free_loss, clipped_loss = -advantages * ratio, -advantages * clipped
    loss = torch.maximum(free_loss, clipped_loss)
    dual = torch.zeros_like(response_mask)
    if dual_clip is not None:
        cap = -advantages * dual_clip
        dual = (advantages < 0) & (loss > cap)
        loss = torch.where(advantages < 0, torch.minimum(loss, cap), loss)
    is_clipped = response_mask & (clipped_loss > free_loss)
    statistics = {
        "tokens": response_mask.sum(),
        "log_ratio": log_ratio.detach().double().sum(),
        "abs_log_ratio": log_ratio.detach().abs().double().sum(),
        "clipped_low": (is_clipped & (ratio < 1 - clip_low)).sum(),
        "clipped_high": (is_clipped & (ratio > 1 + clip_high)).sum(),
        "dual_clipped": (response_mask & dual).sum(),
    }
    if weights is not None:
        loss = loss * torch.where(response_mask, weights.detach(), zero)
    return PolicyLoss(torch.where(response_mask, loss, zero), statistics)


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, estimator: str = "k3") -> Tensor:
    """Per-token estimate of KL(π_θ ‖ π_ref): with d = log π_θ - log π_ref, k1 d, k2 d²/2, k3 exp(-d) - 1 + d.

    Schulman 2020, "Approximating KL Divergence". The argument of exp is clamped at 20.

    Args:
        log_probs: log π_θ, any shape; differentiated.
        ref_log_probs: log π_ref, of the same shape, detached.
        estimator: ``k1``, ``k2`` or ``k3``.

    Raises:
        ValueError: another estimator.
    """
    difference = log_probs - ref_log_probs.detach()
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return torch.expm1((-difference).clamp(max=LOG_RATIO_LIMIT)) + difference
    raise ValueError(f"estimator={estimator!r} is unknown: use k1, k2 or k3")


def _per_token(advantages: Tensor, log_probs: Tensor) -> Tensor:
    if advantages.shape == log_probs.shape:
        return advantages
    if advantages.shape != log_probs.shape[:1]:
        raise ValueError(
            f"advantages have shape {tuple(advantages.shape)}: expected one a row of log_probs "
            f"{tuple(log_probs.shape)}, or one a token"
        )
    return advantages.view(-1, *[1] * (log_probs.dim() - 1)).expand_as(log_probs)
