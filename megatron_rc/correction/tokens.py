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
from megatron_rc.numerics import exp_ratio, numbers, off_log_prob
from megatron_rc.parallel.layout import Block
from megatron_rc.settings.config import RolloutCorrectionConfig

MIN_RUN, MAX_RUN = 64, 1024  # float32 adds up so many numbers to a relative 1e-7
# Tokens of a block: a twelfth of the shard, so that the scratch stays below a tensor of the shard's size, and no more
# than a CPU's cache holds.
MIN_BLOCK, MAX_BLOCK = 2**16, 2**18
GPU_BLOCK = 2**22  # keeps a GPU busy for as long as the host takes to ask for the next operation


@dataclass(frozen=True)
class Tokens:
    """A block of tokens as it was given; every tensor has the same shape: [runs, run], or flat.

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
    train, rollout = (values.nan_to_num(0.0, 0.0, 0.0) * one for values in (tokens.train, tokens.rollout))
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
class Runs:
    """How the tokens of a block are added up: along runs of neighbouring tokens of one sequence.

    Attributes:
        lengths: [runs] int64, the tokens of each run of a flat block; None for [runs, run].
    """

    lengths: Tensor | None = None

    def sum(self, values: Tensor) -> Tensor:
        """[runs], to a relative 1e-7: float64, or the values' own dtype if the runs are short enough for it."""
        return values.sum(1) if self.lengths is None and values.shape[1] <= MAX_RUN else self.exact_sum(values)

    def exact_sum(self, values: Tensor) -> Tensor:
        """[runs] float64, every addition in float64."""
        return values.sum(1, dtype=torch.float64) if self.lengths is None else self._segments(values, "sum")

    def count(self, flags: Tensor) -> Tensor:
        """[runs]: how many flags are True."""
        return numbers(flags).sum(1, dtype=torch.int32) if self.lengths is None else self._segments(flags, "sum")

    def largest(self, values: Tensor, absent: Tensor) -> Tensor:
        """[runs]: the largest value that is not absent; -inf without one."""
        values = values - absent
        return values.amax(1) if self.lengths is None else self._segments(values, "max")

    def smallest(self, values: Tensor, absent: Tensor) -> Tensor:
        """[runs]: the smallest value that is not absent; +inf without one."""
        values = values + absent
        return values.amin(1) if self.lengths is None else self._segments(values, "min")

    def _segments(self, values: Tensor, how: str) -> Tensor:
        return torch.segment_reduce(values.double(), how, lengths=self.lengths, unsafe=True)


def blocks_of(part: Part, *, compile: bool = False) -> list[Block]:
    """The blocks that bound the memory of the arithmetic on one micro-batch."""
    if part.mask.device.type != "cpu":
        return part.layout.blocks(GPU_BLOCK)
    # A compiled block has less scratch, and more to do for each call.
    wider = 2 if compile else 1
    return part.layout.blocks(min(max(part.mask.numel() * wider // 12, MIN_BLOCK), MAX_BLOCK * wider))


def token_blocks(
    shards: Shards, config: RolloutCorrectionConfig, *, compile: bool = False
) -> Iterator[tuple[int, Block, Tokens, Runs]]:
    """(number of the micro-batch, block, its tokens, how they are added up), one after the other."""
    blocks = [(number, block) for number, part in enumerate(shards.parts) for block in blocks_of(part, compile=compile)]
    # Without a token, a block without a sequence has the form of the sums.
    for number, block in blocks or [(0, Block(slice(0, 0), slice(0, 0), None, (0, 1)))]:
        part = shards.parts[number]
        run = run_length(block.shape[1]) if block.lengths is None else -1

        def cut(values: Tensor, run: int = run) -> Tensor:
            return values.reshape(-1, run) if run > 0 else values

        tokens = Tokens(
            train=cut(block.take(part.train)).to(shards.dtype),
            rollout=cut(block.take(part.rollout)).to(shards.dtype),
            mask=cut(block.take(part.mask)),
            negative=None if part.advantages is None else cut(block.take(part.advantages) < 0),
            level=None if config.staleness_scale is None else cut(_levels(part, block, shards, config)),
        )
        lengths = None if block.lengths is None else block.lengths.to(part.mask.device, non_blocking=True)
        yield number, block, tokens, Runs(lengths)


def run_length(length: int) -> int:
    """The length of the equal runs that a row is cut into: at most ``MAX_RUN`` unless that leaves short ones."""
    return next((run for run in range(min(length, MAX_RUN), MIN_RUN - 1, -1) if length % run == 0), length)


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
