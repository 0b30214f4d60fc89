"""Sums over the tokens of each sequence, from which verdicts, weights and denominators of whole sequences follow."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.correction.tokens import Runs, TokenDecisions, Tokens
from megatron_rc.correction.weights import bounded_weights
from megatron_rc.numerics import exp_ratio, numbers
from megatron_rc.parallel.collectives import largest
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.criterion import Divergence, Need


@dataclass(frozen=True)
class SequenceSums:
    """Sums over the tokens of each sequence: [n] float64 (of a block: of each run, and as wide as its tokens).

    Attributes:
        response: tokens of the response mask.
        valid: valid tokens.
        train: Σ log π_train over valid tokens, every addition in float64.
        rollout: Σ log π_rollout over valid tokens, every addition in float64.
        weight: Σ w over valid tokens; None, like ``kept_weight``, unless weights are token-level.
        kept: tokens that all token-level criteria accept.
        kept_weight: Σ w over kept tokens.
        negative: valid tokens with A < 0; None, like the two below, unless a criterion spares the others.
        kept_negative: kept tokens with A < 0.
        kept_negative_weight: Σ w over them; None unless weights are token-level.
        vetoed: tokens below the veto's threshold; None without a veto.
        older: for each step of the staleness scale, the valid tokens that reach it.
        needs: for each sum that a criterion needs, Σ x over valid tokens, every addition in float64.
        extremes: for each extreme that a criterion needs, the largest x of a valid token, or the largest -x.
    """

    response: Tensor
    valid: Tensor
    train: Tensor
    rollout: Tensor
    weight: Tensor | None
    kept: Tensor
    kept_weight: Tensor | None
    negative: Tensor | None
    kept_negative: Tensor | None
    kept_negative_weight: Tensor | None
    vetoed: Tensor | None
    older: tuple[Tensor, ...]
    needs: tuple[Tensor, ...]
    extremes: tuple[Tensor, ...] = largest()

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


def sum_tokens(tokens: Tokens, decisions: TokenDecisions, runs: Runs, config: RolloutCorrectionConfig) -> SequenceSums:
    """The sums over the runs of a block."""
    kept, weights = decisions.kept, decisions.weights
    negative = None
    if tokens.negative is not None and any(criterion.only_negative for criterion in config.criteria):
        negative = tokens.negative
    veto, level = config.rollout_token_veto_threshold, tokens.level
    num_levels = 0 if config.staleness_scale is None else len(config.staleness_scale.steps)

    def weight_of(chosen: Tensor | None) -> Tensor | None:
        return None if weights is None or chosen is None else runs.sum(weights * numbers(chosen))

    kept_negative = None if negative is None else kept & negative
    valid, weight = runs.count(decisions.valid), None if weights is None else runs.sum(weights)
    return SequenceSums(
        response=runs.count(tokens.mask),
        valid=valid,
        train=runs.exact_sum(decisions.train),
        rollout=runs.exact_sum(decisions.rollout),
        weight=weight,
        kept=runs.count(kept) if decisions.accepted else valid,
        kept_weight=weight_of(kept) if decisions.accepted else weight,
        negative=None if negative is None else runs.count(decisions.valid & negative),
        kept_negative=None if kept_negative is None else runs.count(kept_negative),
        kept_negative_weight=weight_of(kept_negative),
        vetoed=None if veto is None else runs.count(decisions.valid & (decisions.log_ratio < math.log(veto))),
        older=() if level is None else tuple(runs.count(decisions.valid & (level >= 1 + i)) for i in range(num_levels)),
        needs=tuple(runs.exact_sum(decisions.values[x.name]) for x in summed(config)),
        extremes=tuple(
            runs.largest(_signed(need, decisions), decisions.absent) for need in config.needs if need.how != "sum"
        ),
    )


def summed(config: RolloutCorrectionConfig) -> list[Divergence]:
    """The divergences whose sums the criteria need, except log ρ, which every batch has."""
    return [need.divergence for need in config.needs if need.how == "sum" and need.divergence.of is not None]


def _signed(need: Need, decisions: TokenDecisions) -> Tensor:
    values = decisions.values[need.divergence.name].double()
    return values if need.how == "max" else -values


@dataclass(frozen=True)
class Statistics:
    """The sums and extremes that a criterion's statistic is made of: of sequences, or of all responses of a prompt.

    Attributes:
        num_tokens: [n] valid tokens, at least 1.
        num_lost: [n], for prompts: responses that lose every token to the other criteria.
        values: [n] by need; an extreme is a largest x or a largest -x.
    """

    num_tokens: Tensor
    num_lost: Tensor
    values: dict[Need, Tensor]

    def sum(self, divergence: Divergence) -> Tensor:
        """The sum of x over the valid tokens."""
        return self.values[Need("sum", divergence)]

    def max(self, divergence: Divergence) -> Tensor:
        """The largest x of a valid token; -inf without one."""
        return self.values[Need("max", divergence)]

    def min(self, divergence: Divergence) -> Tensor:
        """The smallest x of a valid token; +inf without one."""
        return -self.values[Need("min", divergence)]


def statistics_of(sums: SequenceSums, config: RolloutCorrectionConfig) -> Statistics:
    """The statistics of whole sequences."""
    values: dict[Need, Tensor] = {}
    needs, extremes = iter(sums.needs), iter(sums.extremes)
    for need in config.needs:
        rest = extremes if need.how != "sum" else needs
        values[need] = sums.log_ratio if need.how == "sum" and need.divergence.of is None else next(rest)
    return Statistics(sums.num_tokens, torch.zeros_like(sums.valid), values)


def threshold_scale(sums: SequenceSums, config: RolloutCorrectionConfig) -> Tensor | None:
    """[n] float64: the factor of a whole sequence's bounds, in nats: the one of its oldest valid token."""
    if config.staleness_scale is None:
        return None
    reached = torch.stack([tokens > 0 for tokens in sums.older]).sum(0)
    return config.staleness_scale.of(reached, sums.valid.dtype)


def log_sequence_weights(sums: SequenceSums, config: RolloutCorrectionConfig) -> Tensor:
    """[n] float64: log of the unbounded weight that all tokens of a sequence share."""
    return sums.log_ratio if config.rollout_is == "sequence" else sums.mean_log_ratio


def sequence_weights(sums: SequenceSums, config: RolloutCorrectionConfig) -> Tensor | None:
    """[n] float64: the bounded weight that all tokens of a sequence share; None unless weights are of sequences."""
    if config.rollout_is not in ("sequence", "geometric"):
        return None
    log_weights = log_sequence_weights(sums, config)
    return bounded_weights(exp_ratio(log_weights), log_weights, config, threshold_scale(sums, config))
