"""Measures of whole sequences: records with one number a sequence, and their sums over the sequences of this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from megatron_rc.correction.denominators import into_buckets
from megatron_rc.correction.inputs import Shards
from megatron_rc.correction.sequences import (
    SequenceSums,
    log_sequence_weights,
    sequence_weights,
    statistics_of,
    threshold_scale,
)
from megatron_rc.correction.tokens import decide_tokens, staleness, token_blocks
from megatron_rc.correction.verdicts import Verdicts
from megatron_rc.correction.weights import log_bounds, scaled_bounds
from megatron_rc.measures.header import (
    Breakdowns,
    CriterionSums,
    MeanWeightSums,
    PolicySums,
    StatisticSums,
    VetoSums,
    WeightSums,
)
from megatron_rc.measures.histogram import bins_of
from megatron_rc.measures.token_measures import SequenceMeasures, TestedSums, TokenSums
from megatron_rc.numerics import EXP_LIMIT, PPL_LIMIT, exp_ratio
from megatron_rc.parallel.collectives import flatten, map_record
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.criterion import Criterion

R = TypeVar("R")

LENGTH_BUCKETS = 24  # sequences of 2^i to 2^(i+1) - 1 tokens
REWARD_SIGNS = ("negative", "zero", "positive")
# How sums, largest and smallest values are put together, each with its value of nothing.
_ADDED: tuple[tuple[float, Callable[[Tensor, int], Tensor]], ...] = (
    (0.0, torch.sum),
    (-torch.inf, torch.amax),
    (torch.inf, torch.amin),
)


def add_sequences(record: R, sums: SequenceSums, counted: Tensor) -> R:
    """A record with each [n] tensor added up over sequences; other tensors stay. Extremes of nothing are infinite.

    Args:
        record: of float64 or bool tensors.
        sums: of whole sequences; those without a valid token are left out of the extremes.
        counted: [n] bool, the sequences whose sums this rank counts.
    """
    found: list[Iterator[Tensor]] = []
    for kind, (filler, add) in zip(flatten(record), _ADDED, strict=True):
        # Together with float64 numbers, flags become such too.
        table = torch.stack([sums.valid, *(value for value in kind if value.dim() == 1)])[1:]
        table = torch.where(sums.valid > 0 if filler else counted, table, filler)
        # One more column, so that no sequence has an extreme too.
        table = torch.cat([table, table.new_full((len(table), 1), filler)], dim=1)
        found.append(iter(add(table, 1).unbind()))
    return map_record(record, lambda value, sign: next(found[sign]) if value.dim() == 1 else value)


def policy_sums(sums: SequenceSums, measures: SequenceMeasures, verdicts: Verdicts) -> PolicySums[Tensor]:
    """How far the two policies are apart, in each sequence."""
    train, rollout, difference = (
        -value / sums.num_tokens for value in (sums.train, sums.rollout, sums.train - sums.rollout)
    )
    excess = torch.expm1(sums.log_ratio.clamp(-EXP_LIMIT, EXP_LIMIT))
    return PolicySums(
        valid=sums.valid,
        sequences=sums.valid > 0,
        log_ratio=sums.log_ratio,
        excess=measures.excess,
        train_log_ppl=train,
        rollout_log_ppl=rollout,
        log_ppl_diff=difference,
        train_ppl=_perplexity(train),
        rollout_ppl=_perplexity(rollout),
        ppl_ratio=_perplexity(difference),
        log_ppl_abs_diff=difference.abs(),
        sequence_excess=excess,
        sequence_excess_squared=excess.square(),
        accepted=verdicts.accepted,
        sequences_with_rejected=verdicts.accepted < sums.valid,
        log_ppl_diff_max=difference,
        log_ppl_diff_min=difference,
    )


def _perplexity(mean: Tensor) -> Tensor:
    return mean.clamp(-PPL_LIMIT, PPL_LIMIT).exp()


def weight_sums(
    sums: SequenceSums,
    measures: SequenceMeasures,
    tokens: TokenSums[Tensor],
    counted: Tensor,
    config: RolloutCorrectionConfig,
) -> WeightSums[Tensor] | None:
    """The importance weights of each sequence; None where there are none."""
    shared = sequence_weights(sums, config)
    if shared is not None:
        return _shared_weights(sums, shared, counted, config)
    return None if config.rollout_is is None else _token_weights(sums, measures, tokens, counted, config)


def _token_weights(
    sums: SequenceSums,
    measures: SequenceMeasures,
    tokens: TokenSums[Tensor],
    counted: Tensor,
    config: RolloutCorrectionConfig,
) -> WeightSums[Tensor]:
    """Weights of which each token has its own."""
    if (
        sums.weight is None
        or measures.above is None
        or measures.below is None
        or tokens.bounded_excess_squared is None
        or tokens.weight_max is None
        or tokens.weight_min is None
    ):
        raise ValueError("rollout_is='token' and no token-level weights were measured")
    mean, raw_mean = sums.weight / sums.num_tokens, 1 + measures.excess / sums.num_tokens
    return WeightSums(
        raw=sums.valid + measures.excess,
        raw_squared=None,
        raw_excess_squared=tokens.excess_squared,
        bounded=sums.weight,
        bounded_squared=None,
        bounded_excess_squared=tokens.bounded_excess_squared,
        tokens_above=measures.above,
        tokens_below=measures.below,
        sequences_above=torch.zeros_like(sums.valid),
        sequences_below=torch.zeros_like(sums.valid),
        sequences_outside=measures.above + measures.below > 0,
        means=_mean_weights(sums, mean, raw_mean, config),
        histograms=_histogram(mean, counted.double().unsqueeze(0)),
        log_raw_max=tokens.log_ratio_max,
        log_raw_min=tokens.log_ratio_min,
        bounded_max=tokens.weight_max,
        bounded_min=tokens.weight_min,
    )


def _shared_weights(
    sums: SequenceSums, weight: Tensor, counted: Tensor, config: RolloutCorrectionConfig
) -> WeightSums[Tensor]:
    """Weights that the tokens of a sequence share."""
    valid, scale = sums.valid, threshold_scale(sums, config)
    log_weight = log_sequence_weights(sums, config)
    raw, tested = exp_ratio(log_weight), log_weight if scale is None else log_weight / scale
    lower, upper = log_bounds(config)
    above, below = tested > upper, tested < lower
    return WeightSums(
        raw=raw * valid,
        raw_squared=raw.square() * valid,
        raw_excess_squared=(raw - 1).square() * valid,
        bounded=weight * valid,
        bounded_squared=weight.square() * valid,
        bounded_excess_squared=(weight - 1).square() * valid,
        tokens_above=torch.where(above, valid, 0),
        tokens_below=torch.where(below, valid, 0),
        sequences_above=above,
        sequences_below=below,
        sequences_outside=above | below,
        means=_mean_weights(sums, weight, raw, config),
        histograms=_histogram(weight, torch.stack([counted.double(), counted * valid])),
        log_raw_max=log_weight,
        log_raw_min=log_weight,
        bounded_max=weight,
        bounded_min=weight,
    )


def _mean_weights(
    sums: SequenceSums, mean: Tensor, raw_mean: Tensor, config: RolloutCorrectionConfig
) -> MeanWeightSums[Tensor]:
    scale = threshold_scale(sums, config)
    lower, upper = config.is_bounds if scale is None else scaled_bounds(config, scale)
    return MeanWeightSums(
        excess=mean - 1,
        excess_squared=(mean - 1).square(),
        high=raw_mean > upper,
        low=raw_mean < lower,
        max=mean,
        min=mean,
    )


def _histogram(weight: Tensor, counts: Tensor) -> Tensor:
    """[k, bins] cumulative: the log of each sequence's weight, counted as often as [k, n] says."""
    return bins_of(weight.log(), counts).cumsum(1)


