"""Log-probs and entropy of tokens from logits that are split over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_rc.parallel.collectives import all_reduce_max, all_reduce_sum
from megatron_rc.parallel.groups import Group, group_rank, group_size

IGNORED_LABEL = -100


def vocab_parallel_log_probs_and_entropy(
    logits: Tensor,
    labels: Tensor,
    tp_group: Group | None = None,
    *,
    vocab_size: int | None = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each label, and the entropy of each distribution, under softmax(logits / temperature).

        log π(y) = x_y - log Σ_v exp(x_v)        H = log Σ_v exp(x_v) - Σ_v π_v x_v        x = logits / temperature

    Args:
        logits: [..., v/tp], any float dtype; rank r of ``tp_group`` holds rows r·v/tp to (r+1)·v/tp. Not written to.
        labels: [...], int64, indices into the whole vocabulary, equal on all ranks of ``tp_group``.
        tp_group: holds the other vocabulary rows.
        vocab_size: rows at and above it are padding and have probability 0. Default: all rows count.
        mask: [...], bool, True where the token counts; elsewhere results and gradients are 0 and any label is fine.
            Default: False where the label is -100.
        temperature: of the distribution; > 0.

    Returns:
        (log_probs, entropy), each [...], float32 (float64 for float64 logits), equal on all ranks of ``tp_group``.
        A label out of range at a counted position gives NaN, which the correction's ``check()`` reports.
        Both are differentiable in the logits; every rank must use the results alike.

    Collectives: one MAX of t and one SUM of 3t numbers over ``tp_group`` in the forward, none in the backward.

    Raises:
        ValueError: shapes that do not fit, integer logits, a temperature that is not positive, or logits whose width
            cannot be a shard of ``vocab_size`` (full-vocabulary logits passed for a shard, or the reverse).
    """
    _check(logits, labels, mask, temperature, vocab_size, group_size(tp_group))
    counted = labels != IGNORED_LABEL if mask is None else mask
    result: tuple[Tensor, Tensor] = _LogProbsAndEntropy.apply(  # type: ignore[no-untyped-call]
        logits, labels, counted, tp_group, vocab_size, temperature
    )
    return result


def vocab_parallel_log_probs(
    logits: Tensor,
    labels: Tensor,
    tp_group: Group | None = None,
    *,
    vocab_size: int | None = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """The first result of :func:`vocab_parallel_log_probs_and_entropy`, which see."""
    return vocab_parallel_log_probs_and_entropy(
        logits, labels, tp_group, vocab_size=vocab_size, mask=mask, temperature=temperature
    )[0]


def _check(
    logits: Tensor, labels: Tensor, mask: Tensor | None, temperature: float, vocab_size: int | None, tp_size: int
) -> None:
    if not logits.is_floating_point():
        raise ValueError(f"logits are {logits.dtype}: expected a float dtype")
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} differ before the vocabulary")
    if mask is not None and (mask.shape != labels.shape or mask.dtype != torch.bool):
        raise ValueError(
            f"mask is {mask.dtype} {tuple(mask.shape)}: expected bool of the labels' {tuple(labels.shape)}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be positive")
    width = logits.shape[-1] * tp_size
    # Megatron pads the vocabulary by fewer than 128 rows a rank unless told otherwise.
    if vocab_size is not None and not 0 <= width - vocab_size < max(vocab_size, 128 * tp_size):
        raise ValueError(
            f"logits of width {logits.shape[-1]} on {tp_size} tensor-parallel ranks make {width} rows, which is no "
            f"padding of vocab_size={vocab_size}: pass each rank its own shard of the vocabulary"
        )


class _LogProbsAndEntropy(torch.autograd.Function):
    """Forward and backward in closed form, so that autograd keeps no tensor but the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        counted: Tensor,
        tp_group: Group | None,
        vocab_size: int | None,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        width = logits.shape[-1]
        start = group_rank(tp_group) * width
        padding = 0 if vocab_size is None else min(max(start + width - vocab_size, 0), width)
        scaled = _scaled(logits, padding, temperature)
        maximum = all_reduce_max(scaled.amax(dim=-1), tp_group)
        scaled -= maximum.unsqueeze(-1)
        local = torch.where(counted, labels - start, 0)
        here = (local >= 0) & (local < width - padding)
        chosen = torch.gather(scaled, -1, local.clamp(0, width - 1).unsqueeze(-1)).squeeze(-1)
        exp = scaled.exp()
        # Padding has exp = 0 and x = -inf; 0 · -inf would be NaN.
        expected = (exp * torch.where(exp > 0, scaled, 0)).sum(dim=-1)
        packed = torch.stack([exp.sum(dim=-1), torch.where(here, chosen, 0), expected])
        total, chosen, expected = all_reduce_sum(packed, tp_group).unbind()
        log_total = total.log()
        known = (labels >= 0) & (labels < (vocab_size or width * group_size(tp_group)))
        log_probs = torch.where(known, chosen - log_total, torch.nan)
        entropy = log_total - expected / total
        ctx.save_for_backward(logits, maximum + log_total, entropy, torch.where(here, local, -1), counted & known)
        ctx.padding, ctx.temperature = padding, temperature
        return torch.where(counted, log_probs, 0), torch.where(counted, entropy, 0)

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        """Gradients d log π_y / d x_v = [v = y] - π_v, and d H / d x_v = -π_v (log π_v + H)."""
        logits, log_sum, entropy, local, counted = ctx.saved_tensors
        grad_log_probs = torch.where(counted, grad_log_probs, 0).unsqueeze(-1)
        grad_entropy = torch.where(counted, grad_entropy, 0).unsqueeze(-1)
        log_pi = _scaled(logits, ctx.padding, ctx.temperature) - log_sum.unsqueeze(-1)
        pi = log_pi.exp()
        surprise = torch.where(pi > 0, log_pi, 0) + entropy.unsqueeze(-1)
        grad = -pi * (grad_log_probs + grad_entropy * surprise)
        target = torch.where(local >= 0, grad_log_probs.squeeze(-1), 0).unsqueeze(-1)
        grad.scatter_add_(-1, local.clamp(min=0).unsqueeze(-1), target)
        return (grad / ctx.temperature).to(logits.dtype), None, None, None, None, None


def _scaled(logits: Tensor, padding: int, temperature: float) -> Tensor:
    """Logits / temperature in at least float32, with -inf in the last ``padding`` rows; always a new tensor."""
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if padding:
        scaled[..., scaled.shape[-1] - padding :] = -torch.inf
    return scaled
