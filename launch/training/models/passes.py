"""Passes of a model over micro-batches, through Megatron's schedule: log-probs and entropies of the labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.batches.micro_batches import Cut, LocalBatch, LocalTokens
from megatron_rc.launch.training.models.build import unwrap
from megatron_rc.launch.training.models.local_layers import PackedTokens
from megatron_rc.launch.training.models.output import processed
from megatron_rc.launch.training.models.routing_replay import RoutingReplay
from megatron_rc.launch.training.models.timers import StepTimers
from megatron_rc.parallel import ParallelGroups, TeacherStates, TeacherTopK, log_prob_processor
from megatron_rc.records.support import offsets_of

Chunks = Sequence[torch.nn.Module]
# Called on the last stage with (chunk, micro-batch, output).
OutputFunction = Callable[..., Any]
# Called with a micro-batch; None before the last stage.
TeacherFunction = Callable[[LocalTokens], TeacherStates | TeacherTopK | None]


class Scoring(NamedTuple):
    """Log-probs of the labels and other numbers of their distributions, which a pass gives instead of logits."""

    temperature: float | None = None  # of the distribution; None: the rollouts' temperature
    squares: bool = False  # Σπ² too
    hidden_states: bool = False  # the last hidden states instead of all of these


class Scored(NamedTuple):
    """Results of a forward-only pass, like the tokens."""

    log_probs: Tensor  # log-probs of the labels, nats
    squares: Tensor | None = None  # Σπ² over the vocabulary; None unless asked for


class ModelPasses:
    """Passes of the run's models: the policy, its reference and the critic; ``timers`` measure training passes."""

    def __init__(self, config: RunConfig, groups: ParallelGroups) -> None:
        self.config = config
        self.groups = groups
        self.timers = StepTimers(config)

    def run(
        self,
        model: Chunks,
        batch: LocalBatch,
        cuts: Sequence[Cut],
        function: OutputFunction,
        *,
        scoring: Scoring | None = None,
        forward_only: bool = False,
        replay: RoutingReplay | None = None,
        teacher: TeacherFunction | None = None,
    ) -> list[Any]:
        """Run Megatron's schedule over micro-batches; return the results of ``function``, none before the last stage.

        ``function`` is called with (chunk, micro-batch, output); it returns the loss, or any value in a forward-only
        pass. The output is the model's; with ``scoring`` it is (log-probs of the labels, entropies, and Σπ² if asked
        for), like the tokens, or the last hidden states, [s/cp, b, h], with sequence parallelism [s/cp/tp, b, h].
        ``replay``: experts that the model's routers take; None: routers choose. ``teacher``: function that returns a
        micro-batch's teacher; the divergence from the teacher is then the last of the scores.
        """
        unwrap(model[0]).config.timers = None if forward_only else self.timers.megatron
        schedule = get_forward_backward_func()
        none = nullcontext([None] * len(cuts))
        with none if replay is None else replay.in_pass(batch, cuts, forward_only=forward_only) as experts:
            micro_batches = list(zip((batch.local.piece(cut) for cut in cuts), experts, strict=True))
            collected = schedule(
                forward_step_func=partial(self._forward_step, function, scoring, replay, teacher),
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

        def without_entropies(_: Any, local: LocalTokens, output: tuple[Tensor, ...], **more: Any) -> Any:
            return output[0], *output[2:]

        cuts = [cut for mini_batch in batch.cuts for cut in mini_batch]
        scoring = Scoring(temperature, squares)
        with torch.no_grad():
            outputs = self.run(model, batch, cuts, without_entropies, scoring=scoring, forward_only=True, replay=replay)
        return Scored(*map(torch.cat, zip(*outputs, strict=True))) if outputs else None

    def hidden_states(self, model: Chunks, batch: LocalBatch) -> list[Tensor]:
        """The last hidden states of each micro-batch, by a forward-only pass; see :meth:`run`."""

        def of_micro_batch(_: Any, local: LocalTokens, hidden: Tensor, **more: Any) -> Tensor:
            return hidden

        cuts = [cut for mini_batch in batch.cuts for cut in mini_batch]
        scoring = Scoring(hidden_states=True)
        with torch.no_grad():
            return self.run(model, batch, cuts, of_micro_batch, scoring=scoring, forward_only=True)

    def _forward_step(
        self,
        function: OutputFunction,
        scoring: Scoring | None,
        replay: RoutingReplay | None,
        teacher: TeacherFunction | None,
        data_iterator: Iterator[tuple[LocalTokens, Tensor | None]],
        model: torch.nn.Module,
    ) -> tuple[Tensor, Any]:
        local, experts = next(data_iterator)
        # Without fp32_output=False, Float16Module would copy logits to float32; the reference has no Float16Module.
        half = isinstance(getattr(model, "module", None), Float16Module)
        keep: dict[str, Any] = {"fp32_output": False} if half else {}
        tokens = local.tokens
        positions = local.positions
        if tokens.dim() == 1:
            tokens = tokens.unsqueeze(0)
            positions = positions.unsqueeze(0)
            keep["packed_seq_params"] = PackedTokens.of(local.layout, local.tokens.device, local.positions)
        with nullcontext() if replay is None else replay.in_forward(unwrap(model), experts):
            if scoring is None:
                output = model(tokens, positions, None, **keep)
                return output, partial(function, model, local)
            labels = {"labels": _rows(local.labels), "loss_mask": _rows(local.response_mask)}
            processor = self._processor(scoring, local, None if teacher is None else teacher(local))
            found = processed(model, processor, tokens, positions, None, **labels, **keep)
        if isinstance(found, Tensor):  # hidden states, for the next stage or of the last one
            return found, partial(function, model, local)
        found = tuple(values.reshape(local.layout.shape) for values in found)
        # The schedule wants one tensor, whose device it asks for.
        return found[0], lambda _, **more: function(model, local, found, **more)

    def _processor(
        self, scoring: Scoring, local: LocalTokens, teacher: TeacherStates | TeacherTopK | None
    ) -> Callable[..., Any]:
        """The function from hidden states to the scores of a micro-batch, [b, s/cp] each."""
        if scoring.hidden_states:
            return _hidden_states
        rollouts = self.config.rollouts
        temperature = scoring.temperature
        ids = local.support_ids
        counts = local.support_counts
        return log_prob_processor(
            self.groups.tp,
            fused=self.config.training.fused_linear_log_probs,
            vocab_size=self.config.model.vocab_size,
            temperature=rollouts.rl_default_temperature if temperature is None else temperature,
            sum_squares=scoring.squares,
            support_ids=ids,
            support_offsets=None if counts is None else offsets_of(counts),
            support_is_sorted=True,  # by the collector
            entropy_over_support=rollouts.entropy_over_support,
            teacher=teacher,
        )


def _hidden_states(*, hidden_states: Tensor, **others: Any) -> Tensor:
    """An ``output_processor`` that returns what it gets."""
    return hidden_states


def _rows(values: Tensor) -> Tensor:
    """[b, s/cp] for the model, with packed tokens in one row."""
    return values if values.dim() == 2 else values.unsqueeze(0)
