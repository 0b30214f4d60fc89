"""The correction and the loss in float64 loops, one process, whole sequences. Imports nothing of the library."""

from __future__ import annotations

import math


def clamp(x: float, limit: float = 20.0) -> float:
    return max(-limit, min(limit, x))


def divergence(kind: str, x: float) -> float:
    return {"k1": x, "k2": x * x / 2, "k3": math.exp(min(x, 20.0)) - 1 - x}[kind]


def correct(train, rollout, mask, *, level=None, threshold=2.0, criteria=()):
    """(weights, accepted mask) as nested lists; ``criteria`` are (aggregation, divergence, lower, upper) in nats."""
    weights, accepted = [], []
    for i in range(len(mask)):
        valid = [t for t in range(len(mask[i])) if mask[i][t]]
        x = {t: train[i][t] - rollout[i][t] for t in valid}
        total = math.fsum(x.values())
        row, keep = [], []
        for t in range(len(mask[i])):
            if t not in x:
                row.append(0.0)
                keep.append(False)
                continue
            raw = {"token": x[t], "sequence": total, "geometric": total / len(valid), None: 0.0}[level]
            row.append(min(math.exp(clamp(raw)), threshold))
            verdicts = []
            for aggregation, kind, lower, upper in criteria:
                statistic = divergence(kind, x[t])
                if aggregation != "token":
                    statistic = math.fsum(divergence(kind, x[u]) for u in valid)
                    statistic /= len(valid) if aggregation == "seq_mean" else 1
                verdicts.append(lower <= statistic <= upper)
            keep.append(all(verdicts))
        weights.append(row)
        accepted.append(keep)
    return weights, accepted


def distance_to_bounds(train, rollout, mask, criteria) -> float:
    """How far the statistic that comes nearest to a bound stays away from it."""
    nearest = math.inf
    for i in range(len(mask)):
        x = [train[i][t] - rollout[i][t] for t in range(len(mask[i])) if mask[i][t]]
        for aggregation, kind, lower, upper in criteria:
            values = [divergence(kind, value) for value in x]
            if aggregation != "token" and values:
                values = [math.fsum(values) / (len(values) if aggregation == "seq_mean" else 1)]
            nearest = min([nearest, *(abs(value - bound) for value in values for bound in (lower, upper))])
    return nearest


def metrics(train, rollout, mask, weights, accepted):
    """Some metrics of the whole batch, from their definitions."""
    x = [train[i][t] - rollout[i][t] for i in range(len(mask)) for t in range(len(mask[i])) if mask[i][t]]
    w = [weights[i][t] for i in range(len(mask)) for t in range(len(mask[i])) if mask[i][t]]
    kept = sum(sum(row) for row in accepted)
    sequences = [
        [(train[i][t], rollout[i][t]) for t in range(len(mask[i])) if mask[i][t]]
        for i in range(len(mask))
        if any(mask[i])
    ]
    mean = [(sum(a for a, _ in s) / len(s), sum(b for _, b in s) / len(s)) for s in sequences]
    total = [sum(a - b for a, b in s) for s in sequences]
    n, k = len(x), len(sequences)
    average = sum(w) / n
    return {
        "kl": -sum(x) / n,
        "k3_kl": sum(divergence("k3", value) for value in x) / n,
        "training_ppl": sum(math.exp(-a) for a, _ in mean) / k,
        "rollout_ppl": sum(math.exp(-b) for _, b in mean) / k,
        "log_ppl_diff_max": max(b - a for a, b in mean),
        "log_ppl_diff_min": min(b - a for a, b in mean),
        "ppl_ratio": sum(math.exp(b - a) for a, b in mean) / k,
        "chi2_token": sum(math.exp(2 * clamp(value)) for value in x) / n - 1,
        "chi2_seq": sum(math.exp(2 * clamp(value)) for value in total) / k - 1,
        "rollout_is_mean": average,
        "rollout_is_std": math.sqrt(sum((value - average) ** 2 for value in w) / n),
        "rollout_is_min": min(w),
        "rollout_is_max": max(w),
        "rollout_is_eff_sample_size": sum(w) ** 2 / (n * sum(value * value for value in w)),
        "rollout_rs_masked_fraction": 1 - kept / n,
        "num_tokens": n,
        "num_sequences": k,
    }
