"""The result of a correction: weights and mask of the local tokens, and the numbers of the whole batch."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import Tensor

from megatron_rc.measures.data import check_data
from megatron_rc.measures.header import BatchHeader
from megatron_rc.measures.histogram import Distribution, derive_distributions
from megatron_rc.measures.metrics import sequence_eff_sample_size
from megatron_rc.measures.table import derive_metrics
from megatron_rc.parallel.collectives import on_host
from megatron_rc.settings.config import RolloutCorrectionConfig


@dataclass(frozen=True, eq=False)
class CorrectionResult:
    """Weights and mask of the local tokens, and the numbers of the whole batch.

    Weights, mask and lengths are None on pipeline stages without log-probs.

    Attributes:
        config: the correction.
        header: the numbers of the whole batch, on the device; equal on every rank.
        weights: like ``response_mask`` (a list if that was one): the importance weights of the loss, detached, 0
            outside of the mask. None if the config applies none (also bypass ``ppo_clip``, whose ratio holds them).
        measured_weights: like ``weights``, also if the config measures weights and applies them to nothing.
        mask: like ``response_mask``, bool: the accepted tokens m'.
        sequence_lengths: [n] float64: tokens of each local sequence in the loss's denominator.
        allow_zero_log_probs: ``check()`` takes sequences whose rollout log-probs sum to exactly 0.
    """

    config: RolloutCorrectionConfig
    header: BatchHeader[Tensor]
    weights: Tensor | list[Tensor] | None = None
    measured_weights: Tensor | list[Tensor] | None = None
    mask: Tensor | list[Tensor] | None = None
    sequence_lengths: Tensor | None = None
    allow_zero_log_probs: bool = False

    @property
    def denominators(self) -> Tensor:
        """[num_mini_batches, 4] float64: tokens and sequences under the response mask, then under m'."""
        counts: Tensor = self.header.denominators.counts
        return counts

    @property
    def accepted_tokens(self) -> Tensor:
        """[num_mini_batches] float64: tokens under m'."""
        return self.denominators[:, 2]

    @property
    def skip(self) -> Tensor:
        """[num_mini_batches] bool: no token is accepted, the optimizer step must not be made."""
        return self.accepted_tokens == 0

    def check(self) -> None:
        """Raise the same error on every rank if any rank held data that cannot be right.

        Host synchronisations: one, shared with ``metrics()``.

        Raises:
            ValueError: an unusable log-prob at a trained position (unless ``bad_log_probs`` rejects it): names the
                policy, the lowest sample and position, and how many there are. Ids, versions, rewards or advantages out
                of range. Rollout log-probs that are 0 in a whole sequence, or shifted by one position. A configuration
                that differs between ranks.
        """
        check_data(self.on_host, self.config, allow_zero_log_probs=self.allow_zero_log_probs)

    def metrics(self) -> dict[str, float]:
        """Metrics of the whole batch, equal on every rank; see ``docs/metrics.md``. Raises no data error."""
        return derive_metrics(self.on_host, self.config)

    def distributions(self) -> dict[str, Distribution]:
        """Histograms of log ρ and of the weights over the whole batch, equal on every rank. Raises no data error."""
        return derive_distributions(self.on_host, self.config)

    @property
    def sequence_eff_sample_size(self) -> float:
        """Share of the sequences that unbounded sequence weights leave, equal on every rank. Raises no data error."""
        return sequence_eff_sample_size(self.on_host)

    @functools.cached_property
    def on_host(self) -> BatchHeader[float]:
        """The header on the host: the one synchronisation, made once."""
        header: BatchHeader[float] = on_host(self.header)
        return header
