"""A result whose objective is known, so that steps which would train nothing are known too."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_rc.batch.result import CorrectionResult
from megatron_rc.loss.policy import PolicyLossConfig


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingResult(CorrectionResult):
    """A result whose objective is known, and so which optimizer steps would move the model by momentum alone."""

    loss: PolicyLossConfig

    @property
    def skip(self) -> Tensor:
        """[num_mini_batches] bool: no token is accepted, or none has a weight and the objective has no other term."""
        skip = super().skip
        return skip | (self.header.denominators.weights == 0) if self._needs_weights else skip

    def skips(self, mini_batch: int | None = None) -> bool:
        """``skip`` of one mini-batch on the host, from the synchronisation that ``check()`` makes."""
        counts = self.on_host.denominators.counts
        index = index_of(mini_batch, len(counts))
        return counts[index][2] == 0 or self._is_weightless[index]

    @property
    def num_weightless(self) -> float:
        """Mini-batches with accepted tokens of which none has a weight."""
        accepted = [counts[2] > 0 for counts in self.on_host.denominators.counts]
        return float(sum(one and other for one, other in zip(accepted, self._is_weightless, strict=True)))

    def metrics(self) -> dict[str, float]:
        """Metrics of the correction; with the mode ``mask`` also how many mini-batches have no weight left."""
        metrics = super().metrics()
        if self.config.may_weigh_nothing:
            metrics[f"{self.config.metric_prefix}rollout_is_weightless_mini_batches"] = self.num_weightless
        return metrics

    @property
    def _needs_weights(self) -> bool:
        """The loss has no term without weights."""
        return self.config.may_weigh_nothing and not (self.loss.entropy_coef or self.loss.kl_coef)

    @property
    def _is_weightless(self) -> list[bool]:
        return [self._needs_weights and weight == 0 for weight in self.on_host.denominators.weights]


def index_of(mini_batch: int | None, number: int) -> int:
    """The index of a mini-batch; ValueError if it is not there, or if none is named although there are several."""
    if mini_batch is None and number > 1:
        raise ValueError(f"the plan has {number} mini-batches: say which with mini_batch=")
    index = mini_batch or 0
    if not 0 <= index < number:
        raise ValueError(f"mini_batch={index} is not in [0, {number}) of the plan")
    return index
