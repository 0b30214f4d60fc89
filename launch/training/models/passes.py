"""Passes of a model over micro-batches, through Megatron's schedule: log-probs and entropies of the labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.batches.micro_batches import Cut, LocalBatch, LocalTokens
from megatron_rc.launch.training.models.build import unwrap
from megatron_rc.launch.training.models.local_layers import PackedTokens
from megatron_rc.launch.training.models.routing_replay import RoutingReplay
from megatron_rc.launch.training.models.timers import StepTimers
from megatron_rc.parallel import (
    ParallelGroups,
    linear_log_probs_and_entropy,
    vocab_parallel_log_probs_and_entropy,
)
from megatron_rc.records.support import offsets_of, take_support

Chunks = Sequence[torch.nn.Module]
# Called on the last stage with (chunk, micro-batch, output).
OutputFunction = Callable[..., Any]


class Scored(NamedTuple):
    """Results of a forward-only pass, like the tokens."""

    log_probs: Tensor  # log-probs of the labels, nats
    squares: Tensor | None = None  # Σπ² over the vocabulary; None unless asked for


class ModelPasses:
    """Passes of the run's models: the policy, its reference and the critic; ``timers`` measure training passes."""

    def __init__(self, config: RunConfig, groups: ParallelGroups) -> None:
        self.config, self.groups, self.timers = config, groups, StepTimers(config)

    def run(
        self,
        model: Chunks,
        batch: LocalBatch,
        cuts: Sequence[Cut],
        function: OutputFunction,
        *,
        forward_only: bool = False,
        replay: RoutingReplay | None = None,
    ) -> list[Any]:
        """Run Megatron's schedule over micro-batches; return the results of ``function``, none before the last stage.

        ``function`` is called with (chunk, micro-batch, output); it returns the loss, or any value in a forward-only
        pass. ``replay``: experts that the model's routers take; None: routers choose.
        """
        if replay is not None:
            with replay.in_pass(batch, cuts, forward_only=forward_only) as experts:
                return self._run(model, batch, cuts, partial(_forward_step, function, replay), experts, forward_only)
        return self._run(model, batch, cuts, partial(_forward_step, function, None), [None] * len(cuts), forward_only)

    def _run(
        self,
        model: Chunks,
        batch: LocalBatch,
        cuts: Sequence[Cut],
        forward_step: Callable[..., Any],
        experts: Sequence[Tensor | None],
        forward_only: bool,
    ) -> list[Any]:
        """Run the schedule; ``experts``: those to replay in each micro-batch."""
        micro_batches = list(zip((batch.local.piece(cut) for cut in cuts), experts, strict=True))
        unwrap(model[0]).config.timers = None if forward_only else self.timers.megatron
        schedule = get_forward_backward_func()
        collected = schedule(
            forward_step_func=forward_step,
            data_iterator=[iter(micro_batches) for _ in model] if len(model) > 1 else iter(micro_batches),
            model=list(model),
            num_microbatches=len(micro_batches),
            seq_length=batch.length_of_model,
            micro_batch_size=batch.rows_of_model,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return list(collected) if self.groups.is_last_stage else []

    def score(
        self,
        model: Chunks,
        batch: LocalBatch,
        temperature: float | None = None,
        *,
        squares: bool = False,
        replay: RoutingReplay | None = None,
    ) -> Scored | None:
        """The labels' log-probs, and Σπ² if asked for, by a forward-only pass; None on stages before the last."""

        def function(
            chunk: torch.nn.Module, local: LocalTokens, output: Tensor, non_loss_data: bool = True
        ) -> tuple[Tensor, ...]:
            log_probs, _, *more = self.log_probs_and_entropy(chunk, output, local, temperature, squares=squares)
            return log_probs, *more

        cuts = [cut for mini_batch in batch.cuts for cut in mini_batch]
        with torch.no_grad():
            outputs = self.run(model, batch, cuts, function, forward_only=True, replay=replay)
        return Scored(*map(torch.cat, zip(*outputs, strict=True))) if outputs else None

    def log_probs_and_entropy(
        self,
        chunk: torch.nn.Module,
        output: Tensor,
        local: LocalTokens,
        temperature: float | None = None,
        *,
        squares: bool = False,
    ) -> tuple[Tensor, ...]:
        """(log-probs of the labels, entropies, and Σπ² if asked for), like the tokens, from logits or hidden states.

        ``temperature``: temperature of the distribution; default: the rollouts' temperature.
        """
        labels, mask = _rows(local.labels), _rows(local.response_mask)
        temperature = self.config.rollouts.rl_default_temperature if temperature is None else temperature
        if self.config.training.fused_linear_log_probs:
            found = self._from_hidden(unwrap(chunk), output, labels, mask, self._options(local, temperature, squares))
        else:
            found = vocab_parallel_log_probs_and_entropy(
                output,
                labels,
                self.groups.tp,
                mask=mask,
                **self._options(local, temperature, squares),
            )
        return tuple(values.reshape(local.layout.shape) for values in found)

    def _options(self, local: LocalTokens, temperature: float, squares: bool) -> dict[str, Any]:
        """Arguments of both functions that compute log-probs, for labels in the order of the local tokens."""
        options = {"vocab_size": self.config.model.vocab_size, "temperature": temperature, "sum_squares": squares}
        if local.support_ids is None or local.support_counts is None:
            return options
        ids, counts = local.support_ids, local.support_counts
        if self.config.training.fused_linear_log_probs and counts.dim() > 1:  # its labels are [s/cp, b]
            place = torch.arange(counts.numel(), device=counts.device).view_as(counts)
            ids, counts = take_support(ids, counts, place.t())
        support = {"support_ids": ids, "support_offsets": offsets_of(counts)}
        return options | support | {"entropy_over_support": self.config.rollouts.entropy_over_support}

    def _from_hidden(
        self, chunk: GPTModel, hidden: Tensor, labels: Tensor, mask: Tensor, options: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        """As :meth:`log_probs_and_entropy`, [b, s/cp] each, from hidden states, without making the logits."""
        tied = chunk.share_embeddings_and_output_weights
        weight = chunk.shared_embedding_or_output_weight() if tied else chunk.output_layer.weight
        found = linear_log_probs_and_entropy(
            hidden.transpose(0, 1),
            weight,
            labels.t(),
            self.groups.tp,
            sequence_parallel=self.config.parallel.sequence_parallel,
            gradient_accumulation=weight.requires_grad and chunk.config.gradient_accumulation_fusion,
            mask=mask.t(),
            **options,
        )
        return tuple(values.t() for values in found)


def _rows(values: Tensor) -> Tensor:
    """[b, s/cp] for the model, with packed tokens in one row."""
    return values if values.dim() == 2 else values.unsqueeze(0)


def _forward_step(
    function: OutputFunction,
    replay: RoutingReplay | None,
    data_iterator: Iterator[tuple[LocalTokens, Tensor | None]],
    model: torch.nn.Module,
) -> tuple[Tensor, Any]:
    local, experts = next(data_iterator)
    # Without fp32_output=False, Float16Module would copy all logits to float32; the reference has no Float16Module.
    keep: dict[str, Any] = {"fp32_output": False} if isinstance(getattr(model, "module", None), Float16Module) else {}
    tokens, positions = local.tokens, local.positions
    if tokens.dim() == 1:
        tokens, positions = tokens.unsqueeze(0), positions.unsqueeze(0)
        keep["packed_seq_params"] = PackedTokens.of(local.layout, tokens.device)
    with nullcontext() if replay is None else replay.in_forward(unwrap(model), experts):
        output = model(tokens, positions, None, **keep)
    return output, partial(function, model, local)
