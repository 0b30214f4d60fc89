"""Sums over the batch that whole sequences contribute: [n] vectors by name, added up on the first CP rank alone."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rc.config import RolloutCorrectionConfig
from megatron_rc.criteria import Criterion
from megatron_rc.inputs import Shards
from megatron_rc.rejection import Verdicts, accepted_weight, sequence_statistic, threshold_scale
from megatron_rc.statistics import Sums
from megatron_rc.weights import EXP_LIMIT, bounded_weights, exp_ratio, log_bounds, scaled_bounds

PPL_LIMIT = 80.0  # a perplexity is exp(clamp(x, ±80))
LENGTH_BUCKETS = 24  # sequences of 2^i to 2^(i+1) - 1 tokens
REWARD_SIGNS = ("negative", "zero", "positive")


def sequence_log_weights(sums: Sums, config: RolloutCorrectionConfig) -> Tensor:
    """[n] float64: log of the unbounded weight that all tokens of a sequence share."""
    total = sums["train"] - sums["rollout"]
    return total if config.rollout_is == "sequence" else total / sums["valid"].clamp(min=1)


def sequence_totals(sums: Sums, verdicts: Verdicts, config: RolloutCorrectionConfig) -> tuple[Sums, Sums]:
    """(sums, maxima) over the local sequences, 0-D float64 by name; those without a valid token are in none of them."""
    totals, maxima = _policy_totals(sums)
    totals |= {
        "accepted_tokens": verdicts.accepted,
        "sequences_with_rejected": verdicts.accepted < sums["valid"],
    }
    if config.rollout_is is not None:
        _weight_totals(sums, verdicts, config, totals, maxima)
    for criterion in config.criteria:
        rejected = verdicts.rejected_by[criterion.name]
        totals[f"rejected_{criterion.name}"] = rejected
        totals[f"sequences_rejected_{criterion.name}"] = rejected > 0
        if criterion.has_statistic:
            _criterion_totals(criterion, sums, threshold_scale(sums, config), totals, maxima)
    if config.rollout_token_veto_threshold is not None:
        totals["catastrophic"] = sums["catastrophic"]
        totals["vetoed"] = sums["catastrophic"] > 0
    some = sums["valid"] > 0
    added = torch.where(some, torch.stack(list(totals.values())), 0).sum(1)
    largest = _largest(torch.where(some, torch.stack(list(maxima.values())), -torch.inf))
    bad = (sums["response"] - sums["valid"]).sum()
    return (
        dict(zip(totals, added.unbind(), strict=True)) | {"bad_tokens": bad},
        dict(zip(maxima, largest.unbind(), strict=True)),
    )


def _largest(rows: Tensor) -> Tensor:
    """[k] of [k, n]; -inf of nothing."""
    return torch.cat([rows, rows.new_full((len(rows), 1), -torch.inf)], dim=1).amax(1)


def _policy_totals(sums: Sums) -> tuple[Sums, Sums]:
    length = sums["valid"].clamp(min=1)
    train, rollout = sums["train"] / length, sums["rollout"] / length
    difference = rollout - train
    excess = torch.expm1((sums["train"] - sums["rollout"]).clamp(-EXP_LIMIT, EXP_LIMIT))
    totals = {
        "valid": sums["valid"],
        "log_ratio": sums["train"] - sums["rollout"],
        "excess": sums["excess"],
        "sequences": torch.ones_like(length),
        "train_ppl": _ppl(-train),
        "rollout_ppl": _ppl(-rollout),
        "train_log_ppl": -train,
        "rollout_log_ppl": -rollout,
        "log_ppl_diff": difference,
        "log_ppl_abs_diff": difference.abs(),
        "ppl_ratio": _ppl(difference),
        "sequence_excess": excess,
        "sequence_excess_squared": excess.square(),
    }
    return totals, {"log_ppl_diff": difference, "-log_ppl_diff": -difference}


def _weight_totals(sums: Sums, verdicts: Verdicts, config: RolloutCorrectionConfig, totals: Sums, maxima: Sums) -> None:
    """Weights of sequences: those that all tokens share, or the mean of token-level ones."""
    valid, length, scale = sums["valid"], sums["valid"].clamp(min=1), threshold_scale(sums, config)
    if config.rollout_is == "token":
        raw, weight = 1 + sums["excess"] / length, sums["weight"] / length
        if config.is_mode == "mask":
            totals["sequences_outside"] = sums["outside_above"] + sums["outside_below"] > 0
        totals["normalize_weight"], totals["normalize_count"] = sums["weight"], valid
        if config.rollout_is_batch_normalize_scope == "accepted":
            totals["normalize_weight"] = accepted_weight(sums, verdicts)
            totals["normalize_count"] = verdicts.accepted
    else:
        log_weight = sequence_log_weights(sums, config)
        raw, weight = exp_ratio(log_weight), bounded_weights(log_weight, config, scale=scale)
        lower, upper = log_bounds(config)
        tested = log_weight if scale is None else log_weight / scale
        outside = {"above": tested > upper, "below": tested < lower}
        totals |= outside
        totals |= {f"tokens_{name}": torch.where(flag, valid, 0) for name, flag in outside.items()}
        totals["sequences_outside"] = outside["above"] | outside["below"]
        totals["raw_excess_squared"] = valid * (raw - 1).square()
        totals["weight_excess_squared"] = valid * (weight - 1).square()
        maxima |= {"log_weight": log_weight, "-log_weight": -log_weight, "weight": weight}
        if scale is not None:
            maxima["-weight"] = -weight
        counted = verdicts.accepted > 0 if config.rollout_is_batch_normalize_scope == "accepted" else valid > 0
        totals["normalize_weight"] = torch.where(counted, weight, 0)
        totals["normalize_count"] = counted
    low, high = config.is_bounds if scale is None else scaled_bounds(config, scale)
    totals |= {
        "raw": raw * valid,
        "weight": weight * valid,
        "sequence_weight_excess": weight - 1,
        "sequence_weight_excess_squared": (weight - 1).square(),
        "sequence_weight_high": raw > high,
        "sequence_weight_low": raw < low,
    }
    maxima |= {"sequence_weight": weight, "-sequence_weight": -weight}


def _criterion_totals(criterion: Criterion, sums: Sums, scale: Tensor | None, totals: Sums, maxima: Sums) -> None:
    name, valid = criterion.name, sums["valid"]
    if criterion.aggregation == "seq_max":
        statistic = torch.where(valid > 0, sums[f"max_{name}"], 0)
    else:
        statistic = sequence_statistic(criterion, sums)
    tested = statistic if scale is None else statistic / scale
    high, low = tested > criterion.upper, tested < criterion.lower
    totals |= {
        f"sequence_{name}": statistic,
        f"sequence_squared_{name}": statistic.square(),
        f"sequence_high_{name}": high,
        f"sequence_low_{name}": low,
        f"total_{name}": statistic * valid,
    }
    if criterion.aggregation != "token":
        clamped = tested.clamp(criterion.floor, criterion.upper) * (1 if scale is None else scale)
        totals |= {f"clamped_{name}": clamped * valid, f"clamped_squared_{name}": clamped.square() * valid}
    maxima |= {f"sequence_{name}": statistic, f"-sequence_{name}": -statistic}


def breakdown_totals(sums: Sums, verdicts: Verdicts, shards: Shards) -> Sums:
    """Sums in fixed buckets, [buckets, 2] float64 valid and rejected tokens, by length and by the reward's sign.

    By staleness [buckets, 3], with the sum of log ρ; zeros here where tokens have their own versions.
    """
    valid = sums["valid"]
    columns = torch.stack([valid, valid - verdicts.accepted], dim=1)
    by_version = torch.cat([columns, (sums["train"] - sums["rollout"]).unsqueeze(1)], dim=1)
    length = torch.frexp(valid.clamp(min=1)).exponent.long() - 1
    nothing = torch.zeros_like(shards.mini_batch_ids)
    signs = nothing if shards.rewards is None else shards.rewards.sign().nan_to_num().long() + 1
    versions = nothing if shards.versions is None else staleness(shards.versions, shards)
    return {
        "length": _bucket(length, LENGTH_BUCKETS, columns),
        "reward": _bucket(signs, len(REWARD_SIGNS), columns * (shards.rewards is not None)),
        "staleness": _bucket(versions, shards.sizes.max_staleness + 1, by_version * (shards.versions is not None)),
    }


def token_staleness(valid: Tensor, log_ratio: Tensor, accepted: Tensor, versions: Tensor, shards: Shards) -> Sums:
    """The sums by staleness of some tokens that have their own versions, and how many versions are too new."""
    columns = torch.stack([valid.double(), (valid & ~accepted).double(), log_ratio.double()], dim=-1)
    index = staleness(versions, shards).reshape(-1)
    newer = valid & (versions > (shards.sizes.current_version or 0))
    return {
        "staleness": _bucket(index, shards.sizes.max_staleness + 1, columns.reshape(-1, 3)),
        "bad_policy_versions": newer.sum().double(),
    }


def staleness(versions: Tensor, shards: Shards) -> Tensor:
    """The bucket of each version: current_version - version in [0, max_staleness]."""
    return ((shards.sizes.current_version or 0) - versions).clamp(0, shards.sizes.max_staleness)


def mini_batch_counts(verdicts: Verdicts, shards: Shards) -> Tensor:
    """[num_mini_batches, 4] float64: tokens and sequences under m, then under m'."""
    tokens, accepted = verdicts.tokens, verdicts.accepted
    columns = torch.stack([tokens, (tokens > 0).double(), accepted, (accepted > 0).double()], dim=1)
    return _bucket(shards.mini_batch_ids, shards.sizes.num_mini_batches, columns)


def _bucket(index: Tensor, count: int, columns: Tensor) -> Tensor:
    buckets = torch.zeros(count, columns.shape[1], dtype=torch.float64, device=columns.device)
    # The last bucket holds everything from there on.
    return buckets.index_add_(0, index.clamp(max=count - 1), columns)


def _ppl(value: Tensor) -> Tensor:
    return value.clamp(-PPL_LIMIT, PPL_LIMIT).exp()
