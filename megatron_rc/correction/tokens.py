"""The arithmetic on tokens, once: valid tokens, log ρ, token-level verdicts and token-level weights.

The same expressions run on a CPU, on a GPU and inside ``torch.compile``, on one block of tokens after the other.
``docs/design.md`` begins with the words and symbols that are used here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.correction.inputs import AgreedCounts, Part, Shards
from megatron_rc.correction.weights import bounded_weights
from megatron_rc.numerics import cleared, exp_ratio, numbers, off_log_prob
from megatron_rc.parallel.layout import Block
from megatron_rc.settings.config import RolloutCorrectionConfig

# Tokens of a block: a twelfth of the shard, so that the scratch stays below a tensor of the shard's size, and no more
# than a CPU's cache holds.
MIN_BLOCK, MAX_BLOCK = 2**16, 2**18
GPU_BLOCK = 2**22  # keeps a GPU busy for as long as the host takes to ask for the next operation


@dataclass(frozen=True)
class Tokens:
    """A block of tokens as it was given; every tensor has the same shape: [n, length], or flat.

    Attributes:
        train: log π_train, float32 or float64.
        rollout: log π_rollout, of the same dtype.
        mask: the response mask, bool.
        negative: bool, the advantage is below 0; None unless advantages are one a token.
        level: int64, the number of the token's factor in the staleness scale; None without a staleness scale.
    """

    train: Tensor
    rollout: Tensor
    mask: Tensor
    negative: Tensor | None = None
    level: Tensor | None = None


@dataclass(frozen=True)
class TokenDecisions:
    """Decisions on each token alone; every tensor has the tokens' shape.

    Attributes:
        valid: bool: in the response mask, with two usable log-probs.
        one: 1 if valid, else 0, of the log-probs' dtype: a product with it costs a CPU a tenth of ``torch.where``.
        absent: 0 if valid, else inf, of the same dtype.
        train: log π_train, 0 if invalid.
        rollout: log π_rollout, 0 if invalid.
        log_ratio: log ρ, 0 if invalid.
        ratio: ρ, clamped, 1 if invalid.
        scale: the factor of the token's bounds, in nats; None without a staleness scale.
        values: x of each divergence that a criterion looks at, by name, float64 (log ρ in its own dtype); 0 if
            invalid.
        accepted: for each token-level criterion, by name, the valid tokens that it accepts, bool.
        kept: the valid tokens that all token-level criteria accept, bool.
        weights: bounded weights, 0 if invalid; None unless weights are token-level.
    """

    valid: Tensor
    one: Tensor
    absent: Tensor
    train: Tensor
    rollout: Tensor
    log_ratio: Tensor
    ratio: Tensor
    scale: Tensor | None
    values: dict[str, Tensor]
    accepted: dict[str, Tensor]
    kept: Tensor
    weights: Tensor | None


def decide_tokens(tokens: Tokens, config: RolloutCorrectionConfig) -> TokenDecisions:
    """Everything that a token decides alone.

    log ρ_t = log π_train - log π_rollout        w_t = exp(log ρ_t) within the bounds        k_t = Π criteria of tokens
    """
    valid = tokens.mask & (off_log_prob(tokens.train) + off_log_prob(tokens.rollout) == 0)
    one = numbers(valid).to(tokens.train.dtype)
    train, rollout = cleared(tokens.train, one), cleared(tokens.rollout, one)
    log_ratio = train - rollout
    ratio = exp_ratio(log_ratio)
    scale = None
    if config.staleness_scale is not None and tokens.level is not None:
        scale = config.staleness_scale.of(tokens.level, log_ratio.dtype)
    values = {x.name: x.of(log_ratio.double()) if x.of else log_ratio for x in config.divergences}
    accepted = {
        criterion.name: valid & criterion.within_bounds(values[criterion.tested.name].to(log_ratio.dtype), scale)
        for criterion in config.criteria
        if criterion.tested is not None
    }
    kept = valid
    for verdict in accepted.values():
        kept = kept & verdict
    weights = None
    if config.rollout_is == "token":
        weights = bounded_weights(ratio, log_ratio, config, scale) * one
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
        accepted=accepted,
        kept=kept,
        weights=weights,
    )


@dataclass(frozen=True)
class BlockSequences:
    """The sequences of a block, over which its tokens are added up: [n] each, as wide as the tokens or wider.

    Attributes:
        lengths: [n] int64, the tokens of each sequence of a flat block; None for a block ``[n, length]``.
    """

    lengths: Tensor | None = None

    def sum(self, values: Tensor) -> Tensor:
        """Sums to a relative 1e-6: torch adds float32 numbers pairwise, and in vectors if compiled."""
        return values.sum(1) if self.lengths is None else self._segments(values, "sum")

    def exact_sum(self, values: Tensor) -> Tensor:
        """Sums with every addition in float64."""
        return values.sum(1, dtype=torch.float64) if self.lengths is None else self._segments(values, "sum")

    def count(self, flags: Tensor) -> Tensor:
        """How many flags are True."""
        return numbers(flags).sum(1, dtype=torch.int32) if self.lengths is None else self._segments(flags, "sum")

    def largest(self, values: Tensor, absent: Tensor) -> Tensor:
        """The largest value that is not absent; -inf without one."""
        values = values - absent
        return values.amax(1) if self.lengths is None else self._segments(values, "max")

    def smallest(self, values: Tensor, absent: Tensor) -> Tensor:
        """The smallest value that is not absent; +inf without one."""
        values = values + absent
        return values.amin(1) if self.lengths is None else self._segments(values, "min")

    def _segments(self, values: Tensor, how: str) -> Tensor:
        if not values.numel() and self.lengths is not None:
            return values.new_full(self.lengths.shape, {"sum": 0.0, "max": -torch.inf, "min": torch.inf}[how]).double()
        return torch.segment_reduce(values.double(), how, lengths=self.lengths, unsafe=True)


def blocks_of(part: Part, *, compile: bool = False) -> list[Block]:
    """The blocks that bound the memory of the arithmetic on one micro-batch."""
    if part.mask.device.type != "cpu":
        return part.layout.blocks(GPU_BLOCK)
    # A compiled block has less scratch, and more to do for each call.
    wider = 3 if compile else 1
    return part.layout.blocks(min(max(part.mask.numel() * wider // 12, MIN_BLOCK), MAX_BLOCK * wider))


def token_blocks(
    shards: Shards, config: RolloutCorrectionConfig, *, compile: bool = False
) -> Iterator[tuple[int, Block, Tokens, BlockSequences]]:
    """(number of the micro-batch, block, its tokens, its sequences), one after the other; at least one."""
    for number, part in enumerate(shards.parts):
        for block in blocks_of(part, compile=compile):
            tokens = Tokens(
                train=block.take(part.train).to(shards.dtype),
                rollout=block.take(part.rollout).to(shards.dtype),
                mask=block.take(part.mask),
                negative=None if part.advantages is None else block.take(part.advantages) < 0,
                level=None if config.staleness_scale is None else _levels(part, block, shards, config),
            )
            lengths = None if block.lengths is None else block.lengths.to(part.mask.device, non_blocking=True)
            yield number, block, tokens, BlockSequences(lengths)


def _levels(part: Part, block: Block, shards: Shards, config: RolloutCorrectionConfig) -> Tensor:
    """The number of each token's factor in the staleness scale."""
    versions = None
    if part.versions is not None:
        versions = block.take(part.versions)
    elif shards.versions is not None:
        versions = block.expand(shards.versions[part.sequences])
    if versions is None or config.staleness_scale is None:
        raise ValueError("rollout_staleness_scale needs policy_versions and current_version")
    return config.staleness_scale.levels(staleness(versions, shards.counts))


def staleness(versions: Tensor, counts: AgreedCounts) -> Tensor:
    """current_version - version, int64."""
    return (counts.current_version or 0) - versions
