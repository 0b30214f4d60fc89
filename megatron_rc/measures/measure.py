"""The measures of a batch, from the decisions: of blocks of tokens, of whole sequences, and their sums on this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from megatron_rc.correction.decisions import (
    BlockSequences,
    SequenceDecisions,
    SequenceSums,
    TokenDecisions,
    blocks_of,
    statistics_of,
)
from megatron_rc.correction.denominators import count_batch
from megatron_rc.correction.inputs import Shards
from megatron_rc.correction.weights import scaled_bounds
from megatron_rc.measures.data import data_sums
from megatron_rc.measures.header import (
    BatchHeader,
    Breakdowns,
    CriterionSums,
    MeanWeightSums,
    PerplexitySums,
    PolicySums,
    SampleSums,
    SequenceMeasures,
    SideCounts,
    SpreadSums,
    StatisticSums,
    TestedSums,
    TokenSums,
    TokenWeightSums,
    WeightMeasures,
    WeightMoments,
    WeightSums,
)
from megatron_rc.measures.histogram import bins_of
from megatron_rc.numerics import EXP_LIMIT, PPL_LIMIT, exp_sample
from megatron_rc.parallel.collectives import Pair, flatten, pack, rebuild
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.criterion import Criterion

R = TypeVar("R")

LENGTH_BUCKETS = 24  # sequences of 2^i to 2^(i+1) - 1 tokens
TURN_BUCKETS = 8  # the last one has all later turns too
REWARD_SIGNS = ("negative", "zero", "positive")
# How sums, largest and smallest values are put together, each with its value of nothing.
_ADDED: tuple[tuple[float, Callable[[Tensor, int], Tensor]], ...] = (
    (0.0, torch.sum),
    (-torch.inf, torch.amax),
    (torch.inf, torch.amin),
)


@dataclass(frozen=True)
class LocalSums:
    """All that this rank knows of its own tokens."""

    shards: Shards  # the input
    config: RolloutCorrectionConfig
    sums: SequenceSums  # over the local parts of whole sequences: decisions
    measures: SequenceMeasures  # over the local parts of whole sequences: measures
    tokens: TokenSums[Tensor]  # over the local tokens of each sequence: measures
    bins: Tensor  # [bins] float64, histogram of log ρ over the local tokens
    valid: list[Tensor]  # for each micro-batch the valid tokens, bool
    kept: list[Tensor]  # for each micro-batch the tokens that all token-level criteria accept, bool
    weights: list[Tensor] | None  # for each micro-batch the bounded weights, 0 if invalid; None unless token-level

    @property
    def pair(self) -> Pair:
        """([sums · n], [maxima · n]), to be reduced over ``cp``."""
        return pack((self.sums, self.measures))


def measure_block(
    decisions: TokenDecisions, sequences: BlockSequences, config: RolloutCorrectionConfig
) -> tuple[SequenceMeasures, TokenSums[Tensor]]:
    """The measures of whole sequences and of all tokens, from one block."""
    excess = decisions.ratio - 1  # to 6e-8 in float32; expm1 would cost six exponentials
    absent, weights = decisions.absent, decisions.weights
    of_weights, token_weights = None, None

    def spread(excess: Tensor, values: Tensor) -> SpreadSums[Tensor]:
        extremes = sequences.largest(values, absent), sequences.smallest(values, absent)
        return SpreadSums(sequences.sum(excess.square()), *extremes)

    def sample(weights: Tensor) -> SampleSums[Tensor]:
        # Squares of float32 would move a size near 1 by 1e-8.
        wide = weights.double()
        return SampleSums(weight=sequences.sum(wide), squared=sequences.sum(wide.square()))

    if weights is not None:
        lower, upper = config.is_log_bounds
        tested = weights.log if decisions.scale is None else weights.log / decisions.scale
        above, below = (sequences.count(decisions.valid & beyond) for beyond in (tested > upper, tested < lower))
        raw, raw_excess, unlimited = None, None, weights.raw
        if weights.raw is not decisions.ratio:
            raw = spread(weights.raw - 1, weights.log)
            raw_excess = sequences.sum(weights.raw - 1)
            unlimited = exp_sample(weights.log)
        of_weights = WeightMeasures(raw_excess, SideCounts(above, below))
        token_weights = TokenWeightSums(
            raw=raw,
            raw_sample=sample(unlimited * decisions.one),
            bounded=spread(weights.bounded - decisions.one, weights.bounded),
            bounded_sample=sample(weights.bounded),
        )
    turns = [criterion.name for criterion in config.criteria if criterion.unit == "turn"]
    of_sequences = SequenceMeasures(
        excess=sequences.sum(excess),
        weights=of_weights,
        accepted={name: sequences.count(test.accepted) for name, test in decisions.tests.items()},
        of_turns={name: sequences.exact_sum(decisions.tests[name].tested.double()) for name in turns},
    )
    of_tokens = TokenSums(
        # Both terms clamped, as in k3.
        k3=sequences.sum(excess - decisions.log_ratio.clamp(max=EXP_LIMIT)),
        ratio=spread(excess, decisions.log_ratio),
        weights=token_weights,
        tests={one.name: _measure_test(one, decisions, sequences) for one in config.criteria if one.of_tokens},
    )
    return of_sequences, of_tokens


def _measure_test(criterion: Criterion, decisions: TokenDecisions, sequences: BlockSequences) -> TestedSums[Tensor]:
    values = decisions.tests[criterion.name].tested
    tested = values if decisions.scale is None else values / decisions.scale
    factor = decisions.one if decisions.scale is None else decisions.one * decisions.scale
    clamped = tested.clamp(criterion.least, criterion.upper) * factor
    return TestedSums(
        high=sequences.count(decisions.valid & (tested > criterion.upper)),
        clamped=sequences.sum(clamped),
        clamped_squared=sequences.sum(clamped.square()),
        max=sequences.largest(values, decisions.absent),
        min=sequences.smallest(values, decisions.absent),
    )


def measure_batch(
    local: LocalSums,
    sums: SequenceSums,
    measures: SequenceMeasures,
    decisions: SequenceDecisions,
    mask: Sequence[Tensor],
) -> BatchHeader[Tensor]:
    """This rank's part of the numbers of the whole batch, from whole sequences and from local tokens (m': ``mask``)."""
    shards, config = local.shards, local.config
    tokens = add_sequences(local.tokens, sums, torch.ones_like(sums.valid, dtype=torch.bool))
    counted = (sums.valid > 0) & shards.counts_here
    policy = policy_sums(sums, measures, decisions)
    weights = weight_sums(sums, measures, tokens, decisions, counted, config)
    veto = None if sums.vetoed is None else CriterionSums(sums.vetoed, sums.vetoed > 0, None)
    criteria = {one.name: criterion_sums(one, sums, measures, tokens, decisions) for one in config.criteria}
    policy, weights, veto, criteria = add_sequences((policy, weights, veto, criteria), sums, counted)
    data, tables = data_sums(shards, sums, config), breakdowns(sums, decisions, local, mask, counted)
    denominators = count_batch(sums, decisions, shards, config)
    return BatchHeader(denominators, data, policy, tokens, weights, veto, criteria, tables, local.bins.cumsum(0))


def add_sequences(record: R, sums: SequenceSums, counted: Tensor) -> R:
    """A record with each [n] tensor, float64 or bool, added up over sequences; other tensors stay.

    ``counted`` are the sequences whose sums this rank counts. Extremes are over sequences with a valid token, and
    infinite without one.
    """
    kinds = []
    for kind, (filler, add) in zip(flatten(record), _ADDED, strict=True):
        # Together with float64 numbers, flags become such too.
        table = torch.stack([sums.valid, *(value for value in kind if value.dim() == 1)])[1:]
        table = torch.where(sums.valid > 0 if filler else counted, table, filler)
        # One more column, so that no sequence has an extreme too.
        totals = iter(add(torch.cat([table, table.new_full((len(table), 1), filler)], dim=1), 1))
        kinds.append([next(totals) if value.dim() == 1 else value for value in kind])
    return rebuild(record, kinds)


def policy_sums(sums: SequenceSums, measures: SequenceMeasures, decisions: SequenceDecisions) -> PolicySums[Tensor]:
    """How far the two policies are apart, in each sequence."""
    excess = torch.expm1(sums.log_ratio.clamp(-EXP_LIMIT, EXP_LIMIT))
    ratio = exp_sample(sums.log_ratio)
    difference = -sums.mean_log_ratio

    def perplexity(mean: Tensor) -> PerplexitySums[Tensor]:
        return PerplexitySums(mean, mean.clamp(-PPL_LIMIT, PPL_LIMIT).exp())

    return PolicySums(
        valid=sums.valid,
        sequences=sums.valid > 0,
        log_ratio=sums.log_ratio,
        excess=measures.excess,
        training=perplexity(-sums.train / sums.num_tokens),
        rollout=perplexity(-sums.rollout / sums.num_tokens),
        difference=perplexity(difference),
        abs_difference=difference.abs(),
        sequence_excess=excess,
        sequence_excess_squared=excess.square(),
        sequence_sample=SampleSums(weight=ratio, squared=ratio.square()),
        sequences_with_rejected=decisions.accepted.tokens < sums.valid,
        difference_max=difference,
        difference_min=difference,
    )


def weight_sums(
    sums: SequenceSums,
    measures: SequenceMeasures,
    tokens: TokenSums[Tensor],
    decisions: SequenceDecisions,
    counted: Tensor,
    config: RolloutCorrectionConfig,
) -> WeightSums[Tensor] | None:
    """The importance weights of each sequence; None without weights."""
    shared, scale, valid = decisions.weights, decisions.scale, sums.valid
    counts = counted.double().unsqueeze(0)
    if shared is not None:
        # One weight for all tokens of a sequence. Its log is tested.
        mean = shared.bounded
        lower, upper = config.is_log_bounds
        tested = shared.log if scale is None else shared.log / scale
        outside = SideCounts(torch.where(tested > upper, valid, 0), torch.where(tested < lower, valid, 0))
        raw = _moments(shared.raw, valid, values=shared.log, unlimited=exp_sample(shared.log))
        bounded = _moments(mean, valid, values=mean, unlimited=mean)
        counts = torch.cat([counts, counts * valid])
    elif tokens.weights is not None and measures.weights is not None and sums.weight is not None:
        # A weight for each token. The mean of a sequence's unbounded weights is tested.
        mean = sums.weight / sums.num_tokens
        lower, upper = scaled_bounds(config, scale)
        raw_excess = measures.excess if measures.weights.raw_excess is None else measures.weights.raw_excess
        tested = 1 + raw_excess / sums.num_tokens
        outside = measures.weights.outside
        raw = _token_moments(
            total=tested * valid, spread=tokens.weights.raw or tokens.ratio, sample=tokens.weights.raw_sample
        )
        bounded = _token_moments(
            total=mean * valid, spread=tokens.weights.bounded, sample=tokens.weights.bounded_sample
        )
    else:
        return None
    return WeightSums(
        raw=raw,
        bounded=bounded,
        mean=MeanWeightSums(
            total=mean,
            excess_squared=(mean - 1).square(),
            squared=mean.square(),
            max=mean,
            min=mean,
        ),
        outside=outside,
        mean_outside=SideCounts(tested > upper, tested < lower),
        sequences_outside=outside.above + outside.below > 0,
        histograms=bins_of(mean.log(), counts).cumsum(1),
    )


def _moments(weights: Tensor, times: Tensor, *, values: Tensor, unlimited: Tensor) -> WeightMoments[Tensor]:
    """The moments of weights that count several times each, with the extremes of ``values``.

    ``unlimited`` are the weights whose effective sample size is measured.
    """
    return WeightMoments(
        total=weights * times,
        excess_squared=(weights - 1).square() * times,
        sample=SampleSums(weight=unlimited * times, squared=unlimited.square() * times),
        max=values,
        min=values,
    )


def _token_moments(*, total: Tensor, spread: SpreadSums[Tensor], sample: SampleSums[Tensor]) -> WeightMoments[Tensor]:
    """The moments of token-level weights, whose sums over each sequence's tokens are known; ``total`` is Σ w."""
    return WeightMoments(
        total=total,
        excess_squared=spread.excess_squared,
        sample=sample,
        max=spread.max,
        min=spread.min,
    )


