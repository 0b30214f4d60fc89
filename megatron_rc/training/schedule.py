"""The masked loss on its way into Megatron's pipeline schedule, and the gradients on their way out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rc.loss.aggregation import loss_sum
from megatron_rc.loss.policy import token_loss
from megatron_rc.numerics import is_log_prob
from megatron_rc.parallel.arguments import check_alike, check_tensors
from megatron_rc.training.micro_batch import MicroBatch
from megatron_rc.training.optimizer_step import StepCounts
from megatron_rc.training.plan import LossScale, PlannedStep
from megatron_rc.training.rollout_correction import RolloutCorrection

Returned = tuple[Tensor, Tensor, dict[str, Tensor]]


def masked_loss(
    correction: RolloutCorrection,
    micro_batch: MicroBatch,
    log_probs: Tensor,
    entropy: Tensor | None,
    scale: LossScale,
    *,
    divergence: Tensor | None = None,
) -> Returned:
    """The corrected loss of one micro-batch, as Megatron's ``loss_func`` returns it.

    w · (policy objective + distillation_coef · D) - entropy_coef · entropy + kl_coef · KL, summed over the accepted
    tokens and divided by the global denominator; the weights multiply the objective and D alone. The micro-batch counts
    in ``correction`` when the backward of the returned loss runs: a forward-only pass leaves no trace there.

    Args:
        correction: the correction, with the objective.
        micro_batch: the tokens.
        log_probs: log π_θ of the labels, of the layout's local shape, nats; differentiated.
        entropy: of π_θ, of the same shape; None without an entropy bonus: ``policy/entropy`` is then 0.
        scale: the factors of this step, from ``plan.loss_scale()``.
        divergence: D of π_θ from a teacher at each token, of the same shape, such as a
            :func:`~megatron_rc.parallel.processor.log_prob_processor` with a ``teacher`` gives it. None without the
            objective ``distill`` and without ``distillation_coef``.

    Returns:
        (loss, num_tokens, log) of Megatron's ``loss_func``; the log holds ``loss``, the local part of the numerator.

    Collectives: in bypass mode and with ``proximal_interpolation`` as ``in_loss``; outside bypass mode ``gspo``
    makes one SUM of [2, n] over ``cp``; in every mode ``gmpo`` one of [2, n], and ``cppo`` one of [2, n, tokens of the
    longest sequence].

    Raises:
        ValueError: a tensor that the mode or the objective needs is missing or has another shape, or the scale is of
            another correction. A rank that raises does so alone: the others wait for it until torchrun ends them.
        StepError: with ``one_pass``, the step of the plan has ended. In the backward: micro-batches of another step
            were counted, and nothing has ended that one.
    """
    step = _step_of(scale, micro_batch.response_mask.numel())
    corrected = correction.corrected(micro_batch, log_probs, step)
    losses = token_loss(
        correction.loss,
        log_probs=log_probs,
        old_log_probs=corrected.old_log_probs,
        rollout_log_probs=micro_batch.rollout_log_probs,
        advantages=micro_batch.advantages,
        response_mask=_usable(correction, micro_batch, log_probs, corrected.old_log_probs),
        weights=corrected.weights,
        entropy=entropy,
        ref_log_probs=micro_batch.ref_log_probs,
        divergence=divergence,
        layout=micro_batch.layout,
        groups=correction.groups,
        sequence_log_ratio=corrected.mean_log_ratio,
    )
    total = loss_sum(
        losses.per_token,
        corrected.mask,
        correction.loss.aggregation,
        corrected.sequence_lengths,
        micro_batch.layout,
    )
    returned = schedule_return(total, {"loss": total}, scale, micro_batch.response_mask.numel())

    loss = returned[0]
    if loss.requires_grad:
        # Measured now, so that neither the hook nor the step keeps tokens, and buffers may be filled anew.
        with torch.no_grad():
            statistics = losses.statistics.plus(loss=total.detach() / scale.denominator)
            counts = StepCounts.of(corrected, statistics)
        num_sequences = micro_batch.layout.num_sequences
        loss.register_hook(lambda _: correction.open_step.count(step, counts, num_sequences))
    return returned


def _step_of(scale: LossScale, num_tokens: int) -> PlannedStep:
    """The step of a scale, for the loss of a micro-batch of so many tokens; ValueError if they do not fit."""
    step = scale.step if isinstance(scale, LossScale) else None
    if step is None:
        raise ValueError(f"scale is {scale}: take it from plan.loss_scale()")
    if scale.calculate_per_token_loss and scale.local_tokens not in (0, num_tokens):
        raise ValueError(
            f"local_tokens={scale.local_tokens} and a micro-batch of {num_tokens} tokens: pad all to as many, or leave "
            "local_tokens out of plan.loss_scale() and give it the total_tokens that they sum to"
        )
    return step


def schedule_return(loss_sum: Tensor, log: dict[str, Tensor], scale: LossScale, num_tokens: int) -> Returned:
    """The triple of Megatron's ``loss_func`` for one micro-batch, with the gradients of Σℓ/G.

    Without ``calculate_per_token_loss`` Megatron divides the loss by ``num_tokens`` and by the number of micro-batches,
    and DDP averages over DP×CP: the factors here undo that. With it, DDP sums, and ``finalize_model_grads`` divides by
    the sum of all ``num_tokens`` (megatron-core 0.16 to 0.19, ``pipeline_parallel/schedules.py``).

    Args:
        loss_sum: 0-D, Σ of the masked loss over this local micro-batch, in the graph even if nothing is counted.
        log: the schedule hands it back to its caller; values are cloned, since Megatron scales the loss in place.
        scale: the factors of this step.
        num_tokens: tokens of this local micro-batch, padding included.
    """
    loss = loss_sum / scale.denominator
    if scale.calculate_per_token_loss:
        loss = loss * scale.total_tokens
        divisor = num_tokens
    else:
        loss = loss * (scale.num_microbatches * scale.dp_cp_size)
        divisor = 1
    count = torch.full((), divisor, dtype=torch.int32, device=loss.device)
    return loss, count, {name: value.detach().clone() for name, value in log.items()}


def wrap_finalize(correction: RolloutCorrection, finalize: Callable[..., None] | None = None) -> Callable[..., None]:
    """A ``finalize_model_grads_func`` for Megatron's config: Megatron's own, then the end of the correction's step.

    Megatron's schedule calls it on every pipeline stage when all micro-batches are done, but not in forward-only
    passes. ``finish_step`` runs once, and if the loss's denominator is known only then, the reduced gradients of all
    chunks are multiplied by the D₀/G that it returns. A step whose scale was told another ``calculate_per_token_loss``
    than the model's config has is a StepError on every rank.

    Args:
        correction: whose step ends.
        finalize: finishes the gradients; default: ``megatron.core.distributed.finalize_model_grads``.

    Raises:
        ValueError: ``finalize`` ends the correction's steps already.
    """
    if getattr(finalize, "ends_steps_of", None) is correction:
        raise ValueError("finalize ends the steps of this correction already: call wrap_finalize() once, on Megatron's")
    if finalize is None:
        from megatron.core.distributed import finalize_model_grads
    finish: Callable[..., None] = finalize or finalize_model_grads

    def finalize_and_scale(model: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        finish(model, *args, **kwargs)
        # Megatron passes num_tokens, and has added it up over the ranks by now.
        if args:
            correction.open_step.note_divisor(args[0])
        elif "num_tokens" in kwargs:
            correction.open_step.note_divisor(kwargs["num_tokens"])
        factor = correction.finish_step(next(model[0].parameters()).device)
        if correction.scales_gradients:
            for chunk in model:
                chunk.scale_gradients(factor)

    vars(finalize_and_scale)["ends_steps_of"] = correction
    return finalize_and_scale


def _usable(correction: RolloutCorrection, micro_batch: MicroBatch, log_probs: Tensor, old: Tensor) -> Tensor:
    """The response mask without the tokens that ``bad_log_probs`` rejects: their values must not reach a sum."""
    rollout = micro_batch.rollout_log_probs
    check_tensors({}, log_probs=log_probs, rollout_log_probs=rollout)
    check_alike("log_probs", log_probs, rollout_log_probs=rollout)
    if correction.config.bad_log_probs == "error":
        return micro_batch.response_mask
    train = log_probs.detach() if correction.config.corrects_in_loss else old
    return micro_batch.response_mask & is_log_prob(rollout) & is_log_prob(train)
