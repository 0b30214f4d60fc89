"""What the losses of one optimizer step add up to, and what is known of it when it has ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from megatron_rc.correction.header import HeaderFields
from megatron_rc.correction.joined import KeptTokens
from megatron_rc.correction.misuse import Misuse
from megatron_rc.correction.plans import PlannedStep
from megatron_rc.correction.training_result import TrainingResult
from megatron_rc.loss.metrics import MAXIMA, SUMS, LossStatistics, derive_loss_metrics
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.settings.config import RolloutCorrectionConfig


@dataclass
class StepSums:
    """What one rank has counted since the last step ended.

    Attributes:
        step: what the losses were divided by; None before the first of them.
        tokens: of each micro-batch, where it was corrected in the loss: what the metrics are made of, once a step.
        statistics: what the losses measured.
        micro_batches: how many were counted.
        found: what is known already to be wrong.
        strangers: 0-D, sequences of another mini-batch than the step's; None where no micro-batch says whose it is.
        refused: what a loss said that was not made.
    """

    step: PlannedStep | None = None
    tokens: list[KeptTokens] = field(default_factory=list)
    statistics: LossStatistics | None = None
    micro_batches: int = 0
    found: set[Misuse] = field(default_factory=set)
    strangers: Tensor | None = None
    refused: str | None = None

    def count(self, step: PlannedStep, tokens: KeptTokens | None, strangers: Tensor | None = None) -> None:
        """Add one micro-batch."""
        if self.step is None:
            self.step = step
        if not self.is_of(step):
            self.found.add(Misuse.SEVERAL_STEPS)
        self.micro_batches += 1
        if tokens is not None:
            self.tokens.append(tokens)
        if strangers is not None:
            self.strangers = strangers if self.strangers is None else self.strangers + strangers

    def record(self, statistics: LossStatistics) -> None:
        """Add what the loss of a micro-batch measured."""
        self.statistics = statistics if self.statistics is None else self.statistics.merge(statistics)

    def is_of(self, step: PlannedStep) -> bool:
        """Whether this step, if it has begun, is that one."""
        return self.step is None or (self.step.plan is step.plan and self.step.mini_batch == step.mini_batch)

    def holds_steps(self, number: int) -> bool:
        """Whether the micro-batches of so many whole steps have been counted: one that failed leaves fewer."""
        return self._wanted is not None and self.micro_batches >= number * self._wanted

    def misuse(self, *, needs_micro_batches: bool) -> int:
        """The number of what is wrong with a step that ends now, or 0."""
        found = set(self.found)
        if needs_micro_batches and not self.micro_batches:
            found.add(Misuse.NO_MICRO_BATCH)
        if self._wanted not in (None, self.micro_batches):
            found.add(Misuse.UNFINISHED)
        if not all(kept.is_unchanged for kept in self.tokens):
            found.add(Misuse.WRITTEN_TO)
        return max(found, default=0)

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

    @property
    def misuse(self) -> Misuse | None:
        """What any rank found wrong with what was counted."""
        (number,) = self.fields.table(self.values, "misuse")
        return list(Misuse)[int(number) - 1] if number > 0 else None

    def loss_metrics(self) -> dict[str, float]:
        """Metrics of the loss."""
        sums, maxima = (self.fields.table(self.values, name) for name in ("loss_sums", "loss_maxima"))
        metrics = derive_loss_metrics(dict(zip(SUMS, sums, strict=True)), dict(zip(MAXIMA, maxima, strict=True)))
        # Each micro-batch was divided by D₀.
        (factor,) = self.fields.table(self.values, "factor")
        return metrics | {"loss/total": metrics["loss/total"] * factor}
