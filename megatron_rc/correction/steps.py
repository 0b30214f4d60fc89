"""The optimizer steps of a correction, one after the other: what they count, how they end, and in which order."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_rc.correction.header import NO_FIELDS, HeaderFields, step_fields
from megatron_rc.correction.joined import KeptTokens, step_sums
from megatron_rc.correction.misuse import Misuse, StepError
from megatron_rc.correction.mode import Mode
from megatron_rc.correction.plans import PlannedStep
from megatron_rc.correction.scaled_gradients import ScaledGradients
from megatron_rc.correction.stages import reduce_batch
from megatron_rc.correction.step import StepResult, StepSums
from megatron_rc.loss.metrics import LossStatistics
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.parallel.collectives import broadcast, first_text
from megatron_rc.parallel.groups import ParallelGroups, group_size
from megatron_rc.settings.config import RolloutCorrectionConfig


class Steps:
    """What was counted since the last step ended, and what is known of that one.

    Args:
        config: what is corrected.
        loss: the objective.
        groups: ``dp_cp`` carries the reductions of the last stage, ``pp`` their result to the other stages.
        mode: what a step reduces besides what its losses measured, and its factor.
        allow_zero_log_probs: as :func:`correct_rollouts` has it.
    """

    def __init__(
        self,
        config: RolloutCorrectionConfig,
        loss: PolicyLossConfig,
        groups: ParallelGroups,
        mode: Mode,
        *,
        allow_zero_log_probs: bool,
    ) -> None:
        self.config, self.loss, self.groups, self.mode = config, loss, groups, mode
        self.allow_zero_log_probs = allow_zero_log_probs
        self._open = StepSums()
        self._ended: StepResult | None = None
        self._scaled: ScaledGradients | None = None
        self._ends: weakref.WeakSet[Callable[..., None]] = weakref.WeakSet()
        self._is_ending = self._has_ended = False

    def check_ready(self) -> None:
        """Raise where no step may begin that the loss corrects; called when its scale is asked for.

        Raises:
            ValueError: nothing would end it, which every stage sees.
            StepError: a whole step was counted, and nothing has ever ended one, which the last stage sees alone: the
                others see no loss.
        """
        if not self.mode.needs_steps:
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
                "finish_step() in between, or reset_step() where that step is given up"
            )

    def count(self, step: PlannedStep, tokens: KeptTokens | None, strangers: Tensor | None = None) -> None:
        """Add a micro-batch to what ``finish`` reduces. Collectives: none.

        Args:
            step: that it is counted for.
            tokens: what it adds to the correction's sums; None where the plan has them.
            strangers: 0-D, how many of its sequences are of another mini-batch; None where it does not say.

        Raises:
            StepError: two steps have been counted, and nothing has ever ended one.
        """
        if self.mode.needs_steps and self._open.holds_steps(2) and not self._has_ended:
            raise StepError(Misuse.UNFINISHED.words)
        if self._open.micro_batches == 0 and self._scaled is not None:
            if self._scaled.are_untouched:
                self._open.found.add(Misuse.SCALED_BEFORE)
            self._scaled = None
        self._open.count(step, tokens, strangers)

    def record(self, statistics: LossStatistics) -> None:
        """Add what the loss measured of one micro-batch to what ``finish`` reduces. Collectives: none."""
        self._open.record(statistics)

    def refuse(self, message: str) -> None:
        """Note that a loss could not be made, for ``finish`` to raise on every rank alike. Collectives: none."""
        self._open.found.add(Misuse.REFUSED_LOSS)
        self._open.refused = self._open.refused or message

    def finish(self, device: torch.device) -> StepResult:
        """End a step: see :meth:`RolloutCorrection.finish_step`."""
        fields = step_fields(self.mode.step_fields())
        if self.groups.is_last_stage:
            header = self._reduced(fields, device)
        else:
            header = torch.zeros(len(fields), dtype=torch.float64, device=device)
        header = broadcast(header, group_size(self.groups.pp) - 1, self.groups.pp)
        result = self._result(fields, header)
        if result.misuse is not None:
            raise StepError(result.misuse.words if result.misuse is not Misuse.REFUSED_LOSS else self._refusal())
        self.mode.note_end(self._open, result)
        self._ended, self._open = result, StepSums()
        return result

    def reset(self) -> None:
        """Forget what was counted since the last step ended."""
        self._open, self._scaled = StepSums(), None

    @property
    def is_pending(self) -> bool:
        """Whether micro-batches were counted that no ``finish`` has ended."""
        return self._open.micro_batches > 0

    @property
    def last(self) -> StepResult | None:
        """The step that ended last."""
        return self._ended

    def last_whole(self, name: str) -> StepResult:
        """The step that ended last, for what the user calls so.

        Raises:
            StepError: there is none, or micro-batches were counted since.
        """
        if self._ended is None or self.is_pending:
            raise StepError(
                f"{name} before finish_step(): end every step, as wrap_finalize(correction) does as the "
                "finalize_model_grads_func of Megatron's config"
            )
        return self._ended

    def end_with(self, finalize: Callable[..., None]) -> None:
        """This function will end the steps, as long as somebody keeps it to call it."""
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

    def _reduced(self, fields: HeaderFields, device: torch.device) -> Tensor:
        """The header of the step that ends."""
        opened, known = self._open, self.mode.step_fields() or NO_FIELDS
        misuse = opened.misuse(needs_micro_batches=self.mode.needs_steps)
        sums, maxima = step_sums(opened.tokens) if opened.tokens else (None, None)
        measured = opened.statistics or LossStatistics.nothing(device if sums is None else sums.device)
        if sums is None or maxima is None or len(sums) != known.num_sums:
            misuse = misuse if sums is None else max(misuse, Misuse.OTHER_PLAN)
            sums = measured.sums.new_zeros(known.num_sums)
            maxima = measured.sums.new_full((known.num_maxima,), -torch.inf)
        codes = measured.sums.new_full((1,), float(misuse))
        if opened.strangers is not None:
            codes = torch.where(opened.strangers > 0, codes.clamp(min=float(Misuse.OTHER_MINI_BATCH)), codes)
        pair = torch.cat([sums, measured.sums]), torch.cat([maxima, measured.maxima, codes])
        header = torch.cat([*reduce_batch(pair, self.groups), codes])
        header[-1] = self.mode.factor(opened, self._result(fields, header))
        return header

    def _result(self, fields: HeaderFields, header: Tensor) -> StepResult:
        return StepResult(self.config, self.loss, fields, header, allow_zero_log_probs=self.allow_zero_log_probs)

    def _refusal(self) -> str:
        """What the loss said that was refused, equal on every rank: all of them know by now that one was.

        Collectives: one gather of the message over ``dp_cp`` on the last stage, then one over ``pp``.
        """
        text = first_text(self._open.refused, self.groups.dp_cp) if self.groups.is_last_stage else None
        return f"{Misuse.REFUSED_LOSS.words}: {first_text(text, self.groups.pp)}"