def criterion_sums(
    criterion: Criterion,
    sums: SequenceSums,
    measures: SequenceMeasures,
    tokens: TokenSums[Tensor],
    decisions: SequenceDecisions,
) -> CriterionSums[Tensor]:
    """The tokens that a criterion rejects by itself, and its statistic."""
    if criterion.of_tokens:
        rejected = sums.valid - measures.accepted[criterion.name]
    else:
        tested = sums.negative.valid if sums.negative is not None and criterion.only_negative else sums.valid
        rejected = torch.where(decisions.by_criterion[criterion.name], 0, tested)
    statistic = None
    if criterion.is_measured:
        statistic = _statistic_sums(criterion, _statistic_of(criterion, sums, measures), sums, tokens, decisions.scale)
    return CriterionSums(rejected, rejected > 0, statistic)


def _statistic_of(criterion: Criterion, sums: SequenceSums, measures: SequenceMeasures) -> Tensor:
    """[n] the statistic of each sequence; of a criterion on turns its mean over the tokens."""
    if criterion.unit == "turn":
        return measures.of_turns[criterion.name] / sums.num_tokens
    # Without a valid token the largest value is -inf.
    return torch.where(sums.valid > 0, criterion.statistic(statistics_of(sums)), 0)


def _statistic_sums(
    criterion: Criterion, statistic: Tensor, sums: SequenceSums, tokens: TokenSums[Tensor], scale: Tensor | None
) -> StatisticSums[Tensor]:
    scale = torch.ones_like(sums.valid) if scale is None else scale
    tested = statistic / scale
    high, clamped = tested > criterion.upper, tested.clamp(criterion.least, criterion.upper) * scale
    shared = TestedSums(high, clamped * sums.valid, clamped.square() * sums.valid, statistic, statistic)
    return StatisticSums(
        tested=tokens.tests.get(criterion.name, shared),
        total=statistic * sums.valid,
        statistic=statistic,
        squared=statistic.square(),
        outside=SideCounts(high, tested < criterion.lower),
        max=statistic,
        min=statistic,
    )


