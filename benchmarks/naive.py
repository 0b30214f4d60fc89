"""A plain correction for comparison: full ``[b, s]`` tensors, every metric by itself.

One process holds whole sequences. It computes token weights, the criterion token_k1 with bounds on ρ = π_train /
π_rollout, and verl's metrics of these, each with its own masked mean and its own copy to the host. ``docs/metrics.md``
has the names and definitions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

EXP_LIMIT = 20.0
# the bound of weights, the bounds of accepted ratios
UPPER = 2.0
REJECTED = (0.5, 2.0)
Metrics = dict[str, float]


def correct(train: Tensor, rollout: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Metrics]:
    """Truncated token weights, the accepted mask and all metrics of one batch.

    Args:
        train: log π_train, [b, s] float32.
        rollout: log π_rollout, [b, s] float32.
        mask: [b, s] bool, True for tokens that count, at least one. The log-probs are finite everywhere.

    Returns:
        [b, s] weights, [b, s] bool accepted mask, metrics by name without a prefix.
    """
    log_ratio = train - rollout
    raw = torch.where(mask, torch.exp(log_ratio.clamp(-EXP_LIMIT, EXP_LIMIT)), 0.0)
    weights = raw.clamp(max=UPPER)
    metrics = weight_metrics(log_ratio, weights, mask) | sequence_weight_metrics(raw, weights, mask)
    accepted, rejection = rejection_mask(log_ratio, mask)
    return weights, accepted, metrics | rejection | policy_metrics(train, rollout, mask)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum over the tokens of the mask."""
    return torch.where(mask, values, 0.0).sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over the tokens of the mask; 0 for a row without any."""
    return masked_sum(values, mask, dim) / mask.sum(dim).clamp(min=1)


def share(condition: Tensor, mask: Tensor) -> float:
    """Share of the masked entries for which the condition holds."""
    return masked_mean(condition.float(), mask).item()


def weight_metrics(log_ratio: Tensor, weights: Tensor, mask: Tensor) -> Metrics:
    """Metrics of the weights over tokens."""
    metrics = {
        "rollout_is_mean": masked_mean(weights, mask).item(),
        "rollout_is_max": weights.masked_fill(~mask, -math.inf).max().item(),
        "rollout_is_min": weights.masked_fill(~mask, math.inf).min().item(),
        "rollout_is_ratio_fraction_high": share(log_ratio > math.log(UPPER), mask),
        "rollout_is_ratio_fraction_low": share(log_ratio < -math.log(UPPER), mask),
    }
    variance = masked_mean(weights.square(), mask) - masked_mean(weights, mask).square()
    metrics["rollout_is_std"] = variance.clamp(min=0).sqrt().item()
    relative = weights / masked_mean(weights, mask)
    metrics["rollout_is_eff_sample_size"] = 1 / masked_mean(relative.square(), mask).item()
    return metrics


def sequence_weight_metrics(raw: Tensor, weights: Tensor, mask: Tensor) -> Metrics:
    """Metrics of each sequence's mean weight."""
    valid = mask.any(-1)
    means = masked_mean(weights, mask, -1)[valid]
    untruncated = masked_mean(raw, mask, -1)[valid]
    return {
        "rollout_is_seq_mean": means.mean().item(),
        "rollout_is_seq_std": sample_std(means),
        "rollout_is_seq_max": means.max().item(),
        "rollout_is_seq_min": means.min().item(),
        "rollout_is_seq_max_deviation": (means - 1).abs().max().item(),
        "rollout_is_seq_fraction_high": (untruncated > UPPER).float().mean().item(),
        "rollout_is_seq_fraction_low": (untruncated < 1 / UPPER).float().mean().item(),
    }


def sample_std(values: Tensor) -> float:
    """Standard deviation with n - 1; 0 for a single value."""
    return values.std().item() if values.numel() > 1 else 0.0


def rejection_mask(log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Metrics]:
    """The accepted tokens and the metrics of the criterion, whose statistic is -log ρ."""
    k1, (low, high) = -log_ratio, (-math.log(bound) for bound in reversed(REJECTED))
    accepted = mask & (k1 >= low) & (k1 <= high)
    prefix = "rollout_rs_token_k1_"
    metrics = statistic_metrics(prefix, k1, mask, low, high)
    for name in (prefix, "rollout_rs_"):
        metrics[f"{name}masked_fraction"] = share(~accepted, mask)
        metrics[f"{name}seq_masked_fraction"] = share((mask & ~accepted).any(-1), mask.any(-1))
    return accepted, metrics


def statistic_metrics(prefix: str, statistic: Tensor, mask: Tensor, low: float, high: float) -> Metrics:
    """Metrics of a criterion's statistic, over tokens and over sequences."""
    sequences = masked_mean(statistic, mask, -1)[mask.any(-1)]
    clamped = statistic.clamp(low, high)
    variance = masked_mean(clamped.square(), mask) - masked_mean(clamped, mask).square()
    metrics = {
        "mean": masked_mean(statistic, mask).item(),
        "max": statistic.masked_fill(~mask, -math.inf).max().item(),
        "min": statistic.masked_fill(~mask, math.inf).min().item(),
        "fraction_high": share(statistic > high, mask),
        "fraction_low": share(statistic < low, mask),
        "std": variance.clamp(min=0).sqrt().item(),
        "seq_mean": sequences.mean().item(),
        "seq_std": sample_std(sequences),
        "seq_max": sequences.max().item(),
        "seq_min": sequences.min().item(),
        "seq_max_deviation": sequences.abs().max().item(),
        "seq_fraction_high": (sequences > high).float().mean().item(),
        "seq_fraction_low": (sequences < low).float().mean().item(),
    }
    return {prefix + name: value for name, value in metrics.items()}


def policy_metrics(train: Tensor, rollout: Tensor, mask: Tensor) -> Metrics:
    """Metrics of the distance between the two policies."""
    valid = mask.any(-1)
    log_ratio = train - rollout
    train_mean = masked_mean(train, mask, -1)[valid]
    rollout_mean = masked_mean(rollout, mask, -1)[valid]
    difference = rollout_mean - train_mean
    total = masked_sum(log_ratio, mask, -1)[valid].clamp(-EXP_LIMIT, EXP_LIMIT)
    ratio = torch.exp(log_ratio.clamp(-EXP_LIMIT, EXP_LIMIT))
    return {
        "kl": masked_mean(rollout - train, mask).item(),
        "k3_kl": masked_mean(torch.exp(log_ratio.clamp(max=EXP_LIMIT)) - 1 - log_ratio, mask).item(),
        "training_ppl": torch.exp(-train_mean).mean().item(),
        "training_log_ppl": (-train_mean).mean().item(),
        "rollout_ppl": torch.exp(-rollout_mean).mean().item(),
        "rollout_log_ppl": (-rollout_mean).mean().item(),
        "log_ppl_diff": difference.mean().item(),
        "log_ppl_abs_diff": difference.abs().mean().item(),
        "log_ppl_diff_max": difference.max().item(),
        "log_ppl_diff_min": difference.min().item(),
        "ppl_ratio": torch.exp(difference).mean().item(),
        "chi2_token": masked_mean(ratio.square(), mask).item() - 1,
        "chi2_seq": torch.exp(2 * total).mean().item() - 1,
    }
