"""Token advantages from teachers: how much more probable each sampled token is to them than to the student."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rc.numerics import check_mask
from megatron_rc.parallel.arguments import check_alike, check_tensors


def distillation_advantages(
    teacher_log_probs: Tensor,
    old_log_probs: Tensor,
    response_mask: Tensor,
    *,
    teacher_weights: Tensor | None = None,
) -> Tensor:
    """Return the advantage of each sampled token in the eyes of the teachers.

        A_t = sg[Σ_k λ_k (log π_Tk - log π_old)], Σ_k λ_k = 1

    With one teacher its mean over tokens of π_old is -KL(π_old ‖ π_T), and the gradient of REINFORCE with it is that of
    -KL: on-policy distillation by the sampled token. With several teachers it is multi-teacher on-policy distillation
    (Xiao et al. 2026, "MiMo-V2-Flash Technical Report", arXiv 2601.02780), whose mean is -KL to the teachers' geometric
    mean, up to a constant of the prefix. To combine it with advantages of a task, add them, each with its coefficient.

    The correction acts on it as on any advantage: its weights multiply the objective, its criteria reject tokens.

    Args:
        teacher_log_probs: log π_T of the labels, [...] like ``old_log_probs``, or [k, ...] of k teachers; nats.
        old_log_probs: [...], log π_old, of the layout's local shape; in bypass mode log π_rollout.
        response_mask: bool, [...], True for trained tokens; values at other positions change no bit of the result.
        teacher_weights: λ, [k], or [k, ...] with weights of each token, such as 1 for the teacher of the prompt's
            domain and 0 for the others; 0 or more, with the sum 1 over the teachers. A teacher's log-probs of a token
            for which its weight is 0 are not read. Default: 1/k each.

    Returns:
        [...], float64 if a tensor of log-probs is, else float32; 0 outside the mask. If a teacher or the student gives
        a token the probability 0, the advantage is infinite, and with log-probs of NaN it is NaN: the correction's
        ``check()`` reports both. Gradient: none.

    Collectives: none.

    Raises:
        ValueError: shapes that do not fit, or weights without several teachers.
    """
    check_tensors(
        {"teacher_weights": teacher_weights},
        teacher_log_probs=teacher_log_probs,
        old_log_probs=old_log_probs,
        response_mask=response_mask,
    )
    check_alike("old_log_probs", old_log_probs, response_mask=response_mask)
    check_mask("response_mask", response_mask)
    shape = old_log_probs.shape
    if teacher_log_probs.shape == shape and teacher_weights is None:
        teacher_log_probs = teacher_log_probs.unsqueeze(0)
    num_teachers = len(teacher_log_probs) if teacher_log_probs.dim() == len(shape) + 1 else 0
    if not num_teachers or teacher_log_probs.shape[1:] != shape:
        raise ValueError(
            f"teacher_log_probs have shape {tuple(teacher_log_probs.shape)}: expected {tuple(shape)} of "
            "old_log_probs, or those of k teachers, [k, ...]"
        )

    dtype = torch.promote_types(torch.promote_types(teacher_log_probs.dtype, old_log_probs.dtype), torch.float32)
    weights = _weights(teacher_weights, num_teachers, shape, old_log_probs.device).to(dtype)
    counted = response_mask & (weights > 0)
    difference = teacher_log_probs.detach().to(dtype) - old_log_probs.detach().to(dtype)
    return (weights * torch.where(counted, difference, 0)).sum(0)


def _weights(weights: Tensor | None, num_teachers: int, shape: torch.Size, device: torch.device) -> Tensor:
    """λ of each teacher and token, [k, ...] or with dimensions of size 1; ValueError for another shape."""
    teachers_alone = [num_teachers] + [1] * len(shape)
    if weights is None:
        return torch.full(teachers_alone, 1 / num_teachers, dtype=torch.float64, device=device)
    if weights.shape == (num_teachers,):
        return weights.detach().view(teachers_alone)
    if weights.shape != (num_teachers, *shape):
        raise ValueError(
            f"teacher_weights have shape {tuple(weights.shape)}: expected one for each of {num_teachers} teachers, or "
            f"{(num_teachers, *shape)}"
        )
    return weights.detach()
