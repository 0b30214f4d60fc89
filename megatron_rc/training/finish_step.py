"""The optimizer steps of a correction, one after the other: counting, refusing, ending."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_rc.batch.sums import empty_header, reduce_batch
from megatron_rc.correction.inputs import PER_SEQUENCE, AgreedCounts
from megatron_rc.loss.metrics import LossStatistics
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.parallel.collectives import broadcast, first_text, pack, unpack
from megatron_rc.parallel.groups import ParallelGroups, group_size
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.training.decoupled import DecoupledPlan
from megatron_rc.training.in_loss import InLossPlan, of_one_step
from megatron_rc.training.micro_batch import CorrectedMicroBatch
from megatron_rc.training.misuse import Misuse, StepError
from megatron_rc.training.open_step import OpenStep
from megatron_rc.training.plan import PlannedStep
from megatron_rc.training.result import TrainingResult
from megatron_rc.training.scaled_gradients import ScaledGradients
from megatron_rc.training.step_result import Counted, StepHeader, StepResult

_TOLERANCE = 1e-5  # relative, of sums of float32 weights in another order


class Steps:
    """The owner of the open step and of the result of the last one.

    Args:
        config: the correction.
        loss: the objective.
        groups: ``dp_cp`` carries the reductions of the last stage, ``pp`` their result to the other stages.
        allow_zero_log_probs: as in :func:`correct_rollouts`.

    Attributes:
        agreed: the counts of the newest plan, which the form of a step's header follows.
        since_plan: the steps that have ended since the newest plan was made, on every stage.
    """

    def __init__(
        self,
        config: RolloutCorrectionConfig,
        loss: PolicyLossConfig,
        groups: ParallelGroups,
        *,
        allow_zero_log_probs: bool,
    ) -> None:
        self.config, self.loss, self.groups = config, loss, groups
        self.allow_zero_log_probs = allow_zero_log_probs
        self.agreed = AgreedCounts()
        self.since_plan: list[StepResult] = []
        self._open = OpenStep()
        self._ended: StepResult | None = None
        self._scaled: ScaledGradients | None = None
        self._ends: weakref.WeakSet[Callable[..., object]] = weakref.WeakSet()
        self._is_ending = self._has_ended = False

    def note_plan(self, agreed: AgreedCounts) -> None:
        """A new plan was made, with these counts."""
        self.agreed, self.since_plan = agreed, []

    def check_ready(self) -> None:
        """Raise if no step may begin that the loss corrects; called when its scale is asked for.

        Raises:
            ValueError: nothing would end it, which every stage sees.
            StepError: a whole step was counted, and nothing has ever ended one, which the last stage sees alone: the
                others see no loss.
        """
        if not self.config.corrects_in_loss:
            return
        if not self._ends:
            raise ValueError(
                "no step will be ended, and its gradients not be scaled: before the schedule set "
                "finalize_model_grads_func=wrap_finalize(correction) in Megatron's config, on every pipeline stage"
            )
        if not self._has_ended and self._open.holds_steps(1):
            raise StepError(
                "a schedule has run, and nothing has ended its step or scaled its gradients: what "
                "wrap_finalize(correction) gave is not the finalize_model_grads_func of the config of this model, on "
                "every pipeline stage; set it before the schedule"
            )

    def check_goes_on(self, step: PlannedStep) -> None:
        """Raise StepError unless this step goes on or begins."""
        if self._open.step is not None and not self._open.is_of(step):
            raise StepError(
                f"mini_batch={step.mini_batch} in the step of mini-batch {self._open.step.mini_batch}: call "
                "finish_step() in between, or reset_step() if that step is given up"
            )

    def count(self, step: PlannedStep, counted: Counted[Tensor], found: CorrectedMicroBatch) -> None:
        """Add a micro-batch to the open step. Collectives: none.

        Args:
            step: whose denominator its loss was divided by.
            counted: its tokens.
            found: its correction.

        Raises:
            StepError: two steps have been counted, and nothing has ever ended one.
        """
        if self.config.corrects_in_loss and self._open.holds_steps(2) and not self._has_ended:
            raise StepError(Misuse.UNFINISHED.words)
        if self._open.micro_batches == 0 and self._scaled is not None:
            if self._scaled.are_untouched:
                self._open.note(Misuse.SCALED_BEFORE)
            self._scaled = None
        self._open.count(step, counted, found)

    def record(self, statistics: LossStatistics) -> None:
        """Add the measures of the loss of a micro-batch. Collectives: none."""
        self._open.record(statistics)

    def compare_divisor(self, num_tokens: int | None) -> None:
        """Note a step whose losses expect another divisor of their gradients. Collectives: none.

        Args:
            num_tokens: Megatron divided the gradients by so many tokens; None: by none.
        """
        if self._open.step is not None and self._open.step.total_tokens != num_tokens:
            self._open.note(Misuse.OTHER_DIVISOR)

    def refuse(self, message: str) -> None:
        """Note that a loss could not be made, for ``finish`` to raise on every rank alike. Collectives: none."""
        self._open.note(Misuse.REFUSED_LOSS)
        self._open.refused = self._open.refused or message

    def finish(self, device: torch.device) -> StepResult:
        """End a step: see :meth:`RolloutCorrection.finish_step`."""
        form = self._form(device if self._open.counted is None else self._open.counted[0].device)
        header = self._reduced(form) if self.groups.is_last_stage else form
        sums, maxima = pack(header)
        numbers = broadcast(torch.cat([sums, maxima]), group_size(self.groups.pp) - 1, self.groups.pp)
        ended = unpack(header, (numbers[: len(sums)], numbers[len(sums) :]))
        result = StepResult(
            config=self.config,
            header=ended.batch,  # type: ignore[arg-type]
            loss=self.loss,
            allow_zero_log_probs=self.allow_zero_log_probs,
            step=ended,
        )
        if result.misuse is not None:
            raise StepError(result.misuse.words if result.misuse is not Misuse.REFUSED_LOSS else self._refusal())
        if self._open.step is not None:
            self._open.step.plan.progress.steps_ended += 1
        self.since_plan.append(result)
        self._ended, self._open = result, OpenStep()
        return result

    def reset(self) -> None:
        """Forget the micro-batches since the last step ended."""
        self._open, self._scaled = OpenStep(), None

    @property
    def num_sequences(self) -> int:
        """Sequences that were counted since the last step ended."""
        return self._open.sequences

    @property
    def is_pending(self) -> bool:
        """Whether micro-batches were counted that no ``finish`` has ended."""
        return self._open.micro_batches > 0

    @property
    def last(self) -> StepResult | None:
        """The step that ended last."""
        return self._ended

    def last_whole(self, name: str) -> StepResult:
        """The step that ended last, for a user's call of this name.

        Raises:
            StepError: there is none, or micro-batches were counted since.
        """
        if self._ended is None or self.is_pending:
            raise StepError(
                f"{name} before finish_step(): end every step, as wrap_finalize(correction) does as the "
                "finalize_model_grads_func of Megatron's config"
            )
        return self._ended

    def end_with(self, finalize: Callable[..., object]) -> None:
        """Let this function end the steps, as long as somebody keeps it to call it."""
        self._ends.add(finalize)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """While a schedule's end is under way, which comes once.

        Raises:
            StepError: it is under way already, on every rank alike.
        """
        if self._is_ending:
            raise StepError("wrap_finalize() inside another of the same correction: wrap Megatron's function once")
        self._is_ending = self._has_ended = True
        try:
            yield
        finally:
            self._is_ending = False

    def note_scaled(self, model: Sequence[Any]) -> None:
        """The gradients of these model chunks have been scaled: nothing may be added to them before they are zeroed."""
        self._scaled = ScaledGradients(model)

    def _form(self, device: torch.device) -> StepHeader[Tensor]:
        """The header of a step in which nothing was counted: its form is the one of every rank."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return StepHeader(
            batch=empty_header(self.config, of_one_step(self.agreed), device) if self.config.corrects_in_loss else None,
            loss=LossStatistics.nothing(device),
            counted=Counted(zero, zero, zero, zero, zero, zero),
            misuse=zero,
            factor=zero + 1,
        )

    def _reduced(self, form: StepHeader[Tensor]) -> StepHeader[Tensor]:
        """The header of the step that ends, over all ranks of the last stage."""
        opened = self._open
        local, misuse = opened.header(form)
        local = dataclasses.replace(local, misuse=form.misuse + misuse)
        header = unpack(local, reduce_batch(pack(local), self.groups))
        found = self._found(header)
        header = dataclasses.replace(header, misuse=torch.where(header.misuse == 0, found, header.misuse))
        step = opened.step
        if step is None or header.batch is None or not isinstance(step.plan, InLossPlan) or step.plan.counts is None:
            return header
        # The plan found these, and the other stages did not see them.
        out_of_range = header.batch.data.out_of_range.clone()
        out_of_range[PER_SEQUENCE.index("mini_batch_ids")] += step.plan.counts.bad_ids
        data = dataclasses.replace(header.batch.data, out_of_range=out_of_range)
        batch = dataclasses.replace(header.batch, data=data)
        skip = TrainingResult(config=self.config, header=batch, loss=self.loss).skip[0]
        factor = step.plan.factor(batch, step.mini_batch)
        return dataclasses.replace(header, batch=batch, factor=torch.where(skip, 0.0, factor))

    def _found(self, header: StepHeader[Tensor]) -> Tensor:
        """0-D: the number of the mistake that the sums of all ranks show; 0 if there is none."""
        counted, step = header.counted, self._open.step
        is_short = counted.fewest == 0 if self.config.corrects_in_loss else (counted.fewest == 0) & (counted.most > 0)
        differs = counted.outside > 0
        if step is not None:
            differs = differs | _differs(header, step)
        found = torch.where(differs, float(Misuse.OTHER_TOKENS), 0.0)
        found = torch.where(counted.strangers > 0, float(Misuse.OTHER_MINI_BATCH), found)
        return torch.where(is_short, float(Misuse.NO_MICRO_BATCH), found)

    def _refusal(self) -> str:
        """The message of the loss that was refused, equal on every rank: all of them know by now that one was.

        Collectives: one gather of the message over ``dp_cp`` on the last stage, then one over ``pp``.
        """
        text = first_text(self._open.refused, self.groups.dp_cp) if self.groups.is_last_stage else None
        return f"{Misuse.REFUSED_LOSS.words}: {first_text(text, self.groups.pp)}"


def _differs(header: StepHeader[Tensor], step: PlannedStep) -> Tensor:
    """0-D bool: the step counted other tokens, or other weights, than its mini-batch has in the plan."""
    counted, plan = header.counted, step.plan
    if isinstance(plan, DecoupledPlan):
        accepted, weights = plan.accepted(step.mini_batch)
        # True for NaN.
        return (counted.tokens != accepted) | ~((counted.weights - weights).abs() <= _TOLERANCE * weights)
    if not isinstance(plan, InLossPlan) or plan.counts is None or header.batch is None:
        return counted.tokens < 0
    tokens: Tensor = header.batch.denominators.counts[0, 0]
    if plan.config.bad_log_probs == "reject_token":
        # Bad tokens are not counted under the mask; the plan does not know them.
        tokens = tokens + header.batch.data.bad_tokens
    # Mini-batch ids out of range are an error of their own, and moved tokens to other mini-batches.
    return (tokens != plan.counts.tokens[step.mini_batch]) & (plan.counts.bad_ids == 0)
