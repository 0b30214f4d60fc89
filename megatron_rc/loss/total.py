"""The whole loss of a token: the weighted policy objective, less the entropy bonus, plus the KL penalty."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rc.loss.policy import PolicyLoss, PolicyLossConfig, kl_penalty, policy_loss
from megatron_rc.parallel.arguments import check_alike, check_tensors
from megatron_rc.parallel.groups import ParallelGroups
from megatron_rc.parallel.layout import SequenceLayout
from megatron_rc.parallel.softmax import arithmetic


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
    policy = policy_loss(
        log_probs,
        old_log_probs,
        advantages,
        response_mask,
        algorithm=objective.algorithm or "ppo_clip",
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        dual_clip=objective.dual_clip,
        weights=weights,
        layout=layout,
        groups=groups,
        sequence_log_ratio=sequence_log_ratio,
    )
    per_token, sums = policy.per_token, {}
    if entropy is not None:
        entropy = entropy.to(arithmetic(entropy.dtype))
        sums["entropy"] = _sum(entropy, response_mask)
        per_token = per_token - objective.entropy_coef * entropy
    elif objective.entropy_coef:
        raise ValueError(f"entropy_coef={objective.entropy_coef} needs the entropy: pass entropy=")
    if objective.kl_coef:
        if ref_log_probs is None:
            raise ValueError(f"kl_coef={objective.kl_coef} needs the reference policy: pass ref_log_probs=")
        here, there = (torch.where(response_mask, value, 0.0) for value in (log_probs, ref_log_probs))
        penalty = kl_penalty(here, there, objective.kl_estimator)
        sums["reference_kl"] = _sum(penalty, response_mask)
        per_token = per_token + objective.kl_coef * penalty
    return PolicyLoss(per_token, policy.statistics.plus(**sums))


def _sum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values.detach(), 0).double().sum()
