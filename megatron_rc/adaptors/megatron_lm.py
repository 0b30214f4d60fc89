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
from megatron_rc.parallel.groups import ParallelGroups, group_rank, group_size
from megatron_rc.parallel.layout import SequenceLayout
from megatron_rc.parallel.vocab import vocab_parallel_log_probs, vocab_parallel_log_probs_and_entropy
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.flags import policy_loss_config_from_args, rollout_correction_config_from_args
from megatron_rc.training.micro_batch import MicroBatch
from megatron_rc.training.plan import LossScale, Plan
from megatron_rc.training.rollout_correction import RolloutCorrection
from megatron_rc.training.schedule import masked_loss, wrap_finalize

Data = Mapping[str, Tensor]


@dataclass(frozen=True)
class _Item:
    """One micro-batch on its way through the schedule; ``batch`` is None except on the last stage."""

    tokens: Tensor | None
    positions: Tensor | None
    labels: Tensor | None
    batch: MicroBatch | None
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
        self.get_args, self.groups = get_args, groups
        self.vocab_size, self.temperature = vocab_size, temperature
        self.plan: Plan | None = None
        self._correction: RolloutCorrection | None = None

    @property
    def correction(self) -> RolloutCorrection:
        """The correction that the flags describe."""
        if self._correction is None:
            args = self.get_args()
            config = rollout_correction_config_from_args(args)
            _check(config)
            self._correction = RolloutCorrection(
                config,
                self.groups or ParallelGroups.from_megatron(),
                loss=policy_loss_config_from_args(args),
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
        item = next(data_iterator)
        if not isinstance(item, _Item):
            raise ValueError(
                "forward_step got data without a plan: set megatron.training.training.get_forward_backward_func = "
                "correction.around(get_forward_backward_func) before training starts"
            )
        return model(item.tokens, item.positions, None), partial(self.loss_func, item)

    def loss_func(self, item: _Item, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The corrected loss of a micro-batch on the last stage, from logits [b, s/cp, v/tp].

        Returns:
            The results of :func:`megatron_rc.masked_loss`. The log holds ``policy loss`` as [numerator, denominator],
            from which Megatron-LM's ``train_step`` computes the loss of the whole step.
        """
        assert item.batch is not None
        assert item.labels is not None
        correction, entropy = self.correction, None
        settings: dict[str, Any] = {"vocab_size": self.vocab_size, "temperature": self.temperature}
        given = (output, item.labels, correction.groups.tp)
        if correction.loss.entropy_coef:
            log_probs, entropy = vocab_parallel_log_probs_and_entropy(*given, mask=item.batch.response_mask, **settings)
        else:
            log_probs = vocab_parallel_log_probs(*given, mask=item.batch.response_mask, **settings)
        loss, tokens, log = masked_loss(correction, item.batch, log_probs, entropy, item.scale)
        share = item.scale.denominator / (item.scale.num_microbatches * item.scale.dp_cp_size)
        return loss, tokens, {"policy loss": torch.stack([log["loss"].double(), share.double()]).float()}

    def _scheduled(
        self, schedule: Callable[..., Any], *, data_iterator: Any, model: Any, num_microbatches: int, **more: Any
    ) -> Any:
        """Run Megatron's schedule on planned micro-batches."""
        from megatron.core.utils import get_model_config

        chunks = model if isinstance(model, list) else [model]
        config = get_model_config(chunks[0])
        if getattr(config.finalize_model_grads_func, "ends_steps_of", None) is not self.correction:
            config.finalize_model_grads_func = wrap_finalize(self.correction, config.finalize_model_grads_func)
        each = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        taken = [None if one is None else [next(one) for _ in range(num_microbatches)] for one in each]
        items = [iter(some) for some in self._planned(taken, num_microbatches, config.calculate_per_token_loss)]
        iterators = items if isinstance(data_iterator, list) else items[0]
        return schedule(data_iterator=iterators, model=model, num_microbatches=num_microbatches, **more)

    def _planned(self, taken: Sequence[list[Data] | None], number: int, per_token: bool) -> list[list[_Item]]:
        """The micro-batches of each model chunk; ``taken`` holds None for a chunk without data on this stage."""
        correction, groups = self.correction, self.correction.groups
        nothing: list[dict[str, Tensor]] = [{}] * number
        cut = [nothing if some is None else [self._cut(data) for data in some] for some in taken]
        inputs = self._inputs(cut[-1]) if groups.is_last_stage else None
        self.plan = plan = correction.plan(inputs)
        plan.check()
        batches: Sequence[MicroBatch | None] = [None] * number
        if inputs is not None:
            pairs = zip(plan.micro_batches(inputs), cut[-1], strict=True)
            batches = [replace(batch, ref_log_probs=data.get("ref_log_probs")) for batch, data in pairs]
        local = sum(data["tokens"].numel() for data in cut[-1][:1] if data)
        scale = plan.loss_scale(
            num_microbatches=number,
            calculate_per_token_loss=per_token and inputs is not None,
            local_tokens=local,
            total_tokens=local * number * group_size(groups.dp_cp),
        )
        return [
            [
                _Item(data.get("tokens"), data.get("position_ids"), data.get("labels"), batch, scale)
                for data, batch in zip(some, batches, strict=True)
            ]
            for some in cut
        ]

    def _layout(self, rows: int, length: int) -> SequenceLayout:
        cp = self.correction.groups.cp
        return SequenceLayout.padded(rows, length, cp_rank=group_rank(cp), cp_size=group_size(cp))

    def _cut(self, data: Data) -> dict[str, Tensor]:
        """This context-parallel rank's part of a micro-batch, checked alike on every stage."""
        config, loss = self.correction.config, self.correction.loss
        needed = ["tokens", "position_ids", "labels", "loss_mask", "rollout_log_probs", "advantages"]
        needed += ["old_log_probs"] * (not config.bypass_mode) + ["ref_log_probs"] * bool(loss.kl_coef)
        for name in needed:
            if name not in data:
                raise ValueError(f"{name} is missing in a micro-batch: the correction of these flags needs it")
        rows, length = checked_tensor("tokens of a micro-batch", data["tokens"]).shape
        layout = self._layout(rows, -(-length // group_size(self.correction.groups.cp)))
        local = {}
        for name in needed:
            whole = not (name == "advantages" and getattr(data[name], "ndim", 2) == 1)
            shape = (rows, length) if whole else (rows,)
            value = checked_tensor(f"{name} of a micro-batch", data[name], shape, " of the tokens")
            local[name] = layout.cut(value) if whole else value
        return local

    def _inputs(self, parts: Sequence[Data]) -> PlanInputs:
        """The inputs of the plan, on the last stage."""
        return PlanInputs(
            None if self.correction.config.bypass_mode else [data["old_log_probs"] for data in parts],
            [data["rollout_log_probs"] for data in parts],
            [data["loss_mask"] != 0 for data in parts],
            [self._layout(*data["tokens"].shape) for data in parts],
            advantages=[data["advantages"] for data in parts],
        )


def _check(config: RolloutCorrectionConfig) -> None:
    """Raise ValueError for settings that need data which Megatron-LM's micro-batches do not have."""
    lacks = "the data lack weight versions"
    refuse(config, proximal_interpolation=lacks, rollout_staleness_scale=lacks)
    if config.needs_prompts:
        raise ValueError(f"rollout_rs={config.rollout_rs!r} needs prompts, which the data lack: drop those criteria")
