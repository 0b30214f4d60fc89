"""Sums over the batch that whole sequences contribute: [n] vectors by name, added up on the first CP rank alone."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rc.correction.inputs import Shards
from megatron_rc.correction.rejection import Verdicts, accepted_weight, sequence_statistic, threshold_scale
from megatron_rc.correction.token_pass.terms import Columns, Sums, largest
from megatron_rc.correction.weights import bounded_weights, log_bounds, scaled_bounds
from megatron_rc.numerics import EXP_LIMIT, PPL_LIMIT, exp_ratio
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.criteria import Criterion

LENGTH_BUCKETS = 24  # sequences of 2^i to 2^(i+1) - 1 tokens
REWARD_SIGNS = ("negative", "zero", "positive")


def sequence_log_weights(sums: Sums, config: RolloutCorrectionConfig) -> Tensor:
    """[n] float64: log of the unbounded weight that all tokens of a sequence share."""
    return sums["log_ratio"] if config.rollout_is == "sequence" else sums["mean_log_ratio"]


def sequence_totals(sums: Sums, verdicts: Verdicts, config: RolloutCorrectionConfig) -> tuple[Columns, Columns]:
    """(sums, maxima) over the local sequences, float64; those without a valid token are in none of them."""
    some = sums["valid"] > 0
    totals, maxima = _policy_totals(sums)
    totals |= {
        "sequences": some,
        "accepted_tokens": verdicts.accepted,
        "sequences_with_rejected": verdicts.accepted < sums["valid"],
    }
    if config.rollout_is is not None:
        _weight_totals(sums, verdicts, config, totals, maxima)
    for criterion in config.criteria:
        rejected = verdicts.rejected_by[criterion.name]
        totals[f"rejected_{criterion.name}"] = rejected
        totals[f"sequences_rejected_{criterion.name}"] = rejected > 0
        if criterion.is_measured:
            _criterion_totals(criterion, sums, threshold_scale(sums, config), totals, maxima)
    if config.rollout_token_veto_threshold is not None:
        totals["catastrophic"] = sums["catastrophic"]
        totals["vetoed"] = sums["catastrophic"] > 0
    extremes = largest(torch.where(some, torch.stack(list(maxima.values())), -torch.inf))
    flags = {name: total for name, total in totals.items() if total.dtype == torch.bool}
    numbers = {name: total for name, total in totals.items() if name not in flags}
    # Alike ones at once: tensors of several dtypes are stacked one by one.
    added = (torch.stack(list(values.values())).double() @ some.double() for values in (numbers, flags))
    return dict(zip((tuple(numbers), tuple(flags)), added, strict=True)), {tuple(maxima): extremes}


def _policy_totals(sums: Sums) -> tuple[Sums, Sums]:
    log_ratio = sums["log_ratio"]
    logs = torch.stack([sums["train"], sums["rollout"], log_ratio]).div_(-sums["length"])
    ppls = logs.clamp(-PPL_LIMIT, PPL_LIMIT).exp_()
    excess = torch.expm1(log_ratio.clamp(-EXP_LIMIT, EXP_LIMIT))
    totals = {"valid": sums["valid"], "log_ratio": log_ratio, "excess": sums["excess"]}
    totals |= zip(("train_log_ppl", "rollout_log_ppl", "log_ppl_diff"), logs.unbind(), strict=True)
    totals |= zip(("train_ppl", "rollout_ppl", "ppl_ratio"), ppls.unbind(), strict=True)
    totals |= {
        "log_ppl_abs_diff": sums["mean_log_ratio"].abs(),
        "sequence_excess": excess,
        "sequence_excess_squared": excess.square(),
    }
    return totals, {"log_ppl_diff": totals["log_ppl_diff"], "-log_ppl_diff": sums["mean_log_ratio"]}


def _weight_totals(sums: Sums, verdicts: Verdicts, config: RolloutCorrectionConfig, totals: Sums, maxima: Sums) -> None:
    """Weights of sequences: those that all tokens share, or the mean of token-level ones."""
    valid, length, scale = sums["valid"], sums["length"], threshold_scale(sums, config)
    if config.rollout_is == "token":
        raw, weight = 1 + sums["excess"] / length, sums["weight"] / length
        totals["weight"] = sums["weight"]
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
        totals |= outside | {"raw": raw * valid, "weight": weight * valid}
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
    excess = weight - 1
    totals |= {
        "sequence_weight_excess": excess,
        "sequence_weight_excess_squared": excess.square(),
        "sequence_weight_high": raw > high,
        "sequence_weight_low": raw < low,
    }
    maxima |= {"sequence_weight": weight, "-sequence_weight": -weight}


def _criterion_totals(criterion: Criterion, sums: Sums, scale: Tensor | None, totals: Sums, maxima: Sums) -> None:
    name, valid = criterion.name, sums["valid"]
    # An extreme of nothing is infinite.
    statistic = torch.where(valid > 0, sequence_statistic(criterion, sums), 0)
    tested = statistic if scale is None else statistic / scale
    high, low = tested > criterion.upper, tested < criterion.lower
    totals |= {
        f"sequence_{name}": statistic,
        f"sequence_squared_{name}": statistic.square(),
        f"sequence_high_{name}": high,
        f"sequence_low_{name}": low,
        f"total_{name}": statistic * valid,
    }
    if criterion.unit != "token":
        clamped = tested.clamp(criterion.least, criterion.upper) * (1 if scale is None else scale)
        totals |= {f"clamped_{name}": clamped * valid, f"clamped_squared_{name}": clamped.square() * valid}
    maxima |= {f"sequence_{name}": statistic, f"-sequence_{name}": -statistic}


def breakdown_totals(sums: Sums, verdicts: Verdicts, shards: Shards) -> Columns:
    """Sums in fixed buckets, [buckets, 2] float64 valid and rejected tokens, by length and by the reward's sign.

    By staleness [buckets, 3], with the sum of log ρ; zeros here where tokens have their own versions.
    """
    valid = sums["valid"]
    columns = torch.stack([valid, valid - verdicts.accepted], dim=1)
    by_version = torch.cat([columns, sums["log_ratio"].unsqueeze(1)], dim=1)
    octave = (torch.frexp(sums["length"]).exponent - 1).clamp_(max=LENGTH_BUCKETS - 1)
    signs = None if shards.rewards is None else shards.rewards.sign().nan_to_num().long() + 1
    versions = None if shards.versions is None else staleness(shards.versions, shards)
    return {
        "length": _bucket(octave, LENGTH_BUCKETS, columns),
        "reward": _bucket(signs, len(REWARD_SIGNS), columns),
        "staleness": _bucket(versions, shards.counts.max_staleness + 1, by_version),
    }


def side_totals(sums: Sums, shards: Shards) -> Columns:
    """How many sequences have a side input that cannot be right, and what an error message has to know."""
    names = tuple(shards.bad)
    bad = (torch.stack(list(shards.bad.values())) & (sums["response"] > 0)).sum(1, dtype=torch.float64)
    tokens = (sums["response"] - sums["valid"]).sum()
    return {names: bad, ("bad_tokens", "default_ids"): torch.stack([tokens, tokens.new_full((), shards.default_ids)])}


def token_staleness(
    valid: Tensor, log_ratio: Tensor, accepted: Tensor, versions: Tensor, shards: Shards
) -> tuple[Tensor, Tensor]:
    """The sums by staleness of some tokens that have their own versions, and how many versions are too new."""
    columns = torch.stack([valid.double(), (valid & ~accepted).double(), log_ratio.double()], dim=-1)
    index = staleness(versions, shards).reshape(-1)
    newer = valid & (versions > (shards.counts.current_version or 0))
    return _bucket(index, shards.counts.max_staleness + 1, columns.reshape(-1, 3)), newer.sum()


def staleness(versions: Tensor, shards: Shards) -> Tensor:
    """The bucket of each version: current_version - version in [0, max_staleness]."""
    return ((shards.counts.current_version or 0) - versions).clamp(0, shards.counts.max_staleness)


def mini_batch_counts(verdicts: Verdicts, shards: Shards) -> Tensor:
    """[num_mini_batches, 4] float64: tokens and sequences under m, then under m'."""
    tokens, accepted = verdicts.tokens, verdicts.accepted
    columns = torch.stack([tokens, tokens > 0, accepted, accepted > 0], dim=1)
    return _bucket(shards.mini_batch_ids, shards.counts.num_mini_batches, columns)


def _bucket(index: Tensor | None, count: int, columns: Tensor) -> Tensor:
    """[count, k] float64: what is in each bucket; nothing without an index."""
    buckets = torch.zeros(count, columns.shape[1], dtype=torch.float64, device=columns.device)
    return buckets if index is None else buckets.index_add_(0, index, columns)
