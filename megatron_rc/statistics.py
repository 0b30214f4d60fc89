"""The one pass over the tokens: sums for each sequence, sums for the batch, weights and token-level verdicts.

Everything here is local arithmetic on one block of tokens at a time, so that the scratch it needs does not grow with
the batch. Sums are float64 and found by name, so that they add up over blocks, micro-batches and ranks in any order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_rc.config import RolloutCorrectionConfig
from megatron_rc.criteria import OPSM, Criterion
from megatron_rc.histogram import count_codes
from megatron_rc.parallel.blocks import Block
from megatron_rc.weights import EXP_LIMIT, bounded_weights, log_bounds, within

POSITIVE_LIMIT = 1e-4  # a log-prob above this is no rounding error
_BITS = {torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF0000000000000)}

Sums = dict[str, Tensor]


class Scratch:
    """Buffers for the blocks of one shape: on a CPU, memory that was just used costs a fifth of new memory."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        kind, self.infinity = _BITS[dtype]
        empty = functools.partial(torch.empty, shape, device=device)
        self.log_ratio, self.one, self.two = (empty(dtype=dtype) for _ in range(3))
        self.bits = empty(dtype=kind)
        self.valid, self.flags = empty(dtype=torch.bool), empty(dtype=torch.bool)
        self.wide = empty(dtype=torch.float64)
        # Counts and codes come when nothing is in ``two``.
        self.narrow = self.two.view(torch.int32) if dtype == torch.float32 else empty(dtype=torch.int32)