def breakdowns(
    sums: SequenceSums, decisions: SequenceDecisions, local: LocalSums, mask: Sequence[Tensor], counted: Tensor
) -> Breakdowns:
    """Valid and rejected tokens by length, by the reward's sign, by staleness and by turn; ``mask``: m'."""
    shards, counts, ages = local.shards, local.shards.counts, local.shards.counts.max_staleness + 1
    columns = torch.stack([sums.valid, sums.valid - decisions.accepted.tokens, sums.log_ratio], dim=1)
    columns = torch.where(counted.unsqueeze(1), columns, 0)
    octave = (torch.frexp(sums.num_tokens).exponent - 1).clamp(max=LENGTH_BUCKETS - 1)
    signs = None if shards.rewards is None else shards.rewards.sign().long() + 1
    by_staleness = token_table(local, mask, [part.versions for part in shards.parts], counts.staleness, ages)
    if shards.policy_versions is not None:
        by_staleness = _into_buckets(counts.staleness(shards.policy_versions), ages, columns)
    return Breakdowns(
        by_length=_into_buckets(octave, LENGTH_BUCKETS, columns[:, :2]),
        by_reward=_into_buckets(signs, len(REWARD_SIGNS), columns[:, :2]),
        by_staleness=by_staleness,
        by_turn=token_table(local, mask, [part.turn_ids for part in shards.parts], lambda turn: turn, TURN_BUCKETS),
    )


