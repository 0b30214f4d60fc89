"""The optimizer steps of a correction: the counts of a rank while one is open, refusing, ending, its numbers."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic

import torch
from torch import Tensor

from megatron_rc.batch.chain import BatchSums, empty_header, joined, reduce_batch
from megatron_rc.correction.denominators import N
from megatron_rc.correction.inputs import AgreedCounts
from megatron_rc.loss.metrics import MAXIMA, SUMS, LossStatistics, derive_loss_metrics
from megatron_rc.measures.header import BatchHeader
from megatron_rc.parallel.collectives import broadcast_record, first_text, largest, merged, on_host, pack, unpack
from megatron_rc.training.micro_batch import CorrectedMicroBatch, Counted
from megatron_rc.training.misuse import Misuse, StepError
from megatron_rc.training.plan import PlannedStep, Setup, TrainingResult


@dataclass(frozen=True)
class StepHeader(Generic[N]):
    """All numbers of an optimizer step, or of a micro-batch of it."""

    batch: BatchHeader[N] | None  # the numbers of the correction, if it is made in the loss; else None
    loss: LossStatistics  # the measures of the losses
    counted: Counted[N]  # the tokens that they were made from
    misuse: N = largest()  # the number of the Misuse that any rank found; 0 without one
    factor: N = largest()  # the factor of the gradients


@dataclass
class OpenStep:
    """The counts of one rank since the last step ended."""

    step: PlannedStep | None = None  # whose denominator the losses were divided by; None before the first of them
    headers: list[StepHeader[Tensor]] = field(default_factory=list)  # of the micro-batches, without their corrections
    batches: dict[tuple[str, ...], list[BatchSums]] = field(default_factory=dict)  # made in the loss, by ``given``
    found: set[Misuse] = field(default_factory=set)  # the mistakes that are known already
    refused: str | None = None  # the message of a loss that was refused

    def is_of(self, step: PlannedStep) -> bool:
        """Whether this step, if it has begun, is that one."""
        return self.step is None or (self.step.plan is step.plan and self.step.mini_batch == step.mini_batch)

    def holds_steps(self, number: int) -> bool:
        """Whether the micro-batches of so many whole steps have been counted: one that failed leaves fewer."""
        wanted = None if self.step is None else self.step.num_microbatches
        return wanted is not None and len(self.headers) >= number * wanted

    def count(self, step: PlannedStep, header: StepHeader[Tensor], batch: BatchSums | None) -> None:
        """Add one micro-batch; corrections in the loss are measured together when the step ends."""
        if not self.is_of(step):
            self.found.add(Misuse.SEVERAL_STEPS)
        elif batch is not None:
            self.batches.setdefault(batch.local.shards.given, []).append(batch)
        self.step = self.step or step
        self.headers.append(header)

    def header(self, form: StepHeader[Tensor]) -> StepHeader[Tensor]:
        """The numbers of this rank, in the form that every rank's have."""
        found = set(self.found)
        if self.step is not None and self.step.num_microbatches not in (None, len(self.headers)):
            found.add(Misuse.UNFINISHED)
        header, batch, counted = form, form.batch, form.counted
        if self.batches:
            batch = merged([joined(each).header for each in self.batches.values()])
            if len(pack(batch)[0]) != len(pack(form.batch)[0]):
                found.add(Misuse.OTHER_PLAN)
                batch = form.batch
        if self.headers:
            header = merged(self.headers)
            number = torch.full_like(header.misuse, len(self.headers))
            counted = dataclasses.replace(header.counted, most=number, fewest=number)
        misuse = torch.full_like(form.misuse, max(found, default=0))
        return dataclasses.replace(header, batch=batch, counted=counted, misuse=misuse, factor=form.factor)


@dataclass(frozen=True, eq=False, kw_only=True)
class StepResult(TrainingResult):
    """An optimizer step that has ended, equal on every rank; ``header`` is None in decoupled mode: the plan has it."""

    step: StepHeader[Tensor]  # all numbers of the step, on the device

    @property
    def factor(self) -> Tensor:
        """0-D float64: the factor of the gradients; 0 if the step must be skipped."""
        return self.step.factor

    @property
    def misuse(self) -> Misuse | None:
        """The mistake that any rank found in the step; None without one."""
        number = self._step_on_host.misuse
        return list(Misuse)[int(number) - 1] if number > 0 else None

    @functools.cached_property
    def on_host(self) -> BatchHeader[float]:
        """The correction's numbers on the host, from the synchronisation that ends the step."""
        if self._step_on_host.batch is None:
            raise ValueError("the numbers of the correction are those of the plan in decoupled mode")
        return self._step_on_host.batch

    def loss_metrics(self) -> dict[str, float]:
        """Metrics of the loss."""
        ended = self._step_on_host
        sums, maxima = dict(zip(SUMS, ended.loss.sums, strict=True)), dict(zip(MAXIMA, ended.loss.maxima, strict=True))
        metrics = derive_loss_metrics(sums, maxima)
        # Each micro-batch was divided by D₀.
        return metrics | {"loss/total": metrics["loss/total"] * ended.factor}

    @functools.cached_property
    def _step_on_host(self) -> StepHeader[float]:
        """The one host synchronisation, made once."""
        step: StepHeader[float] = on_host(self.step)
        return step


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
        # Parameters with scaled gradients, and these gradients' versions.
        self._scaled: list[tuple[Any, int | None]] = []
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
        if not self._open.headers:
            if any(_version(parameter) == version for parameter, version in self._scaled):
                self._open.found.add(Misuse.SCALED_BEFORE)
            self._scaled = []
        zero = torch.zeros_like(counted.tokens)
        statistics = statistics or LossStatistics.nothing(zero.device)
        self._open.count(step, StepHeader(None, statistics, counted, misuse=zero, factor=zero), found.batch)

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
        header = self._form(self._open.headers[0].misuse.device if self._open.headers else device)
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
    def is_pending(self) -> bool:
        """Whether micro-batches were counted that no ``finish`` has ended."""
        return bool(self._open.headers)

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
