"""One rollout batch through Megatron's schedule: the forward-only pass, the plan, and the optimizer steps."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron_rc.batch import RolloutBatch
from megatron_rc.correction import RolloutCorrection
from megatron_rc.inputs import PlanInputs
from megatron_rc.launch.advantages import group_advantages
from megatron_rc.launch.checkpoint import load_checkpoint, save_checkpoint
from megatron_rc.launch.distributed import AgreedError
from megatron_rc.launch.model import build_chunks, build_config, build_optimizer, unwrap, wrap_chunks
from megatron_rc.losses import STATISTICS, kl_penalty, policy_loss
from megatron_rc.parallel import (
    ParallelGroups,
    SequenceLayout,
    linear_log_probs_and_entropy,
    vocab_parallel_log_probs_and_entropy,
)
from megatron_rc.parallel.collectives import all_reduce_sum, broadcast
from megatron_rc.parallel.groups import group_rank, group_size
from megatron_rc.result import CorrectionResult
from megatron_rc.schedule import LossScale, schedule_return


@dataclass(frozen=True)
class Slice:
    """This rank's rows and CP slice of a rollout batch, or some rows of it; label-aligned, ``[n, s/cp]``.

    Attributes:
        tokens: input tokens.
        positions: [n, s/cp], position of each token in its sequence.
        labels: the next token.
        response_mask: bool, True where the label was sampled.
        rollout_log_probs: log π_rollout of the labels.
        advantages: [n].
        old_log_probs: log π_old; None before the forward-only pass, and on stages without log-probs.
        ref_log_probs: log π_ref, where there is a KL penalty.
        weights: importance weights, where there are any.
        mask: the accepted tokens.
    """

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    response_mask: Tensor
    rollout_log_probs: Tensor
    advantages: Tensor
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    weights: Tensor | None = None
    mask: Tensor | None = None

    def rows(self, start: int, stop: int) -> Slice:
        """The same of some sequences."""
        present = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        cut: dict[str, Any] = {name: value[start:stop] for name, value in present.items() if value is not None}
        return Slice(**cut)


@dataclass(frozen=True)
class PreparedBatch:
    """A rollout batch that is ready for its optimizer steps."""

    local: Slice
    plan: CorrectionResult


class Trainer:
    """The policy on this rank: model chunks, optimizer, reference, correction.

    Args:
        args: the validated flags.
        groups: of this rank.

    Attributes:
        iteration: optimizer steps that lie behind, those of a loaded checkpoint included.
        skipped: steps among them that were not made because no token was accepted.
    """

    def __init__(self, args: argparse.Namespace, groups: ParallelGroups) -> None:
        self.args, self.groups = args, groups
        config = build_config(args)
        chunks = build_chunks(args, config)
        self.model = wrap_chunks(args, chunks)
        self.optimizer, self.scheduler = build_optimizer(args, self.model)
        self.reference = self._build_reference() if args.loss.kl_coef else []
        self.correction = RolloutCorrection(args.correction, groups, loss=args.loss)
        self.device = next(chunks[0].parameters()).device
        self.iteration, self.skipped, self._scored_at = 0, 0, -1
        if args.load:
            self.iteration = load_checkpoint(args, self.model, self.optimizer, self.scheduler, self.reference)

    @property
    def chunks(self) -> list[torch.nn.Module]:
        """This rank's GPTModels, unwrapped."""
        return [unwrap(chunk) for chunk in self.model]

    def save(self) -> None:
        """Write a checkpoint to ``--save``."""
        save_checkpoint(self.args, self.iteration, self.model, self.optimizer, self.scheduler, self.reference)

    def prepare(self, batch: RolloutBatch) -> PreparedBatch:
        """Advantages, log π_old (and log π_ref), and the plan of the correction, for a whole rollout batch.

        Raises:
            ValueError: on every rank alike, if a log-prob at a trained position is unusable on any.
        """
        local = self._slice(batch)
        self._scored_at = self._steps
        old = self._log_probs(self.model, local)
        ref = self._log_probs(self.reference, local) if self.reference else None
        per_rank = self.args.global_batch_size // self.args.data_parallel_size
        rows = local.tokens.shape[0]
        inputs = None
        if old is not None:
            inputs = PlanInputs(
                train_log_probs=old,
                rollout_log_probs=local.rollout_log_probs,
                response_mask=local.response_mask,
                layout=self._layout(rows, local.tokens.shape[1]),
                advantages=local.advantages,
                rewards=batch.rewards,
                group_ids=batch.group_ids,
                sequence_ids=batch.sample_ids,
                mini_batch_ids=torch.arange(rows, device=self.device) // per_rank,
            )
        plan = self.correction.plan(
            inputs,
            num_mini_batches=rows // per_rank,
            num_groups=self.args.grpo_prompts_per_step,
            device=self.device,
        )
        if not isinstance(plan, CorrectionResult) or isinstance(plan.mask, list) or isinstance(plan.weights, list):
            raise TypeError("the trainer corrects a whole rollout batch at once, in decoupled mode")
        plan.check()
        local = dataclasses.replace(local, old_log_probs=old, ref_log_probs=ref, weights=plan.weights, mask=plan.mask)
        return PreparedBatch(local, plan)

    def update(self, prepared: PreparedBatch, mini_batch: int) -> dict[str, float]:
        """One optimizer step on one mini-batch of a rollout batch.

        A mini-batch without an accepted token is skipped on all ranks alike: the optimizer is not touched.

        Returns:
            Metrics of the step, equal on all ranks.

        Raises:
            AgreedError: on every rank, if the loss is not finite; the weights are as before the step.
        """
        is_first = self._steps == self._scored_at
        self.iteration += 1
        denominators = prepared.plan.denominators_on_host()[mini_batch]
        if denominators[2] == 0:
            self.skipped += 1
            return {"skipped_steps": float(self.skipped), "lr": self._learning_rate()}
        accepted = self.args.correction.rejection_denominator == "accepted"
        denominator = denominators[2 if accepted else 0]
        per_rank = self.args.num_microbatches * self.args.micro_batch_size
        rows = prepared.local.rows(mini_batch * per_rank, (mini_batch + 1) * per_rank)
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        logs = self._run(self.model, rows, partial(self._loss, self._scale(denominator)), forward_only=False)
        metrics = self._loss_metrics(logs, denominator, is_first=is_first)
        learning_rate = self._learning_rate()
        _, grad_norm, _ = self.optimizer.step()
        self.scheduler.step(increment=1)
        return metrics | {
            "grad_norm": float(grad_norm),
            "lr": learning_rate,
            "skipped_steps": float(self.skipped),
        }

    @property
    def _steps(self) -> int:
        """Steps that changed the weights."""
        return self.iteration - self.skipped

    def _learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _build_reference(self) -> list[torch.nn.Module]:
        """A frozen copy of the initial policy."""
        reference = build_chunks(self.args, self.chunks[0].config)
        for frozen, chunk in zip(reference, self.chunks, strict=True):
            frozen.load_state_dict(chunk.state_dict())
            frozen.requires_grad_(False)
        return reference

    def _layout(self, rows: int, local_length: int) -> SequenceLayout:
        cp = self.groups.cp
        return SequenceLayout.padded(rows, local_length, cp_rank=group_rank(cp), cp_size=group_size(cp))

    def _slice(self, batch: RolloutBatch) -> Slice:
        """Shift over whole sequences first, then cut for CP."""
        labels, mask, rollout_log_probs = batch.label_aligned()
        rows, length = batch.tokens.shape
        layout = self._layout(rows, length // group_size(self.groups.cp))
        return Slice(
            tokens=layout.cut(batch.tokens),
            positions=layout.positions().to(self.device),
            labels=layout.cut(labels),
            response_mask=layout.cut(mask),
            rollout_log_probs=layout.cut(rollout_log_probs),
            advantages=group_advantages(batch.rewards, batch.group_ids).float(),
        )

    def _log_probs(self, model: Sequence[torch.nn.Module], local: Slice) -> Tensor | None:
        """[n, s/cp] log-probs of the labels, by a forward-only pass; None on stages before the last."""
        with torch.no_grad():
            outputs = self._run(model, local, self._score, forward_only=True)
        return torch.cat(outputs) if outputs else None

    def _run(self, model: Sequence[torch.nn.Module], local: Slice, function: Any, forward_only: bool) -> list[Any]:
        """Megatron's schedule over the micro-batches of these rows; what ``function`` returns for each of them."""
        size = self.args.micro_batch_size
        micro_batches = [local.rows(start, start + size) for start in range(0, local.tokens.shape[0], size)]
        schedule = get_forward_backward_func()
        collected = schedule(
            forward_step_func=partial(_forward_step, function),
            data_iterator=[iter(micro_batches) for _ in model] if len(model) > 1 else iter(micro_batches),
            model=list(model),
            num_microbatches=len(micro_batches),
            seq_length=self.args.seq_length,
            micro_batch_size=size,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return list(collected) if self.groups.is_last_stage else []

    def _policy(self, model: torch.nn.Module, output: Tensor, local: Slice) -> tuple[Tensor, Tensor]:
        """[n, s/cp] log-probs of the labels and entropy, from the model's logits or hidden states."""
        settings = {"vocab_size": self.args.vocab_size, "temperature": self.args.rl_default_temperature}
        if not self.args.fused_linear_log_probs:
            log_probs, entropy = vocab_parallel_log_probs_and_entropy(
                output, local.labels, self.groups.tp, mask=local.response_mask, **settings
            )
            return log_probs, entropy
        chunk = unwrap(model)
        tied = chunk.share_embeddings_and_output_weights
        weight = chunk.shared_embedding_or_output_weight() if tied else chunk.output_layer.weight
        log_probs, entropy = linear_log_probs_and_entropy(
            output.transpose(0, 1),
            weight,
            local.labels.t(),
            self.groups.tp,
            sequence_parallel=self.args.sequence_parallel,
            gradient_accumulation=weight.requires_grad and chunk.config.gradient_accumulation_fusion,
            mask=local.response_mask.t(),
            **settings,
        )
        return log_probs.t(), entropy.t()

    def _score(self, model: torch.nn.Module, local: Slice, output: Tensor, non_loss_data: bool = True) -> Tensor:
        return self._policy(model, output, local)[0]

    def _scale(self, denominator: float) -> LossScale:
        args = self.args
        tokens = args.micro_batch_size * args.seq_length // args.context_parallel_size
        dp_cp = group_size(self.groups.dp_cp)
        return LossScale(
            denominator=denominator,
            num_microbatches=args.num_microbatches,
            dp_cp_size=dp_cp,
            calculate_per_token_loss=args.calculate_per_token_loss,
            local_tokens=tokens,
            total_tokens=tokens * args.num_microbatches * dp_cp,
        )

    def _loss(
        self, scale: LossScale, model: torch.nn.Module, local: Slice, output: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Local arithmetic only: every global factor is in ``scale``."""
        config = self.args.loss
        if local.old_log_probs is None or local.mask is None:
            raise RuntimeError("the loss is computed on the last stage only")
        log_probs, entropy = self._policy(model, output, local)
        policy = policy_loss(
            log_probs,
            local.old_log_probs,
            local.advantages,
            local.response_mask,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
            weights=local.weights,
        )
        per_token = policy.per_token - config.entropy_coef * entropy
        statistics = policy.statistics | {"entropy": torch.where(local.response_mask, entropy, 0).double().sum()}
        statistics["kl"] = torch.zeros((), dtype=torch.float64, device=output.device)
        if local.ref_log_probs is not None:
            penalty = kl_penalty(log_probs, local.ref_log_probs)
            per_token = per_token + config.kl_coef * penalty
            statistics["kl"] = torch.where(local.response_mask, penalty, 0).double().sum()
        # The sum of float32 terms in float64: the same for every order that a layout adds them in.
        loss_sum = torch.where(local.mask, per_token, 0).double().sum()
        packed = torch.stack([loss_sum, *(statistics[name].double() for name in STATISTICS)])
        return schedule_return(loss_sum, {"sums": packed}, scale)

    def _loss_metrics(self, logs: list[dict[str, Tensor]], denominator: float, is_first: bool) -> dict[str, float]:
        """Means over the whole mini-batch: one SUM over DP×CP on the last stage, one broadcast over PP."""
        sums = torch.zeros(1 + len(STATISTICS), dtype=torch.float64, device=self.device)
        if logs:
            sums = all_reduce_sum(torch.stack([log["sums"] for log in logs]).sum(dim=0), self.groups.dp_cp)
        loss, *values = broadcast(sums, group_size(self.groups.pp) - 1, self.groups.pp).tolist()
        if not math.isfinite(loss):
            raise AgreedError(
                f"the loss of step {self.iteration} is {loss}: the step was not made; lower --lr, or look at the "
                "rewards and log-probs of this batch"
            )
        named = dict(zip(STATISTICS, values, strict=True))
        tokens = max(named.pop("tokens"), 1)
        metrics = {
            "loss/total": loss / denominator,
            "policy/approx_kl": -named["log_ratio"] / tokens,
            "policy/clip_fraction_low": named["clipped_low"] / tokens,
            "policy/clip_fraction_high": named["clipped_high"] / tokens,
            "policy/entropy": named["entropy"] / tokens,
        }
        if is_first:
            # Both passes had the same weights: what differs is how they compute.
            metrics["policy/noise_floor"] = named["abs_log_ratio"] / tokens
        if self.args.loss.dual_clip is not None:
            metrics["policy/dual_clip_fraction"] = named["dual_clipped"] / tokens
        if self.reference:
            metrics["policy/reference_kl"] = named["kl"] / tokens
        return metrics


def _forward_step(function: Any, data_iterator: Iterator[Slice], model: torch.nn.Module) -> tuple[Tensor, Any]:
    local = next(data_iterator)
    # Float16Module, which the reference policy has not, would make a float32 copy of all logits.
    keep = {"fp32_output": False} if isinstance(getattr(model, "module", None), Float16Module) else {}
    output = model(local.tokens, local.positions, None, **keep)
    return output, partial(function, model, local)
