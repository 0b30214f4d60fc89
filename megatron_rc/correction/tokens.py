"""The arithmetic on tokens, once: valid tokens, log ρ, token-level verdicts and token-level weights.

The same expressions run on a CPU, on a GPU and inside ``torch.compile``, on one block of tokens after the other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_rc.correction.history import HistoryValues
from megatron_rc.correction.inputs import Part, Shards
from megatron_rc.numerics import NORMALIZE_LIMIT, cleared, exp_ratio, numbers, off_log_prob, within
from megatron_rc.parallel.layout import Block
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.staleness import StalenessScale

# Tokens of a block: a twelfth of the shard, so that the scratch stays below a tensor of its size, within a CPU's cache;
# on a GPU as many as keep it busy while the host asks for the next operation.
MIN_BLOCK, MAX_BLOCK, GPU_BLOCK = 2**16, 2**18, 2**22


@dataclass(frozen=True)
class Tokens:
    """A block of tokens as it was given; every tensor has the same shape: [n, length], or flat."""

    train: Tensor  # log π_train, float32 or float64
    rollout: Tensor  # log π_rollout, of the same dtype
    mask: Tensor  # the response mask, bool
    negative: Tensor | None = None  # bool, the advantage is below 0; None unless advantages are one a token
    level: Tensor | None = None  # int64, the token's place in the staleness scale; None without one
    log_weight: Tensor | None = None  # log w, unbounded; None: it is log ρ, or weights are of sequences
    statistics: dict[str, Tensor] = field(default_factory=dict)  # float64, by the name of each criterion on turns


@dataclass(frozen=True)
class TokenDecisions:
    """Decisions on each token alone; every tensor has the tokens' shape."""

    valid: Tensor  # bool: in the response mask, with two usable log-probs
    one: Tensor  # 1 if valid, else 0, in the log-probs' dtype: for a CPU a product is cheaper than ``torch.where``
    absent: Tensor  # 0 if valid, else inf, of the same dtype
    train: Tensor  # log π_train, 0 if invalid
    rollout: Tensor  # log π_rollout, 0 if invalid
    log_ratio: Tensor  # log ρ, 0 if invalid
    ratio: Tensor  # ρ, clamped, 1 if invalid
    scale: Tensor | None  # the factor of the token's bounds, in nats; None without a staleness scale
    values: dict[str, Tensor]  # x of each divergence that a criterion needs, float64 (log ρ in its own dtype)
    tested: dict[str, Tensor]  # for each criterion on tokens or turns, the number that it tests
    accepted: dict[str, Tensor]  # bool: for each criterion on tokens or turns, the valid tokens that it accepts
    kept: Tensor  # bool: the valid tokens that all criteria on tokens and turns accept
    log_weight: Tensor  # log of the unbounded weight, 0 if invalid; log ρ unless the level says otherwise
    raw: Tensor  # the unbounded weight, clamped, 1 if invalid
    weights: Tensor | None  # bounded weights, 0 if invalid; None unless weights are token-level


def decide_tokens(tokens: Tokens, config: RolloutCorrectionConfig) -> TokenDecisions:
    """Everything that a token decides alone.

    log ρ_t = log π_train - log π_rollout        w_t = exp(log ρ_t) within its bounds        k_t = Π criteria of tokens
    """
    valid = tokens.mask & (off_log_prob(tokens.train) + off_log_prob(tokens.rollout) == 0)
    one = numbers(valid).to(tokens.train.dtype)
    train, rollout = cleared(tokens.train, one), cleared(tokens.rollout, one)
    log_ratio = train - rollout
    ratio = exp_ratio(log_ratio)
    scale = None
    if config.staleness_scale is not None and tokens.level is not None:
        scale = config.staleness_scale.of(tokens.level, log_ratio.dtype)
    values = {x.name: x.values(train, rollout, log_ratio) for x in config.divergences}
    tested, accepted, kept, weights = {}, {}, valid, None
    for criterion in config.criteria:
        if criterion.of_tokens:
            number = tokens.statistics[criterion.name] if criterion.tested is None else values[criterion.tested.name]
            tested[criterion.name] = number.to(log_ratio.dtype)
            accepted[criterion.name] = valid & criterion.within_bounds(tested[criterion.name], scale)
            kept = kept & accepted[criterion.name]
    log_weight, raw = log_ratio, ratio
    if tokens.log_weight is not None:
        log_weight = tokens.log_weight.to(log_ratio.dtype) * one
        raw = exp_ratio(log_weight)
    if config.weighs_tokens:
        weights = bounded_weights(raw, log_weight, config, scale) * one
    return TokenDecisions(
        valid=valid,
        one=one,
        absent=1 / one - 1,
        train=train,
        rollout=rollout,
        log_ratio=log_ratio,
        ratio=ratio,
        scale=scale,
        values=values,
        tested=tested,
        accepted=accepted,
        kept=kept,
        log_weight=log_weight,
        raw=raw,
        weights=weights,
    )