class TokenTerms:
    """Per-token tensors of one block; every value at an invalid position is exactly 0.

    The bits of whatever stands at an invalid position, NaN and infinities included, are cleared before any arithmetic.

    Attributes:
        scratch: holds everything; ``one``, ``two``, ``narrow`` and ``flags`` may be overwritten by any method.
        valid: bool, in the response mask, with two usable log-probs.
        bits: an integer per token with all bits set where valid, none elsewhere.
        log_ratio: log ρ = log π_train - log π_rollout.
        train_sum: [rows] float64.
        rollout_sum: [rows] float64.
    """

    def __init__(self, train: Tensor, rollout: Tensor, mask: Tensor, block: Block, scratch: Scratch) -> None:
        self._block, self.scratch = block, scratch
        self.valid, self.bits, self.log_ratio = scratch.valid, scratch.bits, scratch.log_ratio
        # What has to be cut off to make a usable log-prob of it: no bit is set where that is nothing.
        for value, excess in ((train, scratch.one), (rollout, scratch.two)):
            torch.clamp(value, torch.finfo(value.dtype).min, POSITIVE_LIMIT, out=excess)
            torch.sub(value, excess, out=excess)
        excess = self._as_bits(scratch.one).bitwise_or_(self._as_bits(scratch.two))
        self.valid.copy_(torch.eq(excess, 0, out=excess)).logical_and_(mask)
        self.bits.copy_(self.valid).neg_()
        self.train_sum = self.sum(self.hold(train, out=self.log_ratio))
        self.rollout_sum = self.sum(self.hold(rollout, out=scratch.one))
        self.log_ratio -= scratch.one

    def hold(self, values: Tensor, out: Tensor) -> Tensor:
        """The values where valid, 0 elsewhere, whatever stands there."""
        torch.bitwise_and(self._as_bits(values), self.bits, out=self._as_bits(out))
        return out

    def flag(self, compare: Callable[..., Tensor], values: Tensor, bound: float) -> Tensor:
        """Where valid values compare with the bound; in ``scratch.flags``."""
        # A comparison is vectorised where its output is as wide as its input, and not where that is bool.
        wide = compare(values, bound, out=self.scratch.two) if values.dtype == self.scratch.two.dtype else None
        flags = compare(values, bound) if wide is None else self._as_bits(wide)
        return self.scratch.flags.copy_(flags).logical_and_(self.valid)

    def sum(self, values: Tensor) -> Tensor:
        """[rows] float64."""
        return self._block.sum(self.scratch.wide.copy_(values))

    def total(self, values: Tensor) -> Tensor:
        """0-D float64."""
        return self.scratch.wide.copy_(values).sum()

    def count(self, flags: Tensor) -> Tensor:
        """[rows] float64."""
        return self._block.count(self.scratch.narrow.copy_(flags))

    def total_count(self, flags: Tensor) -> Tensor:
        """0-D float64."""
        return self.scratch.narrow.copy_(flags).sum(dtype=torch.int32).double()

    def extremes(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """(largest, largest negative) over the valid tokens, 0-D float64."""
        hole = self.scratch.one  # 0 where valid, +inf elsewhere
        torch.bitwise_not(self.bits, out=self._as_bits(hole)).bitwise_and_(self.scratch.infinity)
        largest = torch.sub(values, hole, out=self.scratch.two).amax().double()
        return largest, -hole.add_(values).amin().double()

    def codes(self) -> Tensor:
        """Counts for the histogram of log ρ."""
        return count_codes(self.log_ratio, self.scratch.narrow)

    def _as_bits(self, values: Tensor) -> Tensor:
        return values.view(self.bits.dtype)


@dataclass
class BlockTerms:
    """What one block contributes.

    Attributes:
        sequence: [rows] float64 sums by name.
        sequence_max: [rows] float64 maxima by name.
        batch: 0-D float64 sums by name.
        batch_max: 0-D float64 maxima by name; a minimum is the largest negative.
        codes: counts for the histogram of log ρ.
    """

    sequence: Sums = field(default_factory=dict)
    sequence_max: Sums = field(default_factory=dict)
    batch: Sums = field(default_factory=dict)
    batch_max: Sums = field(default_factory=dict)
    codes: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass(frozen=True)
class BlockTokens:
    """The tokens of one block: three inputs, and where two outputs go; all of the block's shape.

    Attributes:
        train: log π_train, float32 or float64.
        rollout: log π_rollout, alike.
        mask: the response mask, bool.
        negative: bool, where the advantage of the token is below 0; None where ``opsm`` does not test tokens.
        weights: takes the bounded weights at token level, else 1 where valid; None without weights.
        kept: bool, takes where valid and accepted by the token-level criteria.
    """

    train: Tensor
    rollout: Tensor
    mask: Tensor
    negative: Tensor | None
    weights: Tensor | None
    kept: Tensor


def block_terms(tokens: BlockTokens, block: Block, config: RolloutCorrectionConfig, scratch: Scratch) -> BlockTerms:
    """All that is known of a block before anything is known of whole sequences."""
    out = BlockTerms()
    terms = TokenTerms(tokens.train, tokens.rollout, tokens.mask, block, scratch)
    out.sequence |= {"response": terms.count(tokens.mask), "valid": terms.count(terms.valid)}
    _policy_terms(terms, out)
    if config.rollout_is == "token" and tokens.weights is not None:
        _weight_terms(terms, tokens.weights, config, out)
    elif tokens.weights is not None:
        tokens.weights.copy_(terms.valid)
    tokens.kept.copy_(terms.valid)
    wide = terms.log_ratio.double() if any(c.divergence in ("k2", "k3") for c in config.criteria) else terms.log_ratio
    for criterion in config.criteria:
        _criterion_terms(criterion, wide, terms, tokens.kept, block, out)
    if config.rollout_token_veto_threshold is not None:
        limit = math.log(config.rollout_token_veto_threshold)
        out.sequence["catastrophic"] = terms.count(terms.flag(torch.lt, terms.log_ratio, limit))
    _kept_terms(terms, tokens, config, out)
    return out


def is_log_prob(values: Tensor) -> Tensor:
    """Where a log-prob is usable: neither NaN nor infinite nor positive."""
    return within(values, torch.finfo(values.dtype).min, POSITIVE_LIMIT)


def divergence(kind: str, log_ratio: Tensor) -> Tensor:
    """k1 as log ρ (the bounds are on ρ), k2 = ½(log ρ)², k3 = ρ - 1 - log ρ with ρ = exp(min(log ρ, 20)).

    Schulman 2020, "Approximating KL Divergence" (there k1 is -log ρ).
    """
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    return torch.expm1(log_ratio.clamp(max=EXP_LIMIT)) - log_ratio


def _policy_terms(terms: TokenTerms, out: BlockTerms) -> None:
    """How far the two policies are apart."""
    excess = torch.clamp(terms.log_ratio, -EXP_LIMIT, EXP_LIMIT, out=terms.scratch.one).expm1_()
    out.sequence |= {"train": terms.train_sum, "rollout": terms.rollout_sum, "excess": terms.sum(excess)}
    out.batch["excess_squared"] = terms.total(excess.square_())
    out.batch_max["log_ratio"], out.batch_max["-log_ratio"] = terms.extremes(terms.log_ratio)
    out.codes = terms.codes()


def _weight_terms(terms: TokenTerms, weights: Tensor, config: RolloutCorrectionConfig, out: BlockTerms) -> None:
    """Token-level weights; the bounds are compared in log space."""
    lower, upper = log_bounds(config)
    bounded = bounded_weights(terms.log_ratio, config, out=terms.scratch.two)
    terms.hold(bounded, out=weights)
    out.batch_max["weight"] = weights.amax().double()
    out.sequence["weight"] = terms.sum(weights)
    excess = bounded.sub_(1)
    out.batch["weight_excess_squared"] = terms.total(terms.hold(excess, out=excess).square_())
    for name, compare, bound in (("above", torch.gt, upper), ("below", torch.lt, lower)):
        outside = terms.flag(compare, terms.log_ratio, bound)
        out.batch[name] = terms.total_count(outside)
        if config.is_mode == "mask":
            out.sequence[f"outside_{name}"] = terms.count(outside)


def _criterion_terms(
    criterion: Criterion, wide: Tensor, terms: TokenTerms, kept: Tensor, block: Block, out: BlockTerms
) -> None:
    """What a criterion needs of tokens; a token-level one takes what it rejects out of ``kept``."""
    name, kind, scratch = criterion.name, criterion.divergence, terms.scratch
    statistic = terms.log_ratio
    if kind in ("k2", "k3"):
        exact = torch.where(terms.valid, divergence(kind, wide), 0)
        out.sequence[kind] = block.sum(exact)
        statistic = exact.to(statistic.dtype)
        if criterion.aggregation == "seq_max":
            out.sequence[f"over_{name}"] = terms.count(terms.flag(torch.gt, exact, criterion.upper))
            # Valid statistics are not negative, invalid ones 0.
            out.sequence_max[name] = block.max(exact)
    if criterion.aggregation != "token":
        return
    if kind != "k1":
        out.batch_max[f"token_{name}"], out.batch_max[f"-token_{name}"] = terms.extremes(statistic)
    out.batch[f"high_{name}"] = terms.total_count(terms.flag(torch.gt, statistic, criterion.upper))
    clamped = torch.clamp(statistic, criterion.floor, criterion.upper, out=scratch.one)
    accepted = terms.flag(torch.eq, torch.sub(statistic, clamped, out=scratch.two), 0)
    out.sequence[f"accepted_{name}"] = terms.count(accepted)
    kept.logical_and_(accepted)
    out.batch[f"clamped_{name}"] = terms.total(terms.hold(clamped, out=clamped))
    out.batch[f"clamped_squared_{name}"] = terms.total(clamped.square_())


def _kept_terms(terms: TokenTerms, tokens: BlockTokens, config: RolloutCorrectionConfig, out: BlockTerms) -> None:
    """Tokens and weights that the token-level criteria leave, of all and of those with a negative advantage."""
    subsets = {"kept": tokens.kept}
    if tokens.negative is not None and any(criterion.name == OPSM for criterion in config.criteria):
        subsets["kept_negative"] = tokens.kept & tokens.negative
        out.sequence["negative"] = terms.count(terms.valid & tokens.negative)
    for name, chosen in subsets.items():
        out.sequence[name] = terms.count(chosen)
        if tokens.weights is not None and config.rollout_is_batch_normalize_scope == "accepted":
            out.sequence[f"{name}_weight"] = terms.sum(torch.where(chosen, tokens.weights, 0))
