"""The numbers of a whole batch: their record, the header, and this rank's part of them.

Each field is added up over ranks, micro-batches and steps, unless its default says that the largest or the smallest
value counts. Denominators, metrics and errors are all read from the header.

``N`` is the type of a number: a 0-D tensor while the header is computed on the device, a float after its copy to the
host. Tables have no ``N``: they are tensors on the device and lists on the host.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor

from megatron_rc.correction.denominators import Denominators, N, averaged_weights, mini_batch_columns
from megatron_rc.correction.inputs import Shards
from megatron_rc.correction.sequences import SequenceDecisions, SequenceSums, extremes_of
from megatron_rc.correction.tokens import blocks_of
from megatron_rc.correction.weights import scaled_bounds
from megatron_rc.measures.data import DataSums, data_columns, data_sums
from megatron_rc.measures.histogram import bins_of
from megatron_rc.measures.tokens import Moments, TokenMeasures, raw_excess_name
from megatron_rc.numerics import EXP_LIMIT, PPL_LIMIT, exp_sample
from megatron_rc.parallel.collectives import Pair, pack
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.criterion import Criterion

LENGTH_BUCKETS = 24  # sequences of 2^i to 2^(i+1) - 1 tokens
TURN_BUCKETS = 8  # the last one has all later turns too
REWARD_SIGNS = ("negative", "zero", "positive")


@dataclass(frozen=True)
class Breakdowns:
    """Valid tokens, rejected tokens and Σ log ρ, [buckets, 3] each."""

    by_length: Any  # by the octave of the sequence's number of valid tokens
    by_reward: Any  # by the sign of the reward; zeros if rewards were not given
    by_staleness: Any  # from 0 to max_staleness; zeros if versions were not given
    by_turn: Any  # 8 buckets, the last one for all later turns; zeros if turns were not given


@dataclass(frozen=True)
class BatchHeader(Generic[N]):
    """All numbers that are known of a whole batch."""

    denominators: Denominators[N]  # the loss is divided by them
    data: DataSums[N]
    tokens: TokenMeasures[N]
    totals: dict[str, N]  # sums over sequences, by the names of :func:`measure_batch`
    sequence_moments: dict[str, Moments[N]]  # over sequences with a valid token, by the name of the quantity
    # [1 or 2, bins] histograms of log q, q: the mean bounded weight of a sequence's tokens. Row 0 counts sequences,
    # row 1 their tokens (only if these share one weight). None without weights.
    weight_bins: Any
    breakdowns: Breakdowns


@dataclass(frozen=True)
class LocalSums:
    """All that this rank knows of its own tokens."""

    shards: Shards  # the checked input
    config: RolloutCorrectionConfig
    sums: SequenceSums  # over the local tokens of each sequence
    tokens: TokenMeasures[Tensor]  # over all local tokens
    valid: list[Tensor]  # for each micro-batch the valid tokens, bool
    passed: list[Tensor]  # for each micro-batch the tokens that all criteria on tokens and turns accept, bool
    weights: list[Tensor] | None  # for each micro-batch the bounded weights, 0 if invalid; None unless token-level

    @property
    def pair(self) -> Pair:
        """([sums · n], [maxima · n]), to be reduced over ``cp``."""
        return pack(self.sums)


def measure_batch(
    local: LocalSums, sums: SequenceSums, decisions: SequenceDecisions, mask: Sequence[Tensor]
) -> BatchHeader[Tensor]:
    """Return this rank's part of the batch header: reduced over ranks it is the header of the batch. Collectives: none.

    All ranks of a CP group know the sums over its whole sequences. Only the first of them adds these, so that each
    sequence is in the header once.

    Args:
        local: the local tokens.
        sums: the sums over whole sequences.
        decisions: the decisions on whole sequences.
        mask: m', the accepted mask, of each micro-batch.
    """
    shards = local.shards
    config = local.config
    has_weights = config.rollout_is is not None
    has_tokens = sums.valid > 0
    # By name, one number for each sequence. The header has the sum of a column over sequences; of a quantity it has the
    # sum of squares and the extremes, too.
    columns = (
        policy_columns(sums, decisions, has_tokens) | criteria_columns(sums, decisions, config) | data_columns(sums)
    )
    quantities = policy_quantities(sums) | criteria_quantities(sums, config)
    if has_weights:
        mean_weight = mean_weights(sums, decisions)
        columns |= weight_columns(sums, decisions, config)
        quantities |= {"mean_weight": mean_weight, "mean_weight_excess": mean_weight - 1}

    # A sequence without a valid token has no mean: it counts nowhere.
    left_out = shards.counts_elsewhere | ~has_tokens
    table = torch.stack([*columns.values(), *quantities.values()])
    counted = table.masked_fill(left_out, 0)
    totals = counted.sum(1)
    first_quantity = len(columns)
    total_of = dict(zip(columns, totals[:first_quantity], strict=True))
    sequence_moments = named_moments(
        quantities,
        count=total_of["sequences"],
        totals=totals[first_quantity:],
        squares=counted[first_quantity:].square().sum(1),
        extremes=extremes_of([*quantities.values()], left_out),
    )

    weight_bins = None
    if has_weights:
        # How often a sequence's weight counts: row 0 of the table ("sequences") says 1, row 1 ("tokens") the number of
        # its tokens. They have a histogram only if the tokens of a sequence share one weight.
        num_histograms = 1 if decisions.weights is None else 2
        weight_bins = bins_of(mean_weight.log(), counted[:num_histograms])

    # What batch normalisation averages; not there without weights.
    averaged_weight = total_of.pop("averaged_weight", None)
    averaged_count = total_of.pop("averaged_count", None)

    # Added up by mini-batch, and by length, reward, staleness and turn. One table, because each operation costs time.
    for_mini_batches = mini_batch_columns(decisions, shards)
    for_breakdowns = [sums.valid, sums.valid - decisions.accepted_tokens, sums.log_ratio]
    by_sequence = torch.stack([*for_mini_batches, *for_breakdowns], dim=1)
    by_sequence = by_sequence.masked_fill(shards.counts_elsewhere.unsqueeze(1), 0)
    first_of_breakdowns = len(for_mini_batches)
    mini_batches = by_sequence.new_zeros(shards.counts.num_mini_batches, first_of_breakdowns)
    mini_batches.index_add_(0, shards.mini_batch_ids, by_sequence[:, :first_of_breakdowns])

    # In the order of mini_batch_columns: four counts (the third: accepted tokens), Σ w, Σ (sequence id + 1).
    counts = mini_batches[:, :4]
    weights = mini_batches[:, 4]
    id_sums = mini_batches[:, 5]
    return BatchHeader(
        denominators=Denominators(
            counts=counts,
            weights=weights,
            id_sums=id_sums,
            total_weight=weights.sum() if averaged_weight is None else averaged_weight,
            weight_count=counts[:, 2].sum() if averaged_count is None else averaged_count,
        ),
        data=data_sums(
            shards,
            sums,
            config,
            bad_tokens=local.tokens.totals["bad"],
            zero_log_probs=total_of.pop("zero_log_probs"),
        ),
        tokens=with_shared_moments(local.tokens, sums, decisions, left_out, total_of["tokens"], config),
        totals=total_of,
        sequence_moments=sequence_moments,
        weight_bins=weight_bins,
        breakdowns=breakdowns(by_sequence[:, first_of_breakdowns:], sums, local, mask),
    )


def named_moments(
    names: Iterable[str], *, count: Tensor, totals: Tensor, squares: Tensor, extremes: tuple[Tensor, Tensor]
) -> dict[str, Moments[Tensor]]:
    """Return the moments of k quantities by name, from their number of values and [k] sums and extremes."""
    moments = {}
    for name, total, squared, largest, smallest in zip(names, totals, squares, *extremes, strict=True):
        moments[name] = Moments(count, total, squared, largest, smallest)
    return moments


def with_shared_moments(
    tokens: TokenMeasures[Tensor],
    sums: SequenceSums,
    decisions: SequenceDecisions,
    left_out: Tensor,
    num_tokens: Tensor,
    config: RolloutCorrectionConfig,
) -> TokenMeasures[Tensor]:
    """Return the measures of tokens with those of quantities that all tokens of a sequence share.

    The value of a sequence counts once for each of its tokens.

    Args:
        tokens: the measures of this rank's tokens.
        sums: the sums over whole sequences.
        decisions: on whole sequences.
        left_out: [n] bool, the sequences that do not count here.
        num_tokens: 0-D, the number of tokens of the others.
        config: the correction.
    """
    quantities = shared_weights(decisions) | shared_statistics(sums, decisions, config)
    if not quantities:
        return tokens
    table = torch.stack([*quantities.values()])
    times = sums.valid.masked_fill(left_out, 0)
    moments = named_moments(
        quantities,
        count=num_tokens,
        totals=(table * times).sum(1),
        squares=(table.square() * times).sum(1),
        extremes=extremes_of([*quantities.values()], left_out),
    )
    return dataclasses.replace(tokens, moments=tokens.moments | moments)


def policy_columns(sums: SequenceSums, decisions: SequenceDecisions, has_tokens: Tensor) -> dict[str, Tensor]:
    """Return numbers of each sequence that are added up over the batch: its size, and how far the policies differ."""
    return {
        "sequences": has_tokens,
        "tokens": sums.valid,
        "log_ratio": sums.log_ratio,
        "rejected_sequences": decisions.accepted_tokens < sums.valid,
    }


def policy_quantities(sums: SequenceSums) -> dict[str, Tensor]:
    """Return the quantities of each sequence that say how far the two policies are apart."""
    log_perplexities = -torch.stack([sums.sums["train"], sums.sums["rollout"], sums.log_ratio]) / sums.num_tokens
    perplexities = log_perplexities.clamp(-PPL_LIMIT, PPL_LIMIT).exp()
    training, rollout, difference = log_perplexities.unbind(0)
    return {
        "training_log_ppl": training,
        "rollout_log_ppl": rollout,
        "log_ppl_diff": difference,
        "log_ppl_abs_diff": difference.abs(),
        "training_ppl": perplexities[0],
        "rollout_ppl": perplexities[1],
        "ppl_ratio": perplexities[2],
        # Π ρ - 1 within exp(±20), and Π ρ within exp(±300).
        "sequence_ratio_excess": torch.expm1(sums.log_ratio.clamp(-EXP_LIMIT, EXP_LIMIT)),
        "sequence_ratio": exp_sample(sums.log_ratio),
    }


def mean_weights(sums: SequenceSums, decisions: SequenceDecisions) -> Tensor:
    """Return q, the mean bounded weight over the valid tokens of each sequence, [n]."""
    if decisions.weights is not None:
        return decisions.weights.bounded
    return sums.sums["weight"] / sums.num_tokens


def weight_columns(
    sums: SequenceSums, decisions: SequenceDecisions, config: RolloutCorrectionConfig
) -> dict[str, Tensor]:
    """Return counts of each sequence's weights outside of their bounds, and what batch normalisation averages.

    ``above``, ``below``: tokens; ``mean_above``, ``mean_below``: 1 if the mean of its unbounded weights is outside;
    ``averaged_weight``, ``averaged_count``: the sum and the number of weights that batch normalisation averages;
    ``sequences_outside``: 1 if it has a token with a weight outside (only with ``mask``).
    """
    if decisions.weights is not None:
        # One weight for all tokens of a sequence. Its log is tested.
        log_weight = decisions.weights.log
        tested = log_weight if decisions.bound_scale is None else log_weight / decisions.bound_scale
        lower, upper = config.is_log_bounds
        mean_above = tested > upper
        mean_below = tested < lower
        above = sums.valid * mean_above
        below = sums.valid * mean_below
    else:
        # A weight for each token. The mean of a sequence's unbounded weights is tested.
        mean_excess = sums.sums[raw_excess_name(config)] / sums.num_tokens
        lower, upper = scaled_bounds(config, decisions.bound_scale)
        mean_above = mean_excess > upper - 1
        mean_below = mean_excess < lower - 1
        above = sums.sums["above"]
        below = sums.sums["below"]
    averaged_weight, averaged_count = averaged_weights(sums, decisions, config)
    columns = {
        "above": above,
        "below": below,
        "mean_above": mean_above,
        "mean_below": mean_below,
        "averaged_weight": averaged_weight,
        "averaged_count": averaged_count,
    }
    if config.is_mode == "mask":
        columns["sequences_outside"] = above + below > 0
    return columns


def shared_weights(decisions: SequenceDecisions) -> dict[str, Tensor]:
    """Return the quantities of :func:`token_quantities` of weights that all tokens of a sequence share, by name."""
    weights = decisions.weights
    if weights is None:
        return {}
    return {
        "weight": weights.bounded,
        "weight_excess": weights.bounded - 1,
        "raw_weight": weights.raw,
        "raw_weight_excess": weights.raw - 1,
        "sampled_weight": exp_sample(weights.log),
    }


def criteria_columns(
    sums: SequenceSums, decisions: SequenceDecisions, config: RolloutCorrectionConfig
) -> dict[str, Tensor]:
    """Return of each criterion, and of the veto, what it rejects by itself in each sequence, by name.

    ``<criterion>_rejected``: tokens; ``<criterion>_rejected_sequences``: 1 if there is such a token. Of measured
    criteria also ``<criterion>_statistic``: the statistic, once for each token; ``<criterion>_above`` and
    ``<criterion>_below``: 1 if it is outside of the bounds.
    """
    columns: dict[str, Tensor] = {}
    for criterion in config.criteria:
        name = criterion.name
        if criterion.of_tokens:
            rejected = sums.valid - sums.sums[f"accepted_{name}"]
        else:
            num_tested = sums.valid
            if criterion.only_negative and "negative" in sums.sums:
                num_tested = sums.sums["negative"]
            rejected = num_tested.masked_fill(decisions.by_criterion[name], 0)
        columns |= {f"{name}_rejected": rejected, f"{name}_rejected_sequences": rejected > 0}
        if criterion.is_measured:
            statistic = statistic_of(criterion, sums)
            scaled = statistic if decisions.bound_scale is None else statistic / decisions.bound_scale
            columns[f"{name}_statistic"] = statistic * sums.valid
            columns[f"{name}_above"] = scaled > criterion.upper
            columns[f"{name}_below"] = scaled < criterion.lower
    if config.rollout_token_veto_threshold is not None:
        vetoed = sums.sums["vetoed"]
        columns |= {"veto_rejected": vetoed, "veto_rejected_sequences": vetoed > 0}
    return columns


def criteria_quantities(sums: SequenceSums, config: RolloutCorrectionConfig) -> dict[str, Tensor]:
    """Return the statistic of each sequence, by the name of each measured criterion."""
    measured = [criterion for criterion in config.criteria if criterion.is_measured]
    return {criterion.name: statistic_of(criterion, sums) for criterion in measured}


def shared_statistics(
    sums: SequenceSums, decisions: SequenceDecisions, config: RolloutCorrectionConfig
) -> dict[str, Tensor]:
    """Return the statistic of each sequence clamped to its bounds, by the name of each measured sequence criterion."""
    clamped = {}
    for criterion in config.criteria:
        if criterion.is_measured and not criterion.of_tokens:
            statistic = statistic_of(criterion, sums)
            if decisions.bound_scale is None:
                clamped[criterion.name] = statistic.clamp(criterion.least, criterion.upper)
            else:
                scaled = statistic / decisions.bound_scale
                clamped[criterion.name] = scaled.clamp(criterion.least, criterion.upper) * decisions.bound_scale
    return clamped


def statistic_of(criterion: Criterion, sums: SequenceSums) -> Tensor:
    """Return each sequence's statistic, [n]; 0 without a valid token. Turn criteria: the mean over tokens."""
    if criterion.unit == "turn":
        return sums.sums[f"turn_{criterion.name}"] / sums.num_tokens
    # Without a valid token the largest value is -inf.
    return criterion.statistic(sums.statistic_values).masked_fill(sums.valid == 0, 0)


