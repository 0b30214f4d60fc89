"""What the losses of one optimizer step add up to, and what is known of it when it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron_rc.correction.header import HeaderFields
from megatron_rc.correction.plans import PlannedStep
from megatron_rc.correction.stages import AcceptedTokens
from megatron_rc.correction.training_result import TrainingResult
from megatron_rc.loss.metrics import MAXIMA, SUMS, LossStatistics, derive_loss_metrics
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.settings.config import RolloutCorrectionConfig


class StepError(ValueError, RuntimeError):
    """A call at a time when it would train wrongly: wrong of the caller, and because of what was called before."""


NO_MICRO_BATCH, SCALED_BEFORE, OTHER_TOKENS, UNFINISHED, OTHER_PLAN, MIXED = range(1, 7)
_REMEDY = "zero the gradients and call reset_step() on every rank before a schedule is run again"
# What each number means. Every rank learns the highest one that any rank found; 0 is none.
MISUSES = (
    "",
    "finish_step() without a micro-batch: no loss of this step was run backward on some rank: make it with "
    "masked_loss() in a schedule that is not forward-only, or call in_loss()",
    "two schedules without an optimizer step and zeroed gradients in between: those of the one before were scaled "
    f"already; {_REMEDY}",
    "the tokens that this step has counted are not those of its mini-batch in the plan: a micro-batch is missing, or "
    "was counted twice (an evaluation with in_loss() and gradients on, or a schedule that failed and was run again); "
    f"{_REMEDY}",
    "a schedule started on sums that no step has finished (one failed, or finish_step() was not called): this step has "
    f"another number of micro-batches than num_microbatches of its LossScale; {_REMEDY}, and end each step with "
    "finish_step(), as wrap_finalize() does",
    "the losses of this step were given the scale of a plan whose max_staleness, or whether it has a current_version, "
    f"is not that of the newest plan: {_REMEDY}, with a scale of the newest plan",
    f"the losses of this step were given scales of several mini-batches or plans: {_REMEDY}, and end each step with "
    "finish_step(), as wrap_finalize() does",
)


@dataclass
class StepSums:
    """What one rank has counted since the last step ended.

    Attributes:
        step: what the losses were divided by; None before the first of them.
        tokens: of each micro-batch, where it was corrected in the loss: what the metrics are made of, once a step.
        statistics: what the losses measured.
        micro_batches: how many were counted.
        misuse: index into ``MISUSES``.
    """

    step: PlannedStep | None = None
    tokens: list[AcceptedTokens] = field(default_factory=list)
    statistics: LossStatistics | None = None
    micro_batches: int = 0
    misuse: int = 0

    def count(self, step: PlannedStep, tokens: AcceptedTokens | None) -> None:
        """Add one micro-batch."""
        if self.step is None:
            self.step = step
        if not self.is_of(step):
            self.misuse = max(self.misuse, MIXED)
        self.micro_batches += 1
        if tokens is not None:
            self.tokens.append(tokens)

    def record(self, statistics: LossStatistics) -> None:
        """Add what the loss of a micro-batch measured."""
        self.statistics = statistics if self.statistics is None else self.statistics.merge(statistics)

    def is_of(self, step: PlannedStep) -> bool:
        """Whether this step, if it has begun, is that one."""
        return self.step is None or (self.step.plan is step.plan and self.step.mini_batch == step.mini_batch)

    @property
    def holds_two_steps(self) -> bool:
        """Whether twice as many micro-batches have been counted as a step has: one that failed leaves fewer."""
        return self._wanted is not None and self.micro_batches >= 2 * self._wanted

    def found_misuse(self, *, needs_micro_batches: bool) -> int:
        """The index into ``MISUSES`` of what is wrong with a step that ends now."""
        if needs_micro_batches and not self.micro_batches:
            return NO_MICRO_BATCH
        return self.misuse if self._wanted in (None, self.micro_batches) else max(self.misuse, UNFINISHED)

    @property
    def _wanted(self) -> int | None:
        return None if self.step is None else self.step.num_microbatches


class StepResult(TrainingResult):
    """What is known of an optimizer step when it has ended, equal on every rank: its header is that of the step."""

    def __init__(
        self,
        config: RolloutCorrectionConfig,
        loss: PolicyLossConfig,
        fields: HeaderFields,
        header: Tensor,
        *,
        allow_zero_log_probs: bool = False,
    ) -> None:
        super().__init__(config, fields, header, allow_zero_log_probs=allow_zero_log_probs)
        self.loss = loss

    @property
    def factor(self) -> Tensor:
        """0-D float64: what the gradients were to be multiplied by; 0 where the step must be skipped."""
        return self.header[-1]

    def check_order(self) -> None:
        """Raise StepError on every rank if what was counted on any of them is not one whole step."""
        (misuse,) = self.fields.table(self.values, "misuse")
        if misuse > 0:
            raise StepError(MISUSES[int(misuse)])

    def loss_metrics(self) -> dict[str, float]:
        """Metrics of the loss."""
        sums, maxima = (self.fields.table(self.values, name) for name in ("loss_sums", "loss_maxima"))
        metrics = derive_loss_metrics(dict(zip(SUMS, sums, strict=True)), dict(zip(MAXIMA, maxima, strict=True)))
        # Each micro-batch was divided by D₀.
        (factor,) = self.fields.table(self.values, "factor")
        return metrics | {"loss/total": metrics["loss/total"] * factor}


class ScaledGradients:
    """Gradients of a model that were multiplied by their step's factor, and must be zeroed before more is added.

    Whether that was done is seen by the version that torch counts for every tensor that is written in place.
    """

    def __init__(self, model: Sequence[Any]) -> None:
        firsts = (_first_with_gradient(chunk) for chunk in model)
        self._versions = [(one, _gradient(one)._version) for one in firsts if one is not None]

    @property
    def are_untouched(self) -> bool:
        """Whether nothing has been written to them since."""
        found = ((_gradient(parameter), version) for parameter, version in self._versions)
        return any(gradient is not None and gradient._version == version for gradient, version in found)


def _gradient(parameter: Any) -> Any:
    """Where Megatron's DDP adds it up, or torch's own."""
    main = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main


def _first_with_gradient(chunk: Any) -> Any:
    return next((parameter for parameter in chunk.parameters() if _gradient(parameter) is not None), None)
