"""Megatron-LM: a ``forward_step`` with its loss, and a plan of each optimizer step before Megatron's schedule.

Written for ``megatron.training`` of megatron-core 0.19. Its ``train`` asks ``get_forward_backward_func`` for the
schedule and calls it once a step. See docs/adaptors.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rc.adaptors.shared import checked_tensor, refuse
from megatron_rc.correction.inputs import PlanInputs
from megatron_rc.loss.objectives import OBJECTIVES
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.parallel.groups import ParallelGroups, group_rank, group_size
from megatron_rc.parallel.layout import SequenceLayout
from megatron_rc.parallel.vocab import vocab_parallel_log_probs, vocab_parallel_log_probs_and_entropy
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.flags import policy_loss_config_from_args, rollout_correction_config_from_args
from megatron_rc.training.micro_batch import MicroBatch
from megatron_rc.training.plan import LossScale, Plan
from megatron_rc.training.rollout_correction import RolloutCorrection
from megatron_rc.training.schedule import masked_loss, wrap_finalize

Data = Mapping[str, Tensor]  # the tensors of one micro-batch, by name


@dataclass(frozen=True)
class _PlannedMicroBatch:
    """A micro-batch that the schedule hands to ``forward_step``, with all that its loss needs.

    Tensors are [b, s/cp], this rank's tokens; None for a model chunk whose data iterator is None.
    """

    tokens: Tensor | None
    positions: Tensor | None
    labels: Tensor | None
    batch: MicroBatch | None  # log-probs, mask, advantages and weights; None except on the last stage
    scale: LossScale


class MegatronCorrection:
    """The correction in Megatron-LM's training loop, in decoupled and in bypass mode, on every pipeline stage.

    ``forward_step`` is Megatron-LM's function of that name. ``around`` wraps its ``get_forward_backward_func``: before
    each call of the schedule it takes the step's micro-batches from the data iterator and plans them. The first step
    also wraps the model config's ``finalize_model_grads_func``.

    A micro-batch is a dict of whole sequences [b, s], equal on all ranks of a replica: tokens, position_ids, labels
    (the tokens shifted left by one), loss_mask of any dtype, advantages ([b] or [b, s]) and log-probs of the labels:
    rollout_log_probs, old_log_probs in decoupled mode, ref_log_probs with a KL penalty. They are cut over the CP group
    here.

    Args:
        get_args: Megatron-LM's function; its parser has the flags of ``add_rollout_correction_args``.
        groups: process groups. Default: Megatron's.
        vocab_size: tokens of the vocabulary, without Megatron's padding. Default: no padding.
        temperature: the engine's sampling temperature.

    Attributes:
        plan: the newest step's plan; call its ``metrics()`` in decoupled mode.
        correction: made from the flags at the first step; call its ``loss_metrics()``, and ``step.metrics()`` in
            bypass mode.

    Raises:
        ValueError: at the first step, for flags that contradict each other or need other data.
    """

    def __init__(
        self,
        get_args: Callable[[], Any],
        groups: ParallelGroups | None = None,
        *,
        vocab_size: int | None = None,
        temperature: float = 1.0,
    ) -> None:
        self.get_args = get_args
        self.groups = groups
        self.vocab_size = vocab_size
        self.temperature = temperature
        self.plan: Plan | None = None
        self._correction: RolloutCorrection | None = None

    @property
    def correction(self) -> RolloutCorrection:
        """The correction that the flags describe, made at the first access: Megatron parses its flags late."""
        if self._correction is None:
            args = self.get_args()
            config = rollout_correction_config_from_args(args)
            loss = policy_loss_config_from_args(args)
            _check(config, loss)
            self._correction = RolloutCorrection(
                config,
                self.groups or ParallelGroups.from_megatron(),
                loss=loss,
                has_auxiliary_losses=bool(getattr(args, "num_experts", None) or getattr(args, "mtp_num_layers", None)),
            )
        return self._correction

    def around(self, get_forward_backward_func: Callable[..., Any]) -> Callable[..., Any]:
        """A ``get_forward_backward_func`` whose schedules plan the step's micro-batches before they run."""

        def get(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            return partial(self._scheduled, get_forward_backward_func(*args, **kwargs))

        return get

    def forward_step(self, data_iterator: Iterator[Any], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        """The model's output for the next micro-batch, and its loss, as Megatron's schedules call it.

        Raises:
            ValueError: the schedule was not wrapped by ``around``.
        """
        micro_batch = next(data_iterator)
        if not isinstance(micro_batch, _PlannedMicroBatch):
            raise ValueError(
                "forward_step got data without a plan: set megatron.training.training.get_forward_backward_func = "
                "correction.around(get_forward_backward_func) before training starts"
            )
        output = model(micro_batch.tokens, micro_batch.positions, None)
        return output, partial(self.loss_func, micro_batch)

    def loss_func(self, micro_batch: _PlannedMicroBatch, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The corrected loss of a micro-batch on the last stage, from logits [b, s/cp, v/tp].

        Returns:
            The results of :func:`megatron_rc.masked_loss`. The log holds ``policy loss`` as [numerator, denominator],
            from which Megatron-LM's ``train_step`` computes the loss of the whole step.
        """
        assert micro_batch.batch is not None
        assert micro_batch.labels is not None
        correction = self.correction
        arguments: dict[str, Any] = {
            "logits": output,
            "labels": micro_batch.labels,
            "tp_group": correction.groups.tp,
            "mask": micro_batch.batch.response_mask,
            "vocab_size": self.vocab_size,
            "temperature": self.temperature,
        }
        entropy = None
        if correction.loss.entropy_coef:
            log_probs, entropy = vocab_parallel_log_probs_and_entropy(**arguments)
        else:
            log_probs = vocab_parallel_log_probs(**arguments)

        scale = micro_batch.scale
        loss, tokens, log = masked_loss(correction, micro_batch.batch, log_probs, entropy, scale)
        # train_step adds numerators and denominators over micro-batches and ranks: each adds its share of the step's.
        denominator_share = scale.denominator / (scale.num_microbatches * scale.dp_cp_size)
        fraction = torch.stack([log["loss"].double(), denominator_share.double()]).float()
        return loss, tokens, {"policy loss": fraction}

    def _scheduled(
        self,
        schedule: Callable[..., Any],
        *,
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        **schedule_arguments: Any,
    ) -> Any:
        """Take the step's micro-batches, plan them, and run Megatron's schedule on them; return its result.

        With virtual pipeline stages ``model`` is a list of chunks and ``data_iterator`` a list with one iterator for
        each. An iterator is None if the chunk needs no data.
        """
        from megatron.core.utils import get_model_config

        chunks = model if isinstance(model, list) else [model]
        config = get_model_config(chunks[0])
        if getattr(config.finalize_model_grads_func, "ends_steps_of", None) is not self.correction:
            config.finalize_model_grads_func = wrap_finalize(self.correction, config.finalize_model_grads_func)

        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        data_of_chunks: list[list[Data] | None] = []
        for iterator in iterators:
            data_of_chunks.append(None if iterator is None else [next(iterator) for _ in range(num_microbatches)])
        planned = self._planned(data_of_chunks, num_microbatches, config.calculate_per_token_loss)
        planned_iterators = [iter(micro_batches) for micro_batches in planned]
        return schedule(
            data_iterator=planned_iterators if isinstance(data_iterator, list) else planned_iterators[0],
            model=model,
            num_microbatches=num_microbatches,
            **schedule_arguments,
        )

    def _planned(
        self, data_of_chunks: Sequence[list[Data] | None], num_microbatches: int, per_token: bool
    ) -> list[list[_PlannedMicroBatch]]:
        """Plan one optimizer step, and return the planned micro-batches of each model chunk.

        ``data_of_chunks`` has None for a chunk without data on this stage; ``per_token`` is Megatron's
        ``calculate_per_token_loss``. Collectives: those of ``RolloutCorrection.plan``.
        """
        correction = self.correction
        groups = correction.groups
        no_data: list[dict[str, Tensor]] = [{}] * num_microbatches
        local_data = []
        for data_of_chunk in data_of_chunks:
            local_data.append(no_data if data_of_chunk is None else [self._cut(data) for data in data_of_chunk])

        # The loss is in the last stage's last chunk; the other stages take part in the plan without inputs.
        last_chunk = local_data[-1]
        inputs = self._inputs(last_chunk) if groups.is_last_stage else None
        plan = correction.plan(inputs)
        plan.check()
        self.plan = plan
        batches: Sequence[MicroBatch | None] = [None] * num_microbatches
        if inputs is not None:
            batches = [
                replace(batch, ref_log_probs=data.get("ref_log_probs"))
                for batch, data in zip(plan.micro_batches(inputs), last_chunk, strict=True)
            ]

        # All micro-batches have the same shape.
        local_tokens = last_chunk[0]["tokens"].numel() if last_chunk and last_chunk[0] else 0
        scale = plan.loss_scale(
            num_microbatches=num_microbatches,
            calculate_per_token_loss=per_token and inputs is not None,
            local_tokens=local_tokens,
            total_tokens=local_tokens * num_microbatches * group_size(groups.dp_cp),
        )
        return [
            [
                _PlannedMicroBatch(
                    tokens=data.get("tokens"),
                    positions=data.get("position_ids"),
                    labels=data.get("labels"),
                    batch=batch,
                    scale=scale,
                )
                for data, batch in zip(data_of_chunk, batches, strict=True)
            ]
            for data_of_chunk in local_data
        ]

    def _layout(self, rows: int, local_length: int) -> SequenceLayout:
        """The layout of a micro-batch of padded rows, of which this rank holds [rows, local_length]."""
        cp = self.correction.groups.cp
        return SequenceLayout.padded(rows, local_length, cp_rank=group_rank(cp), cp_size=group_size(cp))

    def _cut(self, data: Data) -> dict[str, Tensor]:
        """This context-parallel rank's part of a micro-batch, checked alike on every stage.

        Only the tensors that the settings need are in it. ValueError for a missing one, or one of another shape.
        """
        needed = ["tokens", "position_ids", "labels", "loss_mask", "rollout_log_probs", "advantages"]
        if not self.correction.config.bypass_mode:
            needed.append("old_log_probs")
        if self.correction.loss.kl_coef:
            needed.append("ref_log_probs")
        for name in needed:
            if name not in data:
                raise ValueError(f"{name} is missing in a micro-batch: the correction of these flags needs it")

        rows, length = checked_tensor("tokens of a micro-batch", data["tokens"]).shape
        # Rounded up, so that a length which does not divide is refused by the layout, with the shapes.
        layout = self._layout(rows, -(-length // group_size(self.correction.groups.cp)))
        local_data = {}
        for name in needed:
            is_per_sequence = name == "advantages" and getattr(data[name], "ndim", 2) == 1
            shape = (rows,) if is_per_sequence else (rows, length)
            value = checked_tensor(f"{name} of a micro-batch", data[name], shape, " of the tokens")
            local_data[name] = value if is_per_sequence else layout.cut(value)
        return local_data

    def _inputs(self, micro_batches: Sequence[Data]) -> PlanInputs:
        """The inputs of the plan, on the last stage, from this rank's parts of the micro-batches."""
        old_log_probs = None
        if not self.correction.config.bypass_mode:
            old_log_probs = [data["old_log_probs"] for data in micro_batches]
        return PlanInputs(
            old_log_probs,
            [data["rollout_log_probs"] for data in micro_batches],
            [data["loss_mask"] != 0 for data in micro_batches],
            [self._layout(*data["tokens"].shape) for data in micro_batches],
            advantages=[data["advantages"] for data in micro_batches],
        )


def _check(config: RolloutCorrectionConfig, loss: PolicyLossConfig) -> None:
    """Raise ValueError for settings that need data which Megatron-LM's micro-batches do not have."""
    bypass_distils = config.bypass_mode and OBJECTIVES[config.loss_type].uses_divergence
    if loss.distils or bypass_distils:
        raise ValueError("distillation needs a teacher, which the data lack: drop distill and --distillation-coef")
    reason = "the data lack weight versions"
    refuse(config, proximal_interpolation=reason, rollout_staleness_scale=reason)
    if config.needs_prompts:
        raise ValueError(f"rollout_rs={config.rollout_rs!r} needs prompts, which the data lack: drop those criteria")
