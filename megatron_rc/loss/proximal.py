"""The proximal policy without a pass of its own: between the policy that sampled and the one that trains."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rc.numerics import is_log_prob
from megatron_rc.parallel.softmax import arithmetic


def interpolate(log_probs: Tensor, rollout_log_probs: Tensor, staleness: Tensor, updates: int) -> Tensor:
    """The proximal policy's log-probs: linear between log π_θ and log π_rollout, by the distance of versions.

    log π_prox = log π_rollout + (v_prox - v_rollout)/(v_θ - v_rollout) · (log π_θ - log π_rollout)

    Li, Wu and Shen 2025, "A-3PO: Accelerating Asynchronous LLM Training with Staleness-aware Proximal Policy
    Approximation". v_prox is the version at the start of the rollout batch; docs/mathematics.md says why.

    Args:
        log_probs: log π_θ, any shape, nats; detached.
        rollout_log_probs: log π_rollout, of the same shape.
        staleness: v_prox - v_rollout, int64, at least 0; broadcasts against the log-probs.
        updates: v_θ - v_prox: optimizer steps since the start of the rollout batch, the skipped ones too.

    Returns:
        Like ``log_probs``, in the wider dtype of both log-probs, and at least float32: for a fresh token log π_rollout
        to the last bit. Where log π_rollout is unusable it is log π_θ, so that only the former is found to be bad.
    """
    dtype = arithmetic(torch.promote_types(log_probs.dtype, rollout_log_probs.dtype))
    theta = log_probs.detach().to(dtype, copy=True)
    if not updates:
        return theta
    rollout = rollout_log_probs.to(dtype)
    # lerp is exact at both ends.
    rollout_share = updates / (staleness + updates).to(dtype)
    interpolated = torch.lerp(theta, rollout, rollout_share.expand_as(theta))
    return torch.where(is_log_prob(rollout_log_probs), interpolated, theta)
