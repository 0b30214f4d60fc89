"""Numbers that every part agrees on: usable log-probs, the limits of exp, and divergences of two log-probs.

``docs/design.md`` begins with the words and symbols that are used here.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

POSITIVE_LIMIT = 1e-4  # a log-prob above this is no rounding error
# of :func:`log_prob_kinds`
USABLE = 1
NUM_KINDS = 5
MAX_ZERO_LOG_PROBS = 8  # so many sampled tokens can honestly have probability 1 in float32; more of them are fillers
NUM_SEQUENCE_IDS = 2**21  # ids lie below: a token's keys in error messages, 5 · 2²⁷ · id and more, are exact in float64
EXP_LIMIT = 20.0  # a ratio of a token is exp(clamp(x, ±20)), in nats
# A weight of several tokens is exp(clamp(x, -300, 20)). The square of the least one, 3e-261, is exact in float64.
LOG_WEIGHT_FLOOR = -300.0
UNTRUNCATED = math.exp(EXP_LIMIT)  # no weight lies above this: truncation here is no truncation
CERTAIN = 1e-8  # 1 - p of a token is at least this; float32 log-probs cannot say less, and write 0
PPL_LIMIT = 80.0  # a perplexity is exp(clamp(x, ±80))
NORMALIZE_LIMIT = 1e-125  # a mean weight at or below this is not divided by: e⁻³⁰⁰ = 5e-131, the least weight, is below


def is_log_prob(values: Tensor) -> Tensor:
    """Return where a log-prob is usable, bool: finite, and not above 1e-4."""
    return within(values, torch.finfo(values.dtype).min, POSITIVE_LIMIT)


def log_prob_kinds(values: Tensor) -> Tensor:
    """Return what each log-prob is, int32, like ``values``, float32 or float64.

    0: -inf; 1, :data:`USABLE`: usable; 2: positive, above 1e-4; 3: +inf; 4: NaN.
    """
    return torch.bucketize(values, _kind_limits(values.dtype, values.device), out_int32=True)


@functools.cache
def _kind_limits(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the largest value of each kind but NaN: a value is of the first kind whose limit is not below it."""
    limits = torch.tensor([-torch.inf, POSITIVE_LIMIT, torch.finfo(dtype).max, torch.inf], dtype=dtype)
    return limits.to(device, non_blocking=True)


def exp_ratio(log_ratio: Tensor) -> Tensor:
    """exp(clamp(x, ±20)): a ratio of one token, finite and never 0."""
    return log_ratio.clamp(-EXP_LIMIT, EXP_LIMIT).exp()


def exp_weight(log_weight: Tensor) -> Tensor:
    """exp(clamp(x, -300, 20)), float64: a weight of several tokens, whose logs add up to far below -20."""
    return log_weight.double().clamp(LOG_WEIGHT_FLOOR, EXP_LIMIT).exp()


def exp_sample(log_weight: Tensor) -> Tensor:
    """exp(clamp(x, ±300)), float64: a weight of several tokens in an effective sample size, without its upper limit."""
    return log_weight.double().clamp(LOG_WEIGHT_FLOOR, -LOG_WEIGHT_FLOOR).exp()


def k2(log_ratio: Tensor) -> Tensor:
    """½(log ρ)². Schulman 2020, "Approximating KL Divergence"."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """exp(x) - 1 - x with x = min(log ρ, 20); Schulman 2020. Both terms are clamped, so that it is never negative."""
    clamped = log_ratio.clamp(max=EXP_LIMIT)
    return torch.expm1(clamped) - clamped


def factor_error(log_ratio: Tensor) -> Tensor:
    """exp|log ρ| - 1: the factor by which the two probabilities differ, less 1; |log ρ| clamped at 20."""
    return torch.expm1(log_ratio.abs().clamp(max=EXP_LIMIT))


def two_point_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """D(p‖q) = p log(p/q) + (1 - p) log((1 - p)/(1 - q)), in nats, of log-probs of one token.

    The divergence of two distributions over two events: this token, and any other. 1 - p and 1 - q are never taken for
    less than 1e-8, so that the value of a certain token is finite.
    """
    log_p = log_p.clamp(max=-CERTAIN)
    log_q = log_q.clamp(max=-CERTAIN)
    other_p = -torch.expm1(log_p)
    other_q = -torch.expm1(log_q)
    return log_p.exp() * (log_p - log_q) + other_p * (other_p.log() - other_q.log())


def larger_two_point_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """The larger of D(p‖q) and D(q‖p) of :func:`two_point_kl`, never negative.

    The criterion KPop: Guo et al. 2026, "Taming Training-Inference Mismatch in Reinforcement Learning with Adaptive
    Masking Regions", ringtech.notion.site/kpop.
    """
    return torch.maximum(two_point_kl(log_p, log_q), two_point_kl(log_q, log_p)).clamp(min=0.0)


def within(values: Tensor, lower: float, upper: float) -> Tensor:
    """Return where lower <= values <= upper, bool; False for NaN."""
    return values == values.clamp(lower, upper)


def check_mask(name: str, mask: Tensor) -> None:
    """Raise ValueError unless the mask is bool: 0 and 1 of another dtype would be taken for indices, or multiplied."""
    if mask.dtype != torch.bool:
        raise ValueError(f"{name} is {mask.dtype}: expected bool, True where a token counts: pass {name}.bool()")