def criterion_sums(
    criterion: Criterion,
    sums: SequenceSums,
    measures: SequenceMeasures,
    tokens: TokenSums[Tensor],
    verdicts: Verdicts,
    config: RolloutCorrectionConfig,
) -> CriterionSums[Tensor]:
    """The tokens that a criterion rejects by itself, and its statistic."""
    if criterion.unit == "token":
        rejected = sums.valid - measures.accepted[criterion.name]
    else:
        tested = sums.valid if sums.negative is None or not criterion.only_negative else sums.negative
        rejected = torch.where(verdicts.by_criterion[criterion.name], 0, tested)
    statistic = _statistic_sums(criterion, sums, tokens, config) if criterion.is_measured else None
    return CriterionSums(rejected, rejected > 0, statistic)


def _statistic_sums(
    criterion: Criterion, sums: SequenceSums, tokens: TokenSums[Tensor], config: RolloutCorrectionConfig
) -> StatisticSums[Tensor]:
    scale = threshold_scale(sums, config)
    scale = torch.ones_like(sums.valid) if scale is None else scale
    # Without a valid token the largest value is -inf.
    statistic = torch.where(sums.valid > 0, criterion.statistic(statistics_of(sums)), 0)
    tested = statistic / scale
    high, clamped = tested > criterion.upper, tested.clamp(criterion.least, criterion.upper) * scale
    shared = TestedSums(high, clamped * sums.valid, clamped.square() * sums.valid, statistic, statistic)
    return StatisticSums(
        tested=tokens.tests.get(criterion.name, shared),
        total=statistic * sums.valid,
        statistic=statistic,
        squared=statistic.square(),
        high=high,
        low=tested < criterion.lower,
        max=statistic,
        min=statistic,
    )


