"""What a correction gives: weights and mask of the local tokens, and what is known of the whole batch.

``docs/design.md`` begins with the words and symbols that are used here.
"""

from __future__ import annotations

import functools

from torch import Tensor

from megatron_rc.correction.checks.bad_tokens import describe_bad_token
from megatron_rc.correction.checks.shift import find_lag
from megatron_rc.correction.distributions import derive_distributions
from megatron_rc.correction.header import HeaderFields
from megatron_rc.correction.header_records import BatchHeader
from megatron_rc.correction.histogram import Distribution
from megatron_rc.correction.metrics import derive_metrics
from megatron_rc.numerics import MAX_ZERO_LOG_PROBS
from megatron_rc.settings.config import RolloutCorrectionConfig

_SIDES = {
    "sequence_ids": "lie in [0, 2²¹)",
    "mini_batch_ids": "lie in [0, num_mini_batches)",
    "group_ids": "lie in [0, num_groups)",
    "policy_versions": "be at most current_version",
    "advantages": "be finite",
    "rewards": "be finite",
}


class CorrectionResult:
    """Weights and mask of the local tokens, and what is known of the whole batch.

    Attributes:
        weights: like ``response_mask`` (a list if that was one): detached importance weights, 0 where the mask is, or
            None where no weights are asked for (and on pipeline stages without log-probs).
        mask: likewise, bool: the accepted tokens m'; None on pipeline stages without log-probs.
        sequence_lengths: [n] float64: tokens of each local sequence in the loss's denominator; None likewise.
        header: 1-D float64, the global sums and maxima that everything else is read from.
        fields: what lies where in it.
        allow_zero_log_probs: ``check()`` takes sequences whose rollout log-probs sum to exactly 0.
    """

    def __init__(
        self,
        config: RolloutCorrectionConfig,
        fields: HeaderFields,
        header: Tensor,
        *,
        weights: Tensor | list[Tensor] | None = None,
        mask: Tensor | list[Tensor] | None = None,
        sequence_lengths: Tensor | None = None,
        allow_zero_log_probs: bool = False,
    ) -> None:
        self.config = config
        self.fields = fields
        self.header = header
        self.weights = weights
        self.mask = mask
        self.sequence_lengths = sequence_lengths
        self.allow_zero_log_probs = allow_zero_log_probs
        self._host: BatchHeader | None = None

    @property
    def denominators(self) -> Tensor:
        """[num_mini_batches, 4] float64: tokens and sequences under the response mask, then under m'."""
        return self.fields.column(self.header, "mini_batches")

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
            ValueError: a log-prob at a trained position is NaN, infinite or positive (unless ``bad_log_probs`` rejects
                those): names the policy, the lowest sample and position, and how many there are. Ids, versions, rewards
                or advantages out of range. Rollout log-probs whose sum is exactly 0 over more than 8 trained tokens of
                a sequence (unless ``allow_zero_log_probs``), or that are shifted by one position.
        """
        data = self.on_host().data
        for name, remedy in _SIDES.items():
            count = getattr(data, name)
            if count:
                raise ValueError(f"{name}: {count:.0f} values of the batch are out of range, all must {remedy}")
        if self.config.bad_log_probs == "error" and data.bad_tokens:
            raise ValueError(describe_bad_token(data.first_bad_key, data.bad_tokens, bool(data.default_ids)))
        if data.zero_log_probs and not self.allow_zero_log_probs:
            raise ValueError(
                f"rollout_log_probs: their sum is exactly 0 at the trained tokens of {data.zero_log_probs:.0f} "
                f"sequences of more than {MAX_ZERO_LOG_PROBS} such tokens, as where the engine returned none and all "
                "are 0: ask it for log-probs; if they are right (greedy sampling), pass allow_zero_log_probs=True"
            )
        lag = find_lag(self.on_host().shift)
        if lag:
            raise ValueError(
                f"the rollout log-probs are shifted by {lag:+d} position against the training "
                "log-probs: align both to the label tokens (labels = tokens shifted left by one, before any sharding)"
            )

    def metrics(self) -> dict[str, float]:
        """Metrics of the whole batch, equal on every rank; see ``docs/metrics.md``. Raises no data error."""
        return derive_metrics(self.on_host(), self.config)

    def distributions(self) -> dict[str, Distribution]:
        """Of log ρ and of the weights over the whole batch, for histograms; equal on every rank. Raises no data error.

        Host synchronisations: one, shared with ``metrics()``.
        """
        return derive_distributions(self.on_host(), self.config)

    def denominators_on_host(self) -> list[list[float]]:
        """``denominators`` as Python floats, from the same host synchronisation as ``check()``."""
        return self.on_host().mini_batches

    def on_host(self) -> BatchHeader:
        """The header on the host: the one synchronisation, made once."""
        if self._host is None:
            self._host = self.fields.read(self.values)
        return self._host

    @functools.cached_property
    def values(self) -> list[float]:
        """The header's numbers on the host."""
        values: list[float] = self.header.tolist()
        return values
