"""Sums over the tokens of each sequence, from which verdicts, weights and denominators of whole sequences follow."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.correction.tokens import TokenDecisions, Tokens, bounded_weights
from megatron_rc.numerics import exp_ratio, numbers
from megatron_rc.parallel.collectives import largest, smallest
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.criterion import SequenceValues


@dataclass(frozen=True)
class BlockSequences:
    """The sequences of a block, over which its tokens are added up: [n] each, as wide as the tokens or wider."""

    lengths: Tensor | None = None  # [n] int64, tokens of each sequence of a flat block; None for a block [n, length]

    def sum(self, values: Tensor) -> Tensor:
        """Sums to a relative 1e-6: torch adds float32 numbers pairwise, and in vectors if compiled."""
        return values.sum(1) if self.lengths is None else self._segments(values, "sum")

    def exact_sum(self, values: Tensor) -> Tensor:
        """Sums with every addition in float64."""
        return values.sum(1, dtype=torch.float64) if self.lengths is None else self._segments(values, "sum")

    def count(self, flags: Tensor) -> Tensor:
        """How many flags are True."""
        return numbers(flags).sum(1, dtype=torch.int32) if self.lengths is None else self._segments(flags, "sum")

    def largest(self, values: Tensor, absent: Tensor) -> Tensor:
        """The largest value that is not absent; -inf without one."""
        values = values - absent
        return values.amax(1) if self.lengths is None else self._segments(values, "max")

    def smallest(self, values: Tensor, absent: Tensor) -> Tensor:
        """The smallest value that is not absent; +inf without one."""
        values = values + absent
        return values.amin(1) if self.lengths is None else self._segments(values, "min")

    def _segments(self, values: Tensor, how: str) -> Tensor:
        if not values.numel() and self.lengths is not None:
            return values.new_full(self.lengths.shape, {"sum": 0.0, "max": -torch.inf, "min": torch.inf}[how]).double()
        return torch.segment_reduce(values.double(), how, lengths=self.lengths, unsafe=True)


@dataclass(frozen=True)
class SequenceSums:
    """Sums over the tokens of each sequence, [n] float64."""

    response: Tensor  # tokens of the response mask
    valid: Tensor  # valid tokens
    train: Tensor  # Σ log π_train over valid tokens, every addition in float64
    rollout: Tensor  # Σ log π_rollout over valid tokens, every addition in float64
    weight: Tensor | None  # Σ w over valid tokens; None, like kept_weight, unless weights are token-level
    kept: Tensor  # tokens that all token-level criteria accept
    kept_weight: Tensor | None  # Σ w over kept tokens
    negative: Tensor | None  # valid tokens with A < 0; None, like the next two, unless a criterion spares the others
    kept_negative: Tensor | None  # kept tokens with A < 0
    kept_negative_weight: Tensor | None  # Σ w over kept tokens with A < 0; None unless weights are token-level
    vetoed: Tensor | None  # tokens below the veto's threshold; None without a veto
    older: tuple[Tensor, ...]  # for each step of the staleness scale, the valid tokens that reach it
    needs: dict[str, Tensor]  # Σ x over valid tokens, of each sum that a criterion needs, every addition in float64
    maxima: dict[str, Tensor] = largest()  # of each need: the largest x of a valid token
    minima: dict[str, Tensor] = smallest()  # of each need: the smallest x of a valid token

    @property
    def num_tokens(self) -> Tensor:
        """Valid tokens, at least 1."""
        return self.valid.clamp(min=1)

    @property
    def log_ratio(self) -> Tensor:
        """Σ log ρ_t over valid tokens."""
        return self.train - self.rollout

    @property
    def mean_log_ratio(self) -> Tensor:
        """The mean of log ρ_t over valid tokens."""
        return self.log_ratio / self.num_tokens


def sum_tokens(
    tokens: Tokens, decisions: TokenDecisions, sequences: BlockSequences, config: RolloutCorrectionConfig
) -> SequenceSums:
    """The sums over the sequences of a block."""
    valid, kept, weights, level = decisions.valid, decisions.kept, decisions.weights, tokens.level
    negative = tokens.negative if any(criterion.only_negative for criterion in config.criteria) else None
    kept_negative = None if negative is None else kept & negative
    veto, steps = config.rollout_token_veto_threshold, config.staleness_scale.steps if config.staleness_scale else ()

    def count(flags: Tensor | None) -> Tensor | None:
        return None if flags is None else sequences.count(flags)

    def weight_of(chosen: Tensor | None) -> Tensor | None:
        return None if weights is None or chosen is None else sequences.sum(weights * numbers(chosen))

    def x_of(how: str) -> dict[str, Tensor]:
        # The sum of log ρ follows from the two log-probs.
        needs = [need for need in config.needs if need.how == how and need.name != "log_ratio"]
        return {need.name: decisions.values[need.divergence.name].double() for need in needs}

    return SequenceSums(
        response=sequences.count(tokens.mask),
        valid=sequences.count(valid),
        train=sequences.exact_sum(decisions.train),
        rollout=sequences.exact_sum(decisions.rollout),
        weight=None if weights is None else sequences.sum(weights),
        kept=sequences.count(kept),
        kept_weight=weight_of(kept),
        negative=count(None if negative is None else valid & negative),
        kept_negative=count(kept_negative),
        kept_negative_weight=weight_of(kept_negative),
        vetoed=count(None if veto is None else valid & (decisions.log_ratio < math.log(veto))),
        older=tuple(sequences.count(valid & (level > i)) for i in range(len(steps)) if level is not None),
        needs={name: sequences.exact_sum(x) for name, x in x_of("sum").items()},
        maxima={name: sequences.largest(x, decisions.absent) for name, x in x_of("max").items()},
        minima={name: sequences.smallest(x, decisions.absent) for name, x in x_of("min").items()},
    )


def statistics_of(sums: SequenceSums) -> SequenceValues:
    """The statistics of whole sequences."""
    values = {"log_ratio": sums.log_ratio, **sums.needs, **sums.maxima, **sums.minima}
    return SequenceValues(sums.num_tokens, torch.zeros_like(sums.valid), values)


def threshold_scale(sums: SequenceSums, config: RolloutCorrectionConfig) -> Tensor | None:
    """[n] float64: the factor of a whole sequence's bounds, in nats: the one of its oldest valid token."""
    if config.staleness_scale is None:
        return None
    reached = torch.stack([tokens > 0 for tokens in sums.older]).sum(0)
    return config.staleness_scale.of(reached, sums.valid.dtype)


def log_sequence_weights(sums: SequenceSums, config: RolloutCorrectionConfig) -> Tensor:
    """[n] float64: log of the unbounded weight that all tokens of a sequence share."""
    return config.level.of_sums(statistics_of(sums))  # type: ignore[union-attr,misc]


def sequence_weights(sums: SequenceSums, config: RolloutCorrectionConfig) -> Tensor | None:
    """[n] float64: the bounded weight that all tokens of a sequence share; None unless weights are of sequences."""
    if config.level is None or config.level.of_tokens:
        return None
    log_weights = log_sequence_weights(sums, config)
    return bounded_weights(exp_ratio(log_weights), log_weights, config, threshold_scale(sums, config))