def veto_sums(sums: SequenceSums) -> VetoSums[Tensor] | None:
    """The tokens and sequences that the veto rejects; None without a veto."""
    return None if sums.vetoed is None else VetoSums(sums.vetoed, sums.vetoed > 0)


def breakdowns(
    sums: SequenceSums, verdicts: Verdicts, shards: Shards, counted: Tensor, by_staleness: Tensor
) -> Breakdowns:
    """Rejected tokens by length, by the reward's sign and by staleness.

    Args:
        sums: of whole sequences.
        verdicts: on them.
        shards: rewards, and versions if they are one a sequence.
        counted: [n] bool, the sequences whose sums this rank counts.
        by_staleness: [buckets, 3] of tokens that have versions of their own, else zeros.
    """
    columns = torch.stack([sums.valid, sums.valid - verdicts.accepted, sums.log_ratio], dim=1)
    columns = torch.where(counted.unsqueeze(1), columns, 0)
    octave = (torch.frexp(sums.num_tokens).exponent - 1).clamp(max=LENGTH_BUCKETS - 1)
    signs = None if shards.rewards is None else shards.rewards.sign().long() + 1
    buckets = None if shards.versions is None else _staleness_bucket(shards.versions, shards)
    return Breakdowns(
        by_length=into_buckets(octave, LENGTH_BUCKETS, columns[:, :2]),
        by_reward=into_buckets(signs, len(REWARD_SIGNS), columns[:, :2]),
        by_staleness=by_staleness + into_buckets(buckets, len(by_staleness), columns),
    )


def token_staleness(
    shards: Shards, accepted: Sequence[Tensor], config: RolloutCorrectionConfig
) -> tuple[Tensor, Tensor]:
    """Sums by staleness of tokens that have a version each; zeros unless versions are one a token.

    Args:
        shards: the local tokens.
        accepted: m' of each micro-batch.
        config: the correction.

    Returns:
        [buckets, 3] float64: valid tokens, rejected tokens and Σ log ρ; 0-D: valid tokens above the current version.
    """
    table = torch.zeros(shards.counts.max_staleness + 1, 3, dtype=torch.float64, device=shards.device)
    newer = table.new_zeros(())
    if shards.parts[0].versions is None:
        return table, newer
    for number, block, tokens, _ in token_blocks(shards, config):
        decisions, kept = decide_tokens(tokens, config), block.take(accepted[number])
        versions = block.take(shards.parts[number].versions)  # type: ignore[arg-type]
        columns = [decisions.valid, decisions.valid & ~kept, decisions.log_ratio]
        index = _staleness_bucket(versions, shards).reshape(-1)
        table = table + into_buckets(index, len(table), torch.stack([each.reshape(-1).double() for each in columns], 1))
        newer = newer + (decisions.valid & (versions > (shards.counts.current_version or 0))).sum()
    return table, newer


def _staleness_bucket(versions: Tensor, shards: Shards) -> Tensor:
    """current_version - version, within [0, max_staleness]."""
    return staleness(versions, shards.counts).clamp(0, shards.counts.max_staleness)