def breakdowns(columns: Tensor, sums: SequenceSums, local: LocalSums, mask: Sequence[Tensor]) -> Breakdowns:
    """Return valid and rejected tokens and Σ log ρ by length, by the reward's sign, by staleness and by turn.

    Args:
        columns: [n, 3] float64, valid and rejected tokens and Σ log ρ of each sequence; 0 if another rank counts it.
        sums: the sums over whole sequences.
        local: the local tokens.
        mask: m' of each micro-batch.
    """
    shards = local.shards
    counts = local.shards.counts
    sizes = (LENGTH_BUCKETS, len(REWARD_SIGNS), counts.max_staleness + 1, TURN_BUCKETS)
    # The tables are parts of one tensor of zeros, and are filled in place.
    by_length, by_reward, by_staleness, by_turn = sums.valid.new_zeros(sum(sizes), 3).split(sizes)

    by_length.index_add_(0, torch.bucketize(sums.valid, _octaves(shards.device), right=True), columns)
    if shards.rewards is not None:
        by_reward.index_add_(0, shards.rewards.sign().long() + 1, columns)
    if shards.policy_versions is not None:
        staleness = counts.staleness(shards.policy_versions).clamp(0, counts.max_staleness)
        by_staleness.index_add_(0, staleness, columns)
    versions = [part.versions for part in shards.parts]
    turns = [part.turn_ids for part in shards.parts]
    add_tokens(by_staleness, local, mask, versions, bucket=counts.staleness)
    add_tokens(by_turn, local, mask, turns, bucket=lambda turn: turn)
    return Breakdowns(by_length, by_reward, by_staleness, by_turn)


