"""Sums over the batch that whole sequences contribute: [n] vectors by name, added up on the first CP rank alone."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rc.correction.header import Columns, HeaderFields
from megatron_rc.correction.header_fields import LENGTH_BUCKETS, REWARD_SIGNS
from megatron_rc.correction.header_records import Source
from megatron_rc.correction.histogram import bins_of
from megatron_rc.correction.rejection import Verdicts, accepted_weight, sequence_statistic, threshold_scale
from megatron_rc.correction.shards import Shards
from megatron_rc.correction.token_pass.terms import Sums, largest
from megatron_rc.correction.weights import bounded_weights, log_bounds, scaled_bounds
from megatron_rc.numerics import EXP_LIMIT, MAX_ZERO_LOG_PROBS, PPL_LIMIT, exp_ratio
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.criterion import Criterion

Named = dict[str, Tensor]  # by the fields' names, record.field


def sequence_log_weights(sums: Sums, config: RolloutCorrectionConfig) -> Tensor:
    """[n] float64: log of the unbounded weight that all tokens of a sequence share."""
    return sums["log_ratio"] if config.rollout_is == "sequence" else sums["mean_log_ratio"]


def sequence_totals(
    sums: Sums, verdicts: Verdicts, config: RolloutCorrectionConfig, fields: HeaderFields
) -> tuple[Columns, Tensor]:
    """(sums, maxima) over the local sequences, float64; those without a valid token are in none of them."""
    some = sums["valid"] > 0
    numbers, flags, maxima = _policy_rows(sums, verdicts)
    histograms = sums["valid"].new_zeros(fields.sums["weight_bins_until"])
    if config.rollout_is is not None:
        rows, per_sequence = _weight_rows(sums, verdicts, config)
        for known, more in zip((numbers, flags, maxima), rows, strict=True):
            known |= more
        # Each sequence counts once; in the second histogram, which only shared weights have, as often as it has tokens.
        counted = [some.double(), sums["valid"]][: len(histograms)]
        histograms = bins_of(per_sequence.log(), torch.stack(counted)).cumsum(1)
    for criterion in config.criteria:
        rejected = verdicts.rejected_by[criterion.name]
        numbers[f"{criterion.name}.rejected"] = rejected
        flags[f"{criterion.name}.sequences_rejected"] = rejected > 0
        if criterion.is_measured:
            _add_statistic(criterion, sums, threshold_scale(sums, config), numbers, flags, maxima)
    if config.rollout_token_veto_threshold is not None:
        numbers["veto.catastrophic"] = sums["catastrophic"]
        flags["veto.vetoed"] = sums["catastrophic"] > 0
    # Alike ones at once: tensors of several dtypes are stacked one by one.
    columns: Columns = {
        Source.SEQUENCES: fields.stack(Source.SEQUENCES, numbers) @ some.double(),
        Source.FLAGS: fields.stack(Source.FLAGS, flags).double() @ some.double(),
        "weight_bins_until": histograms,
    }
    return columns, largest(torch.where(some, fields.stack(Source.SEQUENCE_MAXIMA, maxima), -torch.inf))


def _policy_rows(sums: Sums, verdicts: Verdicts) -> tuple[Named, Named, Named]:
    """(numbers, flags, maxima) of the two policies, [n] each."""
    log_ratio = sums["log_ratio"]
    logs = torch.stack([sums["train"], sums["rollout"], log_ratio]).div_(-sums["num_tokens"])
    ppls = logs.clamp(-PPL_LIMIT, PPL_LIMIT).exp_()
    excess = torch.expm1(log_ratio.clamp(-EXP_LIMIT, EXP_LIMIT))
    numbers = {
        "valid": sums["valid"],
        "log_ratio": log_ratio,
        "excess": sums["excess"],
        "accepted": verdicts.accepted,
        **dict(zip(("train_log_ppl", "rollout_log_ppl", "log_ppl_diff"), logs.unbind(), strict=True)),
        **dict(zip(("train_ppl", "rollout_ppl", "ppl_ratio"), ppls.unbind(), strict=True)),
        "log_ppl_abs_diff": sums["mean_log_ratio"].abs(),
        "sequence_excess": excess,
        "sequence_excess_squared": excess.square(),
    }
    flags = {"sequences": sums["valid"] > 0, "sequences_with_rejected": verdicts.accepted < sums["valid"]}
    maxima = {"log_ppl_diff_max": numbers["log_ppl_diff"], "log_ppl_diff_min": sums["mean_log_ratio"]}
    return _of("policy", numbers), _of("policy", flags), _of("policy", maxima)


def _weight_rows(
    sums: Sums, verdicts: Verdicts, config: RolloutCorrectionConfig
) -> tuple[tuple[Named, Named, Named], Tensor]:
    """((numbers, flags, maxima), the mean bounded weight of each sequence)."""
    by_token = config.rollout_is == "token"
    scale = threshold_scale(sums, config)
    rows, raw, weight = (_token_rows if by_token else _shared_rows)(sums, verdicts, config)
    low, high = config.is_bounds if scale is None else scaled_bounds(config, scale)
    excess = weight - 1
    numbers, flags, maxima = rows
    numbers |= _of("weights", {"per_sequence_excess": excess, "per_sequence_excess_squared": excess.square()})
    flags |= _of("weights", {"per_sequence_high": raw > high, "per_sequence_low": raw < low})
    maxima |= _of("weights", {"per_sequence_max": weight, "per_sequence_min": -weight})
    return rows, weight


def _token_rows(
    sums: Sums, verdicts: Verdicts, config: RolloutCorrectionConfig
) -> tuple[tuple[Named, Named, Named], Tensor, Tensor]:
    """(rows, raw, bounded) where each token has its weight; raw and bounded are means over the sequence."""
    numbers = {"weight": sums["weight"], "normalize_weight": sums["weight"], "normalize_count": sums["valid"]}
    if config.rollout_is_batch_normalize_scope == "accepted":
        numbers |= {"normalize_weight": accepted_weight(sums, verdicts), "normalize_count": verdicts.accepted}
    flags = {}
    if config.is_mode == "mask":
        flags["masked.sequences"] = sums["outside_above"] + sums["outside_below"] > 0
    rows = _of("weights", numbers), flags, Named()
    return rows, 1 + sums["excess"] / sums["num_tokens"], sums["weight"] / sums["num_tokens"]


def _shared_rows(
    sums: Sums, verdicts: Verdicts, config: RolloutCorrectionConfig
) -> tuple[tuple[Named, Named, Named], Tensor, Tensor]:
    """(rows, raw, bounded) where all tokens of a sequence share a weight."""
    valid, scale = sums["valid"], threshold_scale(sums, config)
    log_weight = sequence_log_weights(sums, config)
    raw, weight = exp_ratio(log_weight), bounded_weights(log_weight, config, scale=scale)
    lower, upper = log_bounds(config)
    tested = log_weight if scale is None else log_weight / scale
    above, below = tested > upper, tested < lower
    counted = verdicts.accepted > 0 if config.rollout_is_batch_normalize_scope == "accepted" else valid > 0
    numbers = {
        "weight": weight * valid,
        "normalize_weight": torch.where(counted, weight, 0),
        "raw": raw * valid,
        "raw_squared": raw.square() * valid,
        "raw_excess_squared": (raw - 1).square() * valid,
        "weight_squared": weight.square() * valid,
        "weight_excess_squared": (weight - 1).square() * valid,
        "tokens_above": torch.where(above, valid, 0),
        "tokens_below": torch.where(below, valid, 0),
    }
    flags = _of("weights", {"normalize_count": counted, "above": above, "below": below})
    maxima = _of("weights", {"log_weight_max": log_weight, "log_weight_min": -log_weight})
    if config.is_mode == "mask":
        flags["masked.sequences"] = above | below
    if config.is_mode == "mask" or scale is not None:
        maxima |= _of("extremes", {"weight_max": weight, "weight_min": -weight})
    return (_of("weights", numbers), flags, maxima), raw, weight


def _add_statistic(
    criterion: Criterion, sums: Sums, scale: Tensor | None, numbers: Named, flags: Named, maxima: Named
) -> None:
    name, valid = criterion.name, sums["valid"]
    # Without a sequence the largest value is -inf and the smallest +inf.
    statistic = torch.where(valid > 0, sequence_statistic(criterion, sums), 0)
    tested = statistic if scale is None else statistic / scale
    values = {"statistic": statistic, "statistic_squared": statistic.square(), "total": statistic * valid}
    if criterion.unit != "token":
        clamped = tested.clamp(criterion.least, criterion.upper) * (1 if scale is None else scale)
        values |= {"clamped": clamped * valid, "clamped_squared": clamped.square() * valid}
    numbers |= _of(name, values)
    flags |= _of(name, {"statistic_high": tested > criterion.upper, "statistic_low": tested < criterion.lower})
    maxima |= _of(name, {"statistic_max": statistic, "statistic_min": -statistic})


def _of(record: str, values: Sums) -> Named:
    return {f"{record}.{name}": value for name, value in values.items()}


def breakdown_totals(sums: Sums, verdicts: Verdicts, shards: Shards) -> Columns:
    """Sums in fixed buckets, [buckets, 2] float64 valid and rejected tokens, by length and by the reward's sign.

    By staleness [buckets, 3], with the sum of log ρ; zeros here where tokens have their own versions.
    """
    valid = sums["valid"]
    columns = torch.stack([valid, valid - verdicts.accepted], dim=1)
    by_version = torch.cat([columns, sums["log_ratio"].unsqueeze(1)], dim=1)
    octave = (torch.frexp(sums["num_tokens"]).exponent - 1).clamp_(max=LENGTH_BUCKETS - 1)
    signs = None if shards.rewards is None else shards.rewards.sign().nan_to_num().long() + 1
    versions = None if shards.versions is None else staleness(shards.versions, shards)
    return {
        "by_length": _bucket(octave, LENGTH_BUCKETS, columns),
        "by_reward": _bucket(signs, len(REWARD_SIGNS), columns),
        "by_staleness": _bucket(versions, shards.counts.max_staleness + 1, by_version),
    }


def data_totals(sums: Sums, shards: Shards, fields: HeaderFields) -> Tensor:
    """How many sequences have a side input that cannot be right, and what an error message has to know."""
    # Log-probs are at most 0: but for rounding above it, which may cancel, all are 0 where their sum is.
    zeros = (sums["rollout"] == 0) & (sums["valid"] > MAX_ZERO_LOG_PROBS)
    flags = shards.bad | {"zero_log_probs": zeros}
    flagged = (torch.stack(list(flags.values())) & (sums["response"] > 0)).sum(1, dtype=torch.float64)
    tokens = (sums["response"] - sums["valid"]).sum()
    values = dict(zip(flags, flagged, strict=True))
    values |= {"bad_tokens": tokens, "default_ids": tokens.new_full((), shards.default_ids)}
    return fields.stack(Source.DATA, _of("data", values))


def token_staleness(
    valid: Tensor, log_ratio: Tensor, accepted: Tensor, versions: Tensor, shards: Shards
) -> tuple[Tensor, Tensor]:
    """The sums by staleness of some tokens that have their own versions, and how many versions are too new."""
    columns = torch.stack([valid.double(), (valid & ~accepted).double(), log_ratio.double()], dim=-1).reshape(-1, 3)
    newer = valid & (versions > (shards.counts.current_version or 0))
    # Additions to one number wait for each other on a GPU: the tokens go to so many tables in turns.
    buckets, tables = shards.counts.max_staleness + 1, 64
    turns = torch.arange(len(columns), device=columns.device) % tables
    found = _bucket(staleness(versions, shards).reshape(-1) + buckets * turns, buckets * tables, columns)
    return found.view(tables, buckets, 3).sum(0), newer.sum()


def staleness(versions: Tensor, shards: Shards) -> Tensor:
    """The bucket of each version: current_version - version in [0, max_staleness]."""
    return ((shards.counts.current_version or 0) - versions).clamp(0, shards.counts.max_staleness)


def mini_batch_counts(verdicts: Verdicts, shards: Shards) -> Tensor:
    """[num_mini_batches, 4] float64: tokens and sequences under m, then under m'."""
    tokens, accepted = verdicts.tokens, verdicts.accepted
    columns = torch.stack([tokens, tokens > 0, accepted, accepted > 0], dim=1)
    return _bucket(shards.mini_batch_ids, shards.counts.num_mini_batches, columns)


def weighed_counts(per_sequence: Tensor, shards: Shards) -> Tensor:
    """[num_mini_batches] float64: accepted tokens whose weight is not 0, from [n] of each sequence."""
    return _bucket(shards.mini_batch_ids, shards.counts.num_mini_batches, per_sequence.double().unsqueeze(1)).squeeze(1)


def _bucket(index: Tensor | None, count: int, columns: Tensor) -> Tensor:
    """[count, k] float64: what is in each bucket; nothing without an index."""
    buckets = torch.zeros(count, columns.shape[1], dtype=torch.float64, device=columns.device)
    return buckets if index is None else buckets.index_add_(0, index, columns)
