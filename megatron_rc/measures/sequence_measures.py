"""Measures of whole sequences: records with one number a sequence, and their sums over the sequences of this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_rc.correction.inputs import Shards
from megatron_rc.correction.sequences import (
    SequenceSums,
    log_sequence_weights,
    sequence_weights,
    statistics_of,
    threshold_scale,
)
from megatron_rc.correction.tokens import blocks_of, log_bounds, scaled_bounds
from megatron_rc.correction.verdicts import Verdicts, count_batch
from megatron_rc.measures.data import data_sums
from megatron_rc.measures.header import (
    BatchHeader,
    Breakdowns,
    CriterionSums,
    PolicySums,
    StatisticSums,
    VetoSums,
    WeightSums,
)
from megatron_rc.measures.histogram import bins_of
from megatron_rc.measures.token_measures import LocalSums, SequenceMeasures, TestedSums, TokenSums
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


def measure_batch(
    local: LocalSums, sums: SequenceSums, measures: SequenceMeasures, verdicts: Verdicts, mask: Sequence[Tensor]
) -> BatchHeader[Tensor]:
    """This rank's part of the numbers of the whole batch, from whole sequences and from local tokens (m': ``mask``)."""
    shards, config, tokens = local.shards, local.config, local.tokens
    # Whole sequences, which all ranks of cp know, are counted on the first one.
    counted = (sums.valid > 0) & shards.is_first_cp_rank
    by_staleness, newer_tokens = token_staleness(shards, local.valid, mask)
    criteria = {one.name: criterion_sums(one, sums, measures, tokens, verdicts, config) for one in config.criteria}
    policy, weights = policy_sums(sums, measures, verdicts), weight_sums(sums, measures, tokens, counted, config)
    veto = None if sums.vetoed is None else VetoSums(sums.vetoed, sums.vetoed > 0)
    policy, weights, veto, criteria = add_sequences((policy, weights, veto, criteria), sums, counted)
    return BatchHeader(
        count_batch(sums, verdicts, shards, config),
        data_sums(shards, sums, newer_tokens, config),
        policy,
        tokens,
        weights,
        veto,
        criteria,
        breakdowns(sums, verdicts, shards, counted, by_staleness),
        bins=local.bins.cumsum(0),
    )


def add_sequences(record: R, sums: SequenceSums, counted: Tensor) -> R:
    """A record with each [n] tensor, float64 or bool, added up over sequences; other tensors stay.

    ``counted`` are the sequences whose sums this rank counts. Extremes are over sequences with a valid token, and
    infinite without one.
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
        training_log_ppl=train,
        rollout_log_ppl=rollout,
        log_ppl_diff=difference,
        training_ppl=_perplexity(train),
        rollout_ppl=_perplexity(rollout),
        ppl_ratio=_perplexity(difference),
        log_ppl_abs_diff=difference.abs(),
        sequence_excess=excess,
        sequence_excess_squared=excess.square(),
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
    """The importance weights of each sequence; None without weights."""
    shared, own, valid = sequence_weights(sums, config), tokens.weights, sums.valid
    scale, counts = threshold_scale(sums, config), counted.double().unsqueeze(0)
    squares: tuple[Tensor | None, Tensor | None]
    if shared is not None:
        mean, log_raw = shared, log_sequence_weights(sums, config)
        raw, tested = exp_ratio(log_raw), log_raw if scale is None else log_raw / scale
        lower, upper = log_bounds(config)
        above, below = (torch.where(beyond, valid, 0) for beyond in (tested > upper, tested < lower))
        raw_excess, excess = (raw - 1).square() * valid, (mean - 1).square() * valid
        squares = raw.square() * valid, mean.square() * valid
        extremes = log_raw, log_raw, mean, mean
        counts = torch.cat([counts, counts * valid])
    elif own is not None and sums.weight is not None and measures.above is not None and measures.below is not None:
        raw_sum = measures.excess if measures.raw_excess is None else measures.raw_excess
        mean, raw = sums.weight / sums.num_tokens, 1 + raw_sum / sums.num_tokens
        bounds: Any = config.is_bounds if scale is None else scaled_bounds(config, scale)
        tested, (lower, upper) = raw, bounds
        above, below = measures.above, measures.below
        raw_excess, excess = tokens.excess_squared, own.excess_squared
        squares = None, None
        extremes = tokens.log_ratio_max, tokens.log_ratio_min, own.max, own.min
        if tokens.raw_weights is not None:
            raw_excess = tokens.raw_weights.excess_squared
            extremes = tokens.raw_weights.log_max, tokens.raw_weights.log_min, own.max, own.min
    else:
        return None
    log_raw_max, log_raw_min, bounded_max, bounded_min = extremes
    return WeightSums(
        raw=raw * valid,
        raw_squared=squares[0],
        raw_excess_squared=raw_excess,
        bounded=mean * valid,
        bounded_squared=squares[1],
        bounded_excess_squared=excess,
        above=above,
        below=below,
        outside=above + below > 0,
        mean_excess=mean - 1,
        mean_excess_squared=(mean - 1).square(),
        mean_above=tested > upper,
        mean_below=tested < lower,
        histograms=bins_of(mean.log(), counts).cumsum(1),
        log_raw_max=log_raw_max,
        log_raw_min=log_raw_min,
        bounded_max=bounded_max,
        bounded_min=bounded_min,
        mean_max=mean,
        mean_min=mean,
    )