@functools.cache
def _octaves(device: torch.device) -> Tensor:
    """2, 4, 8, …: the lengths from which on a sequence is in the next bucket."""
    return torch.tensor([2.0**octave for octave in range(1, LENGTH_BUCKETS)], dtype=torch.float64).to(
        device, non_blocking=True
    )


def add_tokens(
    table: Tensor,
    local: LocalSums,
    mask: Sequence[Tensor],
    values: Sequence[Tensor | None],
    *,
    bucket: Callable[[Tensor], Tensor],
) -> None:
    """Add valid tokens, rejected tokens and Σ log ρ to the rows of a table, [buckets, 3], by a value of each token.

    Args:
        table: is written to.
        local: the local tokens.
        mask: m' of each micro-batch.
        values: int64, one a token, for each micro-batch; None: the micro-batch adds nothing.
        bucket: function from values to rows; rows outside of the table are moved to its ends.
    """
    for part, part_values, valid, accepted in zip(local.shards.parts, values, local.valid, mask, strict=True):
        if part_values is None:
            continue
        for block in blocks_of(part):
            block_valid = block.take(valid)
            rejected = block_valid & ~block.take(accepted)
            log_ratio = torch.where(block_valid, block.take(part.train).double() - block.take(part.rollout), 0)
            columns = torch.stack([block_valid, rejected, log_ratio], dim=-1).view(-1, 3)
            rows = bucket(block.take(part_values).reshape(-1)).clamp(0, len(table) - 1)
            table.index_add_(0, rows, columns)
