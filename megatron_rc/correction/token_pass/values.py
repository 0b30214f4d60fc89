"""The tokens of one block, with everything invalid cleared, and the few ways to sum over them.

A block is ``[runs, run]``: equal runs of tokens, each of one sequence. All values are found for each run by itself, and
added up to sequences and batches afterwards. Where a packed block has sequences of different lengths it is flat, and a
run is what it has of a sequence.

Two classes do the same. :class:`TokenTerms` runs as it stands, in buffers that stay in a CPU's cache.
:class:`FusedTerms` is what a compiler wants to see: no buffers, and every quantity an expression of its inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from megatron_rc.correction.token_pass.histogram import codes_of
from megatron_rc.numerics import POSITIVE_LIMIT, exp_ratio

MIN_RUN, MAX_RUN = 64, 1024  # so many tokens float32 adds up to a relative 1e-7
_BITS = {torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF0000000000000)}


@functools.cache
def run_length(length: int) -> int:
    """The length of the equal runs that a row is cut into: at most ``MAX_RUN`` unless that leaves short ones."""
    return next((run for run in range(min(length, MAX_RUN), MIN_RUN - 1, -1) if length % run == 0), length)


class Scratch:
    """Buffers for the blocks of one shape: on a CPU, memory that was just used costs a fifth of new memory.

    Attributes:
        log_ratio: as wide as the log-probs.
        one: likewise.
        two: likewise; ``one`` and ``two`` are the halves of ``wide``.
        wide: float64.
        bits: integers as wide as the log-probs.
        narrow: int32; where the log-probs are float32 it is ``two``.
        index: int64, ``wide``'s memory.
        valid: bool.
        flags: bool.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        kind, self.infinity = _BITS[dtype]
        empty = functools.partial(torch.empty, shape, device=device)
        both = torch.empty(2, *shape, dtype=dtype, device=device)
        self.one, self.two = both
        self.log_ratio, self.bits = empty(dtype=dtype), empty(dtype=kind)
        self.wide = both.view(-1).view(torch.float64)[: self.bits.numel()].view(shape)
        self.index = self.wide.view(torch.int64)
        self.valid, self.flags = empty(dtype=torch.bool), empty(dtype=torch.bool)
        self.narrow = self.two.view(torch.int32) if dtype == torch.float32 else empty(dtype=torch.int32)
        self._as_bits = {id(buffer): buffer.view(kind) for buffer in (self.one, self.two, self.log_ratio)}

    def as_bits(self, values: Tensor) -> Tensor:
        """The integers that values are stored as."""
        known = self._as_bits.get(id(values))
        return values.view(self.bits.dtype) if known is None else known


