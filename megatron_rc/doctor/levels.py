"""The level of a run's weights, and numbers of its tokens that are the same at every level."""

from __future__ import annotations

import math
from collections.abc import Mapping

LEVELS = ("token", "sequence", "geometric")


def of_tokens(row: Mapping[str, float]) -> dict[str, float]:
    """Mean, deviation and effective sample size of ρ over tokens, from metrics that do not depend on the weights.

    E[ρ] = 1 + k3 - KL, because k3 is the mean of ρ - 1 - log ρ and KL the mean of -log ρ. E[ρ²] = 1 + χ².
    """
    if not {"kl", "k3_kl"} <= row.keys():
        return {}
    mean = 1 + row["k3_kl"] - row["kl"]
    if not row.get("chi2_token", -1.0) > -1:
        return {"ratio_mean": mean}
    # χ² - 2 E[ρ - 1] - E[ρ - 1]², so that a small variance is no difference of large numbers.
    variance = row["chi2_token"] - 2 * (mean - 1) - (mean - 1) ** 2
    size = mean**2 / (1 + row["chi2_token"])
    return {"ratio_mean": mean, "ratio_std": math.sqrt(max(variance, 0.0)), "token_eff_sample_size": min(size, 1.0)}


def level_of(row: Mapping[str, float]) -> str | None:
    """The level of the weights that a step's metrics describe; None if they do not tell.

    Weights of tokens have the mean and the deviation of ρ. The largest geometric mean is the largest exp of a mean log
    ρ. Other weights are of sequences.
    """
    names = ("ratio_mean", "ratio_std", "rollout_is_raw_mean", "rollout_is_raw_std", "rollout_is_raw_max")
    if not {*names, "log_ppl_diff_min"} <= row.keys():
        return None
    mean, std, raw_mean, raw_std, largest = (row[name] for name in names)
    if abs(raw_mean - mean) <= 0.05 * std and abs(raw_std - std) <= 0.05 * std:
        return "token"
    top = math.log(largest) if largest > 0 else -math.inf
    return "geometric" if math.isclose(top, -row["log_ppl_diff_min"], rel_tol=1e-3, abs_tol=1e-7) else "sequence"


def level_in(settings: Mapping[str, str]) -> str | None:
    """The level in a run's flags, ``none`` without weights; None if the flags do not tell."""
    level = settings.get("rollout-is")
    return level if level is None or level in LEVELS else "none"
