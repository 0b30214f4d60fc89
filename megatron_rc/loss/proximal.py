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

    All are of the same shape, in nats; ``staleness``, int64, is v_prox - v_rollout, at least 0, and broadcasts against
    them. ``updates`` is v_θ - v_prox, optimizer steps since, the skipped ones too. The result is log π_θ if log
    π_rollout is unusable, so that only the latter is found to be bad. Its dtype is the wider one of both, and at least
    float32: a fresh token's is log π_rollout to the last bit.
    """
    dtype = arithmetic(torch.promote_types(log_probs.dtype, rollout_log_probs.dtype))
    theta = log_probs.detach().to(dtype, copy=True)
    if not updates:
        return theta
    # The share of log π_rollout. lerp is exact at both ends.
    share = updates / (staleness + updates).to(dtype)
    between = torch.lerp(theta, rollout_log_probs.to(dtype), share.expand_as(theta))
    return torch.where(is_log_prob(rollout_log_probs), between, theta)
