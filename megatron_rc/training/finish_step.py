"""The optimizer steps of a correction, one after the other: counting, refusing, ending."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_rc.batch.chain import empty_header, reduce_batch
from megatron_rc.correction.inputs import AgreedCounts
from megatron_rc.loss.metrics import LossStatistics
from megatron_rc.parallel.collectives import broadcast_record, first_text, pack, unpack
from megatron_rc.training.micro_batch import CorrectedMicroBatch, Counted
from megatron_rc.training.misuse import Misuse, StepError
from megatron_rc.training.optimizer_step import OpenStep, StepHeader, StepResult
from megatron_rc.training.plan import PlannedStep, Setup


class Steps:
    """The owner of the open step and of the result of the last one.

    Attributes:
        agreed: the counts of the newest plan, which the form of a step's header follows.
        ends: the functions that end steps, as long as somebody keeps them to call them.
        last: the step that ended last.
        since_plan: the steps that have ended since the newest plan was made, on every stage.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup, self.groups = setup, setup.groups
        self.agreed = AgreedCounts()
        self.last: StepResult | None = None
        self.since_plan: list[StepResult] = []
        self._open = OpenStep()
        self._scaled: list[
            tuple[Any, int | None]
        ] = []  # parameters with scaled gradients, and these gradients' versions
        self.ends: weakref.WeakSet[Callable[..., object]] = weakref.WeakSet()
        self._is_ending = self._has_ended = False

    def check_ready(self) -> None:
        """Raise if no step may begin that the loss corrects: nothing would end it, or nothing ended the one before.

        Only the last stage sees the latter, because the others see no loss.
        """
        if not self.setup.corrects_in_loss:
            return
        if not self.ends:
            raise ValueError(
                "no step will be ended, and its gradients not be scaled: before the schedule set "
                "finalize_model_grads_func=wrap_finalize(correction) in Megatron's config, on every pipeline stage"
            )
        if not self._has_ended and self._open.holds_steps(1):
            raise StepError(
                "a schedule has run, and nothing has ended its step or scaled its gradients: before it, set "
                "finalize_model_grads_func=wrap_finalize(correction) in this model's config, on every pipeline stage"
            )

    def check_goes_on(self, step: PlannedStep) -> None:
        """Raise StepError unless this step goes on or begins."""
        if self._open.step is not None and not self._open.is_of(step):
            raise StepError(
                f"mini_batch={step.mini_batch} in the step of mini-batch {self._open.step.mini_batch}: call "
                "finish_step() in between, or reset_step() if that step is given up"
            )

    def count(
        self,
        step: PlannedStep,
        found: CorrectedMicroBatch,
        counted: Counted[Tensor],
        statistics: LossStatistics | None = None,
    ) -> None:
        """Add a micro-batch to the open step: its correction, its tokens, the measures of its loss. Collectives: none.

        Raises StepError if two steps have been counted, and nothing has ever ended one.
        """
        if self.setup.corrects_in_loss and self._open.holds_steps(2) and not self._has_ended:
            raise StepError(Misuse.UNFINISHED.words)
        if self._open.micro_batches == 0:
            if any(_version(parameter) == version for parameter, version in self._scaled):
                self._open.found.add(Misuse.SCALED_BEFORE)
            self._scaled = []
        zero = torch.zeros_like(counted.tokens)
        statistics = statistics or LossStatistics.nothing(zero.device)
        header = StepHeader(found.header, statistics, counted, misuse=zero, factor=zero)
        self._open.count(step, header, len(found.sequence_lengths))

    def compare_divisor(self, num_tokens: int | None) -> None:
        """Note a step whose losses expect another divisor than these tokens, or than none. Collectives: none."""
        if self._open.step is not None and self._open.step.total_tokens != num_tokens:
            self._open.found.add(Misuse.OTHER_DIVISOR)

    def refuse(self, message: str) -> None:
        """Note that a loss could not be made, for ``finish`` to raise on every rank alike. Collectives: none."""
        self._open.found.add(Misuse.REFUSED_LOSS)
        self._open.refused = self._open.refused or message

    def finish(self, device: torch.device) -> StepResult:
        """End a step: see :meth:`RolloutCorrection.finish_step`."""
        header = self._form(device if self._open.sums is None else self._open.sums[0].device)
        if self.groups.is_last_stage:
            header = self._reduced(header)
        ended = broadcast_record(header, self.groups.pp)
        config, loss, allows = self.setup.config, self.setup.loss, self.setup.allow_zero_log_probs
        batch: Any = ended.batch
        result = StepResult(config=config, header=batch, loss=loss, allow_zero_log_probs=allows, step=ended)
        if result.misuse is not None:
            raise StepError(result.misuse.words if result.misuse is not Misuse.REFUSED_LOSS else self._refusal())
        if self._open.step is not None:
            self._open.step.plan.progress.steps_ended += 1
        self.since_plan.append(result)
        self.last, self._open = result, OpenStep()
        return result

    def reset(self) -> None:
        """Forget the micro-batches since the last step ended."""
        self._open, self._scaled = OpenStep(), []

    @property
    def num_sequences(self) -> int:
        """Sequences that were counted since the last step ended."""
        return self._open.sequences

    @property
    def is_pending(self) -> bool:
        """Whether micro-batches were counted that no ``finish`` has ended."""
        return self._open.micro_batches > 0

    def last_whole(self, name: str) -> StepResult:
        """The step that ended last, for a user's call of this name; StepError if none did, or another has begun."""
        if self.last is None or self.is_pending:
            raise StepError(
                f"{name} before finish_step(): end every step, as wrap_finalize(correction) does as the "
                "finalize_model_grads_func of Megatron's config"
            )
        return self.last

    @contextmanager
    def ending(self) -> Iterator[None]:
        """The end of a schedule; StepError within another one, on every rank alike."""
        if self._is_ending:
            raise StepError("wrap_finalize() inside another of the same correction: wrap Megatron's function once")
        self._is_ending = self._has_ended = True
        try:
            yield
        finally:
            self._is_ending = False

    def note_scaled(self, model: Sequence[Any]) -> None:
        """The gradients of these model chunks have been scaled: nothing may be added to them before they are zeroed."""
        firsts = (next((one for one in chunk.parameters() if _version(one) is not None), None) for chunk in model)
        self._scaled = [(one, _version(one)) for one in firsts if one is not None]

    def _form(self, device: torch.device) -> StepHeader[Tensor]:
        """The header of a step in which nothing was counted: its form is the one of every rank."""
        in_loss = self.setup.corrects_in_loss
        batch = empty_header(self.setup.config, self.agreed.one_step, device) if in_loss else None
        zero = torch.zeros((), dtype=torch.float64, device=device)
        counted = Counted(zero, zero, zero, zero, zero, zero)
        return StepHeader(batch, LossStatistics.nothing(device), counted, misuse=zero, factor=zero + 1)

    def _reduced(self, form: StepHeader[Tensor]) -> StepHeader[Tensor]:
        """The header of the step that ends, over all ranks of the last stage."""
        local, step = self._open.header(form), self._open.step
        header = unpack(local, reduce_batch(pack(local), self.groups))
        counted, batch, factor = header.counted, header.batch, header.factor
        differs = counted.outside > 0
        if step is not None:
            batch, others, factor = step.plan.ended(batch, counted, step.mini_batch)
            differs = differs | others
        is_short = (counted.fewest == 0) & (counted.most > 0 if batch is None else counted.most >= 0)
        misuse = torch.where(differs, float(Misuse.OTHER_TOKENS), 0.0)
        misuse = torch.where(counted.strangers > 0, float(Misuse.OTHER_MINI_BATCH), misuse)
        misuse = torch.where(is_short, float(Misuse.NO_MICRO_BATCH), misuse)
        misuse = torch.where(header.misuse == 0, misuse, header.misuse)
        return dataclasses.replace(header, batch=batch, misuse=misuse, factor=factor)

    def _refusal(self) -> str:
        """The message of the refused loss, on every rank. Collectives: a gather over ``dp_cp``, one over ``pp``."""
        text = first_text(self._open.refused, self.groups.dp_cp) if self.groups.is_last_stage else None
        return f"{Misuse.REFUSED_LOSS.words}: {first_text(text, self.groups.pp)}"


def _version(parameter: Any) -> int | None:
    """The version of a parameter's gradient, which rises with each write in place; None without a gradient."""
    main = getattr(parameter, "main_grad", None)  # Megatron's buffer
    gradient = parameter.grad if main is None else main
    return None if gradient is None else gradient._version
