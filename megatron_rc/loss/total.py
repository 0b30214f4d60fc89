"""The whole loss of a token: the weighted policy objective, less the entropy bonus, plus the KL penalty."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_rc.loss.policy import PolicyLoss, PolicyLossConfig, kl_penalty, policy_loss
from megatron_rc.parallel.arguments import check_alike, check_tensors
from megatron_rc.parallel.groups import ParallelGroups
from megatron_rc.parallel.layout import SequenceLayout
from megatron_rc.parallel.softmax import arithmetic

_OF_POLICY_LOSS = ("clip_low", "clip_high", "dual_clip", "tau_pos", "tau_neg")


def token_loss(
    objective: PolicyLossConfig,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    weights: Tensor | None,
    entropy: Tensor | None,
    ref_log_probs: Tensor | None,
    layout: SequenceLayout,
    groups: ParallelGroups,
    sequence_log_ratio: Tensor | None = None,
) -> PolicyLoss:
    """The loss of every token, and its measures: w · (policy objective) - entropy_coef · entropy + kl_coef · KL.

    Arguments are as in :func:`policy_loss`; ``entropy`` (not masked here) and ``ref_log_probs`` are like
    ``log_probs``, or None if their coefficient is 0. ValueError for a missing tensor, or one of another shape.
    """
    check_tensors({"entropy": entropy, "ref_log_probs": ref_log_probs}, log_probs=log_probs)
    check_alike("log_probs", log_probs, ref_log_probs=ref_log_probs, entropy=entropy)
    # Once, so that the gradients of objective and penalty add before they are rounded to a narrow dtype.
    log_probs = log_probs.to(arithmetic(log_probs.dtype))
    settings = {name: getattr(objective, name) for name in _OF_POLICY_LOSS}
    settings["algorithm"] = objective.algorithm or "ppo_clip"
    place: dict[str, Any] = {"layout": layout, "groups": groups, "sequence_log_ratio": sequence_log_ratio}
    policy = policy_loss(log_probs, old_log_probs, advantages, response_mask, weights=weights, **settings, **place)
    per_token, sums = policy.per_token, {}
    if entropy is None and objective.entropy_coef:
        raise ValueError(f"entropy_coef={objective.entropy_coef} needs the entropy: pass entropy=")
    bonus = None if entropy is None else entropy.to(arithmetic(entropy.dtype))
    penalty = _penalty(objective, log_probs, ref_log_probs, response_mask)
    for name, factor, values in (
        ("entropy", -objective.entropy_coef, bonus),
        ("reference_kl", objective.kl_coef, penalty),
    ):
        if values is not None:
            sums[name] = torch.where(response_mask, values.detach(), 0).double().sum()
            per_token = per_token + factor * values
    return PolicyLoss(per_token, policy.statistics.plus(**sums))


def _penalty(objective: PolicyLossConfig, log_probs: Tensor, ref: Tensor | None, mask: Tensor) -> Tensor | None:
    if not objective.kl_coef:
        return None
    if ref is None:
        raise ValueError(f"kl_coef={objective.kl_coef} needs the reference policy: pass ref_log_probs=")
    here, there = (torch.where(mask, value, 0.0) for value in (log_probs, ref))
    return kl_penalty(here, there, objective.kl_estimator)
