"""The masked loss on its way into Megatron's pipeline schedule, and the gradients on their way out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rc.correction.api import RolloutCorrection
from megatron_rc.loss.aggregation import loss_sum
from megatron_rc.loss.policy import kl_penalty, policy_loss
from megatron_rc.numerics import is_log_prob
from megatron_rc.parallel.layout import SequenceLayout


@dataclass(frozen=True)
class MicroBatch:
    """What the loss of one micro-batch needs, on the last pipeline stage; per token: the layout's local shape.

    Attributes:
        layout: which tokens these are.
        response_mask: bool: the tokens that were sampled.
        advantages: [n], or per token.
        rollout_log_probs: log π_rollout.
        sequence_ids: [n] int64; bypass mode's error messages name them.
        policy_versions: int64, of the weights that sampled: for metrics by staleness, bounds by staleness and the
            interpolation that are made in the loss; where the plan was given the current version.
        old_log_probs: log π_old; None in bypass mode, where π_rollout takes its place, and where it is interpolated.
        ref_log_probs: log π_ref, where there is a KL penalty.
        weights: importance weights of the plan; None without any, and where the loss finds them.
        mask: the accepted tokens of the plan; None where the loss finds them.
        lengths: [n] float64, n_i of the plan; likewise.
    """

    layout: SequenceLayout
    response_mask: Tensor
    advantages: Tensor
    rollout_log_probs: Tensor
    sequence_ids: Tensor | None = None
    policy_versions: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    weights: Tensor | None = None
    mask: Tensor | None = None
    lengths: Tensor | None = None


@dataclass(frozen=True)
class LossScale:
    """The global factors of one optimizer step: known before the schedule, equal on all ranks that share them.

    Attributes:
        denominator: 0-D, what the sum of the loss over the whole mini-batch is divided by (see
            :meth:`RolloutCorrection.loss_denominator`); > 0.
        num_microbatches: of this step, on each data-parallel rank.
        dp_cp_size: number of ranks that hold different tokens.
        calculate_per_token_loss: Megatron's setting of that name.
        local_tokens: tokens of a micro-batch on this rank, padding included.
        total_tokens: their sum over all micro-batches and ranks of the step, below 2³¹.
    """

    denominator: Tensor
    num_microbatches: int
    dp_cp_size: int
    calculate_per_token_loss: bool
    local_tokens: int
    total_tokens: int


Returned = tuple[Tensor, Tensor, dict[str, Tensor]]


def masked_loss(
    correction: RolloutCorrection,
    micro_batch: MicroBatch,
    log_probs: Tensor,
    entropy: Tensor | None,
    scale: LossScale,
    *,
    mini_batch: int = 0,
) -> Returned:
    """The corrected loss of one micro-batch, as Megatron's ``loss_func`` returns it.

    w · (policy objective) - entropy_coef · entropy + kl_coef · KL, summed over the accepted tokens and divided by the
    global denominator; the weights multiply the objective alone. What it measures goes to ``correction.record``.

    Args:
        correction: with the objective; in bypass mode its ``in_loss`` is called.
        micro_batch: the tokens.
        log_probs: log π_θ of the labels, of the layout's local shape, nats; differentiated.
        entropy: of π_θ, of the same shape; None where there is no entropy bonus: it is then not
            measured, and ``policy/entropy`` is 0.
        scale: the factors of this step.
        mini_batch: the optimizer step.

    Returns:
        See :func:`schedule_return`; the log holds ``loss``, the local part of the numerator.

    Collectives: in bypass mode and with ``proximal_interpolation`` those of ``in_loss``; outside bypass mode ``gspo``
    makes one SUM of [2, n] over ``cp``.

    Raises:
        ValueError: a tensor that the mode or the objective needs is missing.
    """
    objective = correction.loss
    weights, mask, lengths, old = _corrected(correction, micro_batch, log_probs, mini_batch)
    usable = _usable(correction, micro_batch, log_probs, old)
    policy = policy_loss(
        log_probs,
        old,
        micro_batch.advantages,
        usable,
        algorithm=objective.algorithm or "ppo_clip",
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        dual_clip=objective.dual_clip,
        weights=weights,
        layout=micro_batch.layout,
        groups=correction.groups,
        sequence_log_ratio=correction.sequence_log_ratio if correction.config.bypass_mode else None,
    )
    per_token, sums = policy.per_token, {}
    if entropy is not None:
        sums["entropy"] = _sum(entropy, usable)
        per_token = per_token - objective.entropy_coef * entropy
    elif objective.entropy_coef:
        raise ValueError(f"entropy_coef={objective.entropy_coef} needs the entropy: pass entropy=")
    if objective.kl_coef:
        if micro_batch.ref_log_probs is None:
            raise ValueError(f"kl_coef={objective.kl_coef} needs the reference policy: pass ref_log_probs=")
        here, there = (torch.where(usable, value, 0.0) for value in (log_probs, micro_batch.ref_log_probs))
        penalty = kl_penalty(here, there, objective.kl_estimator)
        sums["reference_kl"] = _sum(penalty, usable)
        per_token = per_token + objective.kl_coef * penalty
    total = loss_sum(per_token, mask, objective.aggregation, lengths, micro_batch.layout)
    correction.record(policy.statistics.plus(loss=total.detach() / scale.denominator, **sums))
    return schedule_return(total, {"loss": total}, scale)


def schedule_return(loss_sum: Tensor, log: dict[str, Tensor], scale: LossScale) -> Returned:
    """What Megatron's ``loss_func`` returns for one micro-batch, so that the gradients are those of Σℓ/G.

    Without ``calculate_per_token_loss`` Megatron divides the loss by ``num_tokens`` and by the number of micro-batches,
    and DDP averages over DP×CP: the factors here undo that. With it, DDP sums, and ``finalize_model_grads`` divides by
    the sum of all ``num_tokens`` (megatron-core 0.16 to 0.19, ``pipeline_parallel/schedules.py``).

    Args:
        loss_sum: 0-D, Σ of the masked loss over this local micro-batch, in the graph even if nothing is counted.
        log: what the schedule hands back to the caller; values are cloned, since Megatron scales the loss in place.
        scale: the factors of this step.

    Returns:
        (loss, num_tokens, log).
    """
    loss = loss_sum / scale.denominator
    if scale.calculate_per_token_loss:
        loss, num_tokens = loss * scale.total_tokens, scale.local_tokens
    else:
        loss, num_tokens = loss * (scale.num_microbatches * scale.dp_cp_size), 1
    count = torch.full((), num_tokens, dtype=torch.int32, device=loss.device)
    return loss, count, {name: value.detach().clone() for name, value in log.items()}


def wrap_finalize(correction: RolloutCorrection, finalize: Callable[..., None] | None = None) -> Callable[..., None]:
    """A ``finalize_model_grads_func`` for Megatron's config: Megatron's own, then the end of the correction's step.

    Megatron's schedule calls it on every pipeline stage when all micro-batches are done. ``finish_step`` runs once, and
    in bypass mode the gradients of all chunks, reduced by then, are multiplied by the D₀/G that it returns.
    Forward-only passes do not come here.

    Args:
        correction: whose step ends.
        finalize: what finishes the gradients; default: ``megatron.core.distributed.finalize_model_grads``.
    """
    finish = finalize or _megatron_finalize()

    def finalize_and_scale(model: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        finish(model, *args, **kwargs)
        factor = correction.finish_step(next(model[0].parameters()).device)
        if correction.scales_gradients:
            for chunk in model:
                chunk.scale_gradients(factor)

    return finalize_and_scale


def _megatron_finalize() -> Callable[..., None]:
    from megatron.core.distributed import finalize_model_grads

    function: Callable[..., None] = finalize_model_grads
    return function


def _corrected(
    correction: RolloutCorrection, micro_batch: MicroBatch, log_probs: Tensor, mini_batch: int
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """(weights, mask, n_i, log π_old): from the plan, or from π_θ where the correction waits for it."""
    if correction.config.corrects_in_loss:
        found = correction.in_loss(
            log_probs,
            micro_batch.rollout_log_probs,
            micro_batch.response_mask,
            layout=micro_batch.layout,
            advantages=micro_batch.advantages,
            sequence_ids=micro_batch.sequence_ids,
            policy_versions=micro_batch.policy_versions,
            mini_batch=mini_batch,
        )
        between = correction.proximal_log_probs
        return *found, micro_batch.rollout_log_probs if between is None else between
    old, mask, lengths = micro_batch.old_log_probs, micro_batch.mask, micro_batch.lengths
    if old is None or mask is None or lengths is None:
        raise ValueError("decoupled mode needs old_log_probs, and mask and lengths of the plan, in every micro-batch")
    return micro_batch.weights, mask, lengths, old


def _usable(correction: RolloutCorrection, micro_batch: MicroBatch, log_probs: Tensor, old: Tensor) -> Tensor:
    """The response mask without the tokens that ``bad_log_probs`` rejects: what stands there must not reach a sum."""
    mask = micro_batch.response_mask
    if correction.config.bad_log_probs == "error":
        return mask
    train = log_probs.detach() if correction.config.corrects_in_loss else old
    return mask & is_log_prob(micro_batch.rollout_log_probs) & is_log_prob(train)


def _sum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values.detach(), 0).double().sum()
