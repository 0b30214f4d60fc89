"""Facts: numbers that the rules judge, under the names of ``docs/metrics.md`` without a prefix."""

from __future__ import annotations

import math
from collections.abc import Mapping


class Facts(dict[str, float]):
    """Numbers by name; a missing one reads as NaN, so that every comparison with it is False."""

    def __missing__(self, name: str) -> float:
        return math.nan

    def has(self, *names: str) -> bool:
        """Whether all of these are known."""
        return all(name in self for name in names)


def of_tokens(row: Mapping[str, float]) -> dict[str, float]:
    """Mean, deviation and effective sample size of ρ over tokens, from metrics that do not depend on the weights.

    E[ρ] = 1 + k3 - KL, because k3 is the mean of ρ - 1 - log ρ and KL the mean of -log ρ. E[ρ²] = 1 + χ².
    """
    if not {"kl", "k3_kl"} <= row.keys():
        return {}
    mean = 1 + row["k3_kl"] - row["kl"]
    if not math.isfinite(mean):
        return {}
    if not row.get("chi2_token", -1.0) > -1:
        return {"ratio_mean": mean}
    # χ² - 2 E[ρ - 1] - E[ρ - 1]², so that a small variance is no difference of large numbers. Products,
    # because ``**`` raises OverflowError where a product is infinite.
    variance = row["chi2_token"] - 2 * (mean - 1) - (mean - 1) * (mean - 1)
    size = mean * mean / (1 + row["chi2_token"])
    return {"ratio_mean": mean, "ratio_std": math.sqrt(max(variance, 0.0)), "token_eff_sample_size": min(size, 1.0)}


def level_of(row: Mapping[str, float]) -> str | None:
    """The level of the weights that a step's metrics describe, ``none`` without weights; None if they do not tell.

    Weights of tokens have the mean and the deviation of ρ, and the largest geometric mean is in ``log_ppl_diff_min``.
    """
    if "rollout_rs_masked_fraction" in row and "rollout_is_mean" not in row:
        return "none"
    names = ("ratio_mean", "ratio_std", "rollout_is_raw_mean", "rollout_is_raw_std", "rollout_is_raw_max")
    if not {*names, "log_ppl_diff_min"} <= row.keys():
        return None
    mean, std, raw_mean, raw_std, largest = (row[name] for name in names)
    if abs(raw_mean - mean) <= 0.05 * std and abs(raw_std - std) <= 0.05 * std:
        return "token"
    top = math.log(largest) if largest > 0 else -math.inf
    return "geometric" if math.isclose(top, -row["log_ppl_diff_min"], rel_tol=1e-3, abs_tol=1e-7) else "sequence"
