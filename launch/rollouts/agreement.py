"""Compare the log-probs of a rollout engine with the trainer's, and tell rounding from mistakes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.launch.run_config import RunConfig

# Mean |Δ log-prob| in nats that rounding the weights explains: several times the values of small models.
ROUNDING = {"fp32": 1e-3, "bf16": 0.1, "fp8-e4m3": 0.25, "int8": 0.25}
LAGS = (0, 1, -1)
# A shift or another temperature counts if it leaves less than this share of the distance.
MUCH_BETTER = 0.5


@dataclass(frozen=True)
class Finding:
    """Result of one comparison: its name, whether engine and trainer agree, and a sentence."""

    about: str
    agrees: bool
    words: str


def tolerance(config: RunConfig) -> float:
    """The largest mean |Δ log-prob| in nats at which engine and trainer have the same weights."""
    if config.engine.rollout_check_tolerance is not None:
        return config.engine.rollout_check_tolerance
    # The trainer rounds as well.
    return max(ROUNDING[config.engine.rollout_dtype], ROUNDING["fp32" if config.dtype is torch.float32 else "bf16"])


def lag_distances(train: Tensor, rollout: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    """Σ|train_t - rollout_{t+lag}| over pairs of neighbouring trained tokens.

    All arguments have one shape, with neighbours along the last dimension; ``positions`` are places in the whole
    sequence. Returns [4] float64: one sum for each of ``LAGS``, then the number of pairs.
    """
    pairs = mask[..., 1:] & mask[..., :-1] & (positions.diff(dim=-1) == 1)
    train, rollout = (torch.where(mask, value.double(), 0) for value in (train, rollout))
    first, second = slice(None, -1), slice(1, None)
    sides = {0: (first, first), 1: (first, second), -1: (second, first)}
    sums = [
        torch.where(pairs, (train[..., here] - rollout[..., there]).abs(), 0).sum()
        for here, there in (sides[lag] for lag in LAGS)
    ]
    return torch.stack([*sums, pairs.sum().double()])


def judge(distances: Mapping[float, Sequence[float]], configured: float, limit: float) -> list[Finding]:
    """Findings about shift, temperature and weights.

    ``distances`` has the sums of :func:`lag_distances` over all ranks, for each temperature tried; ``configured`` is
    the trainer's, and ``limit`` the mean |Δ| in nats that rounding the engine's weights explains.
    """
    *sums, pairs = distances[configured]
    if not pairs:
        return [Finding("log-probs", False, "no response has two neighbouring tokens: ask for longer responses")]
    means = {lag: value / pairs for lag, value in zip(LAGS, sums, strict=True)}
    by_temperature = {temperature: found[0] / pairs for temperature, found in distances.items()}
    lag, best = min(means, key=means.__getitem__), min(by_temperature, key=by_temperature.__getitem__)
    shifted = lag != 0 and means[lag] < MUCH_BETTER * means[0]
    warmer = best != configured and by_temperature[best] < MUCH_BETTER * means[0]
    evidence = ", ".join(f"{lag:+d}: {mean:.4f}" for lag, mean in means.items())
    close = means[0] <= limit
    return [
        Finding(
            "shift",
            not shifted,
            f"mean |Δ log-prob| by lag {evidence} nats"
            + (f": the engine's log-probs are shifted by {lag:+d}; align both to the label tokens" if shifted else ""),
        ),
        Finding("temperature and log-prob mode", not warmer, _temperature(by_temperature, configured, best, warmer)),
        Finding(
            "weights",
            close,
            f"mean |Δ log-prob| {means[0]:.5f} nats, up to {limit} is rounding"
            + ("" if close or shifted or warmer else ": other weights, a stale cache, or another tokenizer"),
        ),
    ]


def _temperature(distances: Mapping[float, float], configured: float, best: float, warmer: bool) -> str:
    words = f"closest at {best}, scored at {configured} ({distances[best]:.4f} and {distances[configured]:.4f} nats)"
    if not warmer:
        return f"{words}: " + (
            "at 1 raw and processed log-probs are the same" if configured == 1 else "processed log-probs"
        )
    if best == 1:
        return f"{words}: these are raw log-probs, before temperature; ask the engine for processed ones"
    return f"{words}: the engine samples at another temperature than --rl-default-temperature"