def token_table(
    local: LocalSums, mask: Sequence[Tensor], values: Sequence[Tensor | None], bucket: Callable[..., Tensor], count: int
) -> Tensor:
    """[count, 3] float64: valid tokens, rejected tokens and Σ log ρ by the bucket of a value, int64, one a token."""
    table = torch.zeros(count, 3, dtype=torch.float64, device=local.shards.device)
    for part, of_tokens, *masks in zip(local.shards.parts, values, local.valid, mask, strict=True):
        for block in () if of_tokens is None else blocks_of(part):
            train, rollout, value, valid, kept = map(block.take, [part.train, part.rollout, of_tokens, *masks])  # type: ignore[arg-type]
            log_ratio = torch.where(valid, train.double() - rollout, 0)
            columns = torch.stack([valid, valid > kept, log_ratio], dim=-1).view(-1, 3)  # of bool: valid and not kept
            table.index_add_(0, bucket(value.reshape(-1)).clamp(0, count - 1), columns)
    return table


def _into_buckets(index: Tensor | None, count: int, columns: Tensor) -> Tensor:
    """[count, k] float64: the sums of [n, k] columns by index, moved into [0, count); zeros without an index."""
    buckets = torch.zeros(count, columns.shape[1], dtype=torch.float64, device=columns.device)
    return buckets if index is None else buckets.index_add_(0, index.clamp(0, count - 1), columns.double())