def criterion_sums(
    criterion: Criterion,
    sums: SequenceSums,
    measures: SequenceMeasures,
    tokens: TokenSums[Tensor],
    verdicts: Verdicts,
    config: RolloutCorrectionConfig,
) -> CriterionSums[Tensor]:
    """The tokens that a criterion rejects by itself, and its statistic."""
    if criterion.of_tokens:
        rejected = sums.valid - measures.accepted[criterion.name]
    else:
        tested = sums.valid if sums.negative is None or not criterion.only_negative else sums.negative
        rejected = torch.where(verdicts.by_criterion[criterion.name], 0, tested)
    statistic = None
    if criterion.is_measured:
        statistic = _statistic_sums(criterion, _statistic_of(criterion, sums, measures), sums, tokens, config)
    return CriterionSums(rejected, rejected > 0, statistic)


def _statistic_of(criterion: Criterion, sums: SequenceSums, measures: SequenceMeasures) -> Tensor:
    """[n] the statistic of each sequence; of a criterion on turns its mean over the tokens."""
    if criterion.unit == "turn":
        return measures.of_turns[criterion.name] / sums.num_tokens
    # Without a valid token the largest value is -inf.
    return torch.where(sums.valid > 0, criterion.statistic(statistics_of(sums)), 0)


def _statistic_sums(
    criterion: Criterion,
    statistic: Tensor,
    sums: SequenceSums,
    tokens: TokenSums[Tensor],
    config: RolloutCorrectionConfig,
) -> StatisticSums[Tensor]:
    scale = threshold_scale(sums, config)
    scale = torch.ones_like(sums.valid) if scale is None else scale
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


def breakdowns(
    sums: SequenceSums, verdicts: Verdicts, shards: Shards, counted: Tensor, by_staleness: Tensor
) -> Breakdowns:
    """Rejected tokens by length, by the reward's sign and by staleness.

    ``counted`` are the sequences whose sums this rank counts, ``by_staleness`` the sums of :func:`token_staleness`.
    """
    columns = torch.stack([sums.valid, sums.valid - verdicts.accepted, sums.log_ratio], dim=1)
    columns = torch.where(counted.unsqueeze(1), columns, 0)
    octave = (torch.frexp(sums.num_tokens).exponent - 1).clamp(max=LENGTH_BUCKETS - 1)
    signs = None if shards.rewards is None else shards.rewards.sign().long() + 1
    buckets = None if shards.versions is None else _staleness_bucket(shards.versions, shards)
    return Breakdowns(
        by_length=_into_buckets(octave, LENGTH_BUCKETS, columns[:, :2]),
        by_reward=_into_buckets(signs, len(REWARD_SIGNS), columns[:, :2]),
        by_staleness=by_staleness + _into_buckets(buckets, len(by_staleness), columns),
    )


def token_staleness(shards: Shards, valid: Sequence[Tensor], accepted: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Sums by staleness of tokens that have a version each; zeros unless versions are one a token.

    Returns:
        [buckets, 3] float64: valid tokens, rejected tokens and Σ log ρ; 0-D: valid tokens above the current version.
    """
    table = torch.zeros(shards.counts.max_staleness + 1, 3, dtype=torch.float64, device=shards.device)
    newer = table.new_zeros(())
    if shards.parts[0].versions is None:
        return table, newer
    for part, of_valid, of_accepted in zip(shards.parts, valid, accepted, strict=True):
        for block in blocks_of(part):
            tensors = part.train, part.rollout, part.versions, of_valid, of_accepted
            train, rollout, versions, is_valid, kept = map(block.take, tensors)  # type: ignore[arg-type]
            log_ratio = torch.where(is_valid, train.double() - rollout.double(), 0)
            columns = torch.stack([is_valid, is_valid & ~kept, log_ratio], dim=-1).view(-1, 3)
            table = table + _into_buckets(_staleness_bucket(versions, shards).reshape(-1), len(table), columns)
            newer = newer + (is_valid & (versions > (shards.counts.current_version or 0))).sum()
    return table, newer


def _staleness_bucket(versions: Tensor, shards: Shards) -> Tensor:
    """current_version - version, within [0, max_staleness]."""
    return shards.counts.staleness(versions).clamp(0, shards.counts.max_staleness)


def _into_buckets(index: Tensor | None, count: int, columns: Tensor) -> Tensor:
    """[count, k] float64: the sums of [n, k] columns by bucket; zeros without an index."""
    buckets = torch.zeros(count, columns.shape[1], dtype=torch.float64, device=columns.device)
    return buckets if index is None else buckets.index_add_(0, index, columns.double())