class TokenTerms:
    """Per-token tensors of one block; every value at an invalid position is exactly 0.

    The bits of whatever stands at an invalid position, NaN and infinities included, are cleared before any arithmetic.

    Args:
        train: log π_train, [runs, run], or flat.
        rollout: log π_rollout, alike.
        mask: the response mask, bool.
        scratch: buffers of that shape.
        lengths: [runs] int64, the tokens of each run where they are flat, else None.

    Attributes:
        scratch: holds everything; every method may overwrite ``one``, ``two``, ``wide``, ``narrow`` and ``flags``.
        valid: bool, in the response mask, with two usable log-probs.
        bits: an integer per token with all bits set where valid, none elsewhere.
        log_ratio: log ρ = log π_train - log π_rollout.
        response: [runs], tokens in the response mask.
        train_sum: [runs] float64.
        rollout_sum: [runs] float64.
    """

    def __init__(
        self, train: Tensor, rollout: Tensor, mask: Tensor, scratch: Scratch, lengths: Tensor | None = None
    ) -> None:
        self.scratch, self._lengths = scratch, lengths
        self.valid, self.bits, self.log_ratio = scratch.valid, scratch.bits, scratch.log_ratio
        self.response = self.count(mask)
        # What has to be cut off to make a usable log-prob of it: no bit is set where that is nothing.
        for value, excess in ((train, scratch.one), (rollout, scratch.two)):
            torch.clamp(value, torch.finfo(value.dtype).min, POSITIVE_LIMIT, out=excess)
            torch.sub(value, excess, out=excess)
        excess = scratch.as_bits(scratch.one).bitwise_or_(scratch.as_bits(scratch.two))
        self.valid.copy_(torch.eq(excess, 0, out=excess)).logical_and_(mask)
        self.bits.copy_(self.valid).neg_()
        # Sums need ``wide``, so that the held values stand in ``log_ratio`` one after the other.
        self.train_sum = self.sum(self.hold(train, out=self.log_ratio))
        self.rollout_sum = self.sum(self.hold(rollout, out=self.log_ratio))
        torch.sub(self.hold(train, out=scratch.one), self.log_ratio, out=self.log_ratio)

    def begin_mask(self, out: Tensor) -> Tensor:
        """The valid tokens, bool, to take rejected ones out of, in ``out``."""
        return out.copy_(self.valid)

    def end_mask(self, mask: Tensor, out: Tensor) -> None:
        """Write what is left of ``begin_mask`` to ``out``: there it is."""

    def ratio(self) -> Tensor:
        """ρ; in ``scratch.two``."""
        return exp_ratio(self.log_ratio, self.scratch.two)

    def excess(self, ratio: Tensor) -> Tensor:
        """ρ - 1, to 6e-8 · ρ in float32, where expm1 would cost six exponentials; in ``scratch.one``."""
        return torch.sub(ratio, 1, out=self.scratch.one)

    def clamp(self, values: Tensor, lower: float, upper: float) -> Tensor:
        """Clamped values; in ``scratch.one``."""
        return torch.clamp(values, lower, upper, out=self.scratch.one)

    def inside(self, values: Tensor, clamped: Tensor) -> Tensor:
        """Where clamping changed no valid value; in ``scratch.flags``."""
        same = torch.eq(torch.sub(values, clamped, out=self.scratch.two), 0, out=self.scratch.two)
        return self.scratch.flags.copy_(same).logical_and_(self.valid)

    def hold(self, values: Tensor, out: Tensor) -> Tensor:
        """The values where valid, 0 elsewhere, whatever stands there."""
        torch.bitwise_and(self.scratch.as_bits(values), self.bits, out=self.scratch.as_bits(out))
        return out

    def sum(self, values: Tensor) -> Tensor:
        """[runs] float64, every addition in float64; of values that stand neither in ``one`` nor in ``two``."""
        if self._lengths is not None:
            return self._segments(values, "sum")
        return (values if values.dtype == torch.float64 else self.scratch.wide.copy_(values)).sum(1)

    def near_sum(self, values: Tensor) -> Tensor:
        """[runs], to a relative 1e-7: up to ``MAX_RUN`` tokens are added in their own dtype."""
        if self._lengths is not None:
            return self._segments(values, "sum")
        return values.sum(1) if values.shape[1] <= MAX_RUN else values.sum(1, dtype=torch.float64)

    def near_total(self, values: Tensor) -> Tensor:
        """The same where no sequence asks for its part: sums that add up to the total."""
        return self.near_sum(values) if self._lengths is None else values.sum(dtype=torch.float64).view(1)

    def count(self, flags: Tensor) -> Tensor:
        """[runs]: how many flags are set, as wide as the log-probs: exact for runs of up to 2²⁴ tokens."""
        flags = self.scratch.narrow.copy_(flags)
        if self._lengths is not None:
            return self._segments(flags, "sum")
        return flags.sum(1, dtype=torch.int32).to(self.log_ratio.dtype)

    def count_where(self, compare: Callable[..., Tensor], values: Tensor, bound: float) -> Tensor:
        """[runs]: how many values, 0 where invalid, are above (``torch.gt``) or below (``torch.lt``) the bound."""
        if values.dtype != self.log_ratio.dtype:
            return self.count(compare(values, bound).logical_and_(self.valid))
        # A comparison is vectorised where its output is as wide as its input, and not where that is bool.
        ones = compare(values, bound, out=self.scratch.two)
        return self.near_sum(self.hold(ones, out=ones) if _holds_for_zero(compare, bound) else ones)

    def whole(self, per_run: Tensor) -> Tensor:
        """[runs] as a part of the batch, like :meth:`near_total`."""
        return per_run if self._lengths is None else per_run.sum().view(1)

    def max(self, values: Tensor) -> Tensor:
        """[runs]: the largest value of each."""
        return values.amax(1) if self._lengths is None else self._segments(values, "max")

    def largest(self, values: Tensor) -> Tensor:
        """The same where no sequence asks for its part: values of which the largest is the batch's."""
        return values.amax(1) if self._lengths is None else values.amax().view(1)

    def extremes(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """(largest, largest negative) over the valid tokens, as :meth:`largest` has them."""
        hole = self.scratch.one  # 0 where valid, +inf elsewhere
        torch.bitwise_not(self.bits, out=self.scratch.as_bits(hole)).bitwise_and_(self.scratch.infinity)
        largest = self.largest(torch.sub(values, hole, out=self.scratch.two))
        smallest = hole.add_(values)
        return largest, -(smallest.amin(1) if self._lengths is None else smallest.amin().view(1))

    def codes(self) -> Tensor:
        """The bins of log ρ, int64; in ``scratch.index``. Overwrites ``bits``: nothing can follow."""
        single = self.bits.dtype == torch.int32
        return self.scratch.index.copy_(codes_of(self.log_ratio, self.bits if single else self.scratch.narrow))

    def _segments(self, values: Tensor, kind: Literal["sum", "max"]) -> Tensor:
        return torch.segment_reduce(values.double(), kind, lengths=self._lengths, unsafe=True)


class FusedTerms:
    """:class:`TokenTerms` as expressions, for a compiler, which can vectorise reads and writes of uint8, not of bool.

    Every sum runs along the last dimension, so that a compiler makes one loop of all of them.

    Args:
        train: log π_train, [runs, run].
        rollout: log π_rollout, alike.
        mask: uint8, alike, 1 in the response mask, 0 elsewhere.
        zero: float32 zeros, [runs, 1]. A term that depends on the run keeps the compiler from flattening the loop of
            what is written for each token, which would part it from the loop of the sums.
    """

    def __init__(self, train: Tensor, rollout: Tensor, mask: Tensor, zero: Tensor) -> None:
        lowest = torch.finfo(train.dtype).min
        self.valid = mask.float() + zero != 0
        self.response = self.count(self.valid)
        for value in (train, rollout):
            self.valid = self.valid & (value <= POSITIVE_LIMIT) & (value >= lowest)
        train, rollout = torch.where(self.valid, train, 0.0), torch.where(self.valid, rollout, 0.0)
        self.train_sum, self.rollout_sum = self.sum(train), self.sum(rollout)
        self.log_ratio = train - rollout

    def begin_mask(self, out: Tensor) -> Tensor:
        """The valid tokens, bool, to take rejected ones out of."""
        return self.valid.clone()

    def end_mask(self, mask: Tensor, out: Tensor) -> None:
        """Write what is left of ``begin_mask`` to ``out``, uint8."""
        out.copy_(torch.where(mask, 1.0, 0.0))

    def ratio(self) -> Tensor:
        """ρ."""
        return exp_ratio(self.log_ratio)

    def excess(self, ratio: Tensor) -> Tensor:
        """ρ - 1."""
        return ratio - 1

    def clamp(self, values: Tensor, lower: float, upper: float) -> Tensor:
        """Clamped values."""
        return values.clamp(lower, upper)

    def inside(self, values: Tensor, clamped: Tensor) -> Tensor:
        """Where clamping changed no valid value."""
        return self.valid & (values == clamped)

    def hold(self, values: Tensor, out: Tensor) -> Tensor:
        """The values where valid, 0 elsewhere, whatever stands there."""
        held = torch.where(self.valid, values, 0.0)
        out.copy_(held)
        return held

    def sum(self, values: Tensor) -> Tensor:
        """[runs] float64, every addition in float64."""
        return values.double().sum(1)

    def near_sum(self, values: Tensor) -> Tensor:
        """[runs], to a relative 1e-7: up to ``MAX_RUN`` tokens are added in their own dtype."""
        return self.sum(values) if values.shape[1] > MAX_RUN else values.sum(1)

    def near_total(self, values: Tensor) -> Tensor:
        """[runs], likewise."""
        return self.near_sum(values)

    def count(self, flags: Tensor) -> Tensor:
        """[runs]: how many flags are set; exact in float32 too, for runs of up to 2²⁴ tokens."""
        return torch.where(flags, 1.0, 0.0).sum(1)

    def count_where(self, compare: Callable[..., Tensor], values: Tensor, bound: float) -> Tensor:
        """[runs]: how many values, 0 where invalid, are above (``torch.gt``) or below (``torch.lt``) the bound."""
        flags = compare(values, bound)
        return self.count(flags & self.valid if _holds_for_zero(compare, bound) else flags)

    def whole(self, per_run: Tensor) -> Tensor:
        """[runs]."""
        return per_run

    def max(self, values: Tensor) -> Tensor:
        """[runs]: the largest value of each."""
        return values.amax(1)

    def largest(self, values: Tensor) -> Tensor:
        """[runs], likewise."""
        return values.amax(1)

    def extremes(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """(largest, largest negative) over the valid tokens, [runs] each."""
        largest = torch.where(self.valid, values, -torch.inf)
        return self.max(largest), self.max(torch.where(self.valid, -values, -torch.inf))

    def codes(self) -> Tensor:
        """The bins of log ρ, int64."""
        return codes_of(self.log_ratio).long()


def _holds_for_zero(compare: Callable[..., Tensor], bound: float) -> bool:
    """Whether what stands at an invalid position would be counted."""
    return bound < 0 if compare is torch.gt else bound > 0