def bounded_weights(
    ratio: Tensor, log_ratio: Tensor, config: RolloutCorrectionConfig, scale: Tensor | None = None
) -> Tensor:
    """Weights after ``rollout_is_mode``, from w = ``ratio`` and the unclamped log w; ``scale`` multiplies log bounds.

    - ``truncate``: min(w, upper). Ionides 2008, "Truncated Importance Sampling".
    - ``clamp``: min(max(w, lower), upper).
    - ``mask``: w if lower <= w <= upper, else 0; tested on log w. IcePop: Ling Team 2025, "Every Step Evolves".
    """
    if config.is_mode == "mask":
        return ratio * numbers(within(log_ratio if scale is None else log_ratio / scale, *log_bounds(config)))
    bounds: Any = config.is_bounds if scale is None else scaled_bounds(config, scale)
    lower, upper = bounds
    return ratio.clamp(max=upper) if config.is_mode == "truncate" else ratio.clamp(lower, upper)


def log_bounds(config: RolloutCorrectionConfig) -> tuple[float, float]:
    """Bounds of the weights, in nats."""
    lower, upper = config.is_bounds
    return math.log(lower), math.log(upper)


def scaled_bounds(config: RolloutCorrectionConfig, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(lower^f, upper^f) of the weights, for each factor f."""
    lower, upper = log_bounds(config)
    return (lower * scale).exp(), (upper * scale).exp()


def normalization(total: Tensor, count: Tensor) -> Tensor:
    """1 / w̄ with w̄ = total / count, 0-D; 1 if w̄ <= 1e-8 or nothing is counted."""
    mean = total / count.clamp(min=1)
    return torch.where(mean > NORMALIZE_LIMIT, 1 / mean, 1.0)


def blocks_of(part: Part, *, compile: bool = False) -> list[Block]:
    """The blocks that bound the memory of the arithmetic on one micro-batch."""
    if part.mask.device.type != "cpu":
        return part.layout.blocks(GPU_BLOCK)
    # A compiled block has less scratch, and more to do for each call.
    wider = 3 if compile else 1
    return part.layout.blocks(min(max(part.mask.numel() * wider // 12, MIN_BLOCK), MAX_BLOCK * wider))


def token_blocks(
    shards: Shards,
    config: RolloutCorrectionConfig,
    history: Sequence[HistoryValues] | None = None,
    *,
    compile: bool = False,
) -> Iterator[tuple[int, Block, Tokens]]:
    """(number of the micro-batch, block, its tokens), one after the other; at least one."""
    scale = config.staleness_scale
    for number, part in enumerate(shards.parts):
        for block in blocks_of(part, compile=compile):
            train, rollout = (block.take(values).to(shards.dtype) for values in (part.train, part.rollout))
            negative = None if part.advantages is None else block.take(part.advantages) < 0
            level = None if scale is None else _levels(part, block, shards, scale)
            tokens = Tokens(train, rollout, block.take(part.mask), negative, level)
            yield number, block, tokens if history is None else _with_history(tokens, block, history[number])


def _with_history(tokens: Tokens, block: Block, history: HistoryValues) -> Tokens:
    log_weight = None if history.log_weight is None else block.take(history.log_weight)
    statistics = {name: block.take(values) for name, values in history.statistics.items()}
    return dataclasses.replace(tokens, log_weight=log_weight, statistics=statistics)


def _levels(part: Part, block: Block, shards: Shards, scale: StalenessScale) -> Tensor:
    """The place of each token in the staleness scale."""
    if part.versions is not None:
        return scale.levels(shards.counts.staleness(block.take(part.versions)))
    versions = block.expand(shards.versions[part.sequences])  # type: ignore[index]
    return scale.levels(shards.counts.staleness(versions))
