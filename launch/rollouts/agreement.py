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
    is_pair = mask[..., 1:] & mask[..., :-1] & (positions.diff(dim=-1) == 1)
    train = torch.where(mask, train.double(), 0)
    rollout = torch.where(mask, rollout.double(), 0)
    first = slice(None, -1)
    second = slice(1, None)
    # Token of the pair that the trainer scored, and the one whose log-prob of the engine it is compared with.
    tokens_of_lag = {0: (first, first), 1: (first, second), -1: (second, first)}
    sums = []
    for lag in LAGS:
        of_trainer, of_engine = tokens_of_lag[lag]
        distance = (train[..., of_trainer] - rollout[..., of_engine]).abs()
        sums.append(torch.where(is_pair, distance, 0).sum())
    return torch.stack([*sums, is_pair.sum().double()])


def judge(distances: Mapping[float, Sequence[float]], configured: float, limit: float) -> list[Finding]:
    """Findings about shift, temperature and weights.

    ``distances`` has the sums of :func:`lag_distances` over all ranks, for each temperature tried; ``configured`` is
    the trainer's, and ``limit`` the mean |Δ| in nats that rounding the engine's weights explains.
    """
    *sums, num_pairs = distances[configured]
    if not num_pairs:
        return [Finding("log-probs", False, "no response has two neighbouring tokens: ask for longer responses")]
    mean_by_lag = {lag: total / num_pairs for lag, total in zip(LAGS, sums, strict=True)}
    mean_by_temperature = {temperature: of_lags[0] / num_pairs for temperature, of_lags in distances.items()}
    best_lag = min(mean_by_lag, key=mean_by_lag.__getitem__)
    best_temperature = min(mean_by_temperature, key=mean_by_temperature.__getitem__)
    mean = mean_by_lag[0]
    is_shifted = best_lag != 0 and mean_by_lag[best_lag] < MUCH_BETTER * mean
    is_warmer = best_temperature != configured and mean_by_temperature[best_temperature] < MUCH_BETTER * mean
    is_close = mean <= limit

    evidence = ", ".join(f"{lag:+d}: {value:.4f}" for lag, value in mean_by_lag.items())
    shift = f"mean |Δ log-prob| by lag {evidence} nats"
    if is_shifted:
        shift += f": the engine's log-probs are shifted by {best_lag:+d}; align both to the label tokens"
    weights = f"mean |Δ log-prob| {mean:.5f} nats, up to {limit} is rounding"
    if not (is_close or is_shifted or is_warmer):
        weights += ": other weights, a stale cache, or another tokenizer"
    temperature = _temperature(mean_by_temperature, configured, best_temperature, is_warmer)
    return [
        Finding("shift", not is_shifted, shift),
        Finding("temperature and log-prob mode", not is_warmer, temperature),
        Finding("weights", is_close, weights),
    ]


def _temperature(means: Mapping[float, float], configured: float, best: float, is_warmer: bool) -> str:
    """Sentence about the temperature, of the mean distances by temperature."""
    words = f"closest at {best}, scored at {configured} ({means[best]:.4f} and {means[configured]:.4f} nats)"
    if is_warmer and best == 1:
        return f"{words}: these are raw log-probs, before temperature; ask the engine for processed ones"
    if is_warmer:
        return f"{words}: the engine samples at another temperature than --rl-default-temperature"
    if configured == 1:
        return f"{words}: at 1 raw and processed log-probs are the same"
    return f"{words}: processed log-probs"
