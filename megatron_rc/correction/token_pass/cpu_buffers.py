"""The tokens of one block in buffers, for a CPU: the operations of ``expressions``, in half of their time.

Three habits make the difference. Results go to buffers that are used again for every block, as memory that was just
used costs a fifth of new memory. What stands at an invalid position is cleared by its bits, a mask of integers as wide
as the numbers: choosing by bools is not vectorised. And comparisons give numbers as wide as what is compared, for the
same reason.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rc.correction.histogram import codes_of
from megatron_rc.correction.token_pass.operations import MAX_RUN, BlockTokens, TokenResults, of_segments
from megatron_rc.numerics import POSITIVE_LIMIT, exp_ratio

_BITS = {torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF0000000000000)}


class Buffers:
    """Memory for the blocks of one shape.

    Attributes:
        shape: of all of them.
        log_ratio: as wide as the log-probs.
        one: likewise.
        two: likewise; ``one`` and ``two`` are the halves of ``wide``.
        wide: float64.
        bits: integers as wide as the log-probs.
        infinity: +inf as such an integer.
        narrow: int32; where the log-probs are float32 it is ``two``.
        index: int64, ``wide``'s memory.
        valid: bool.
        flags: bool.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape = shape
        kind, self.infinity = _BITS[dtype]
        both = torch.empty(2, *shape, dtype=dtype)
        self.one, self.two = both[0], both[1]
        self.log_ratio, self.bits = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=kind)
        self.wide = both.view(-1).view(torch.float64)[: self.bits.numel()].view(shape)
        self.index = self.wide.view(torch.int64)
        self.valid, self.flags = torch.empty(shape, dtype=torch.bool), torch.empty(shape, dtype=torch.bool)
        self.narrow = self.two.view(torch.int32) if dtype == torch.float32 else torch.empty(shape, dtype=torch.int32)


class BufferedBlock:
    """One block of tokens: a :class:`~megatron_rc.correction.token_pass.operations.TokenBlock`.

    ``ratio`` and every count write to ``two``; ``hold``, ``minus_one``, ``square`` and ``clamp`` to ``one``; exact
    sums, ``extremes`` and ``codes`` to both. The tests compare all of it with the expressions.

    Args:
        tokens: of the block, [runs, run] each, or flat.
        results: where weights and kept tokens are written to.
        buffers: of the tokens' shape; they hold everything else.
        run_sizes: [runs] int64, the tokens of each run where they are flat, else None.
    """

    def __init__(
        self, tokens: BlockTokens, results: TokenResults, buffers: Buffers, run_sizes: Tensor | None = None
    ) -> None:
        self._buffers, self._run_sizes, self._bits = buffers, run_sizes, buffers.bits
        self.valid, self.log_ratio = buffers.valid, buffers.log_ratio
        self.response = self.count(tokens.mask)
        self._find_valid(tokens)
        # Exact sums need both buffers: the values stand in the third one, one policy after the other.
        self.train_sum = self.exact_sum(self._hold(tokens.train, self.log_ratio))
        self.rollout_sum = self.exact_sum(self._hold(tokens.rollout, self.log_ratio))
        torch.sub(self._hold(tokens.train, buffers.one), self.log_ratio, out=self.log_ratio)
        self.kept, self.weights = results.kept.copy_(self.valid), results.weights

    def _find_valid(self, tokens: BlockTokens) -> None:
        # value - clamp(value) is 0 for a usable log-prob, and has bits set for all others, NaN and infinities included.
        for value, excess in ((tokens.train, self._buffers.one), (tokens.rollout, self._buffers.two)):
            torch.clamp(value, torch.finfo(value.dtype).min, POSITIVE_LIMIT, out=excess)
            torch.sub(value, excess, out=excess)
        excess = self._as_bits(self._buffers.one).bitwise_or_(self._as_bits(self._buffers.two))
        self.valid.copy_(torch.eq(excess, 0, out=excess)).logical_and_(tokens.mask)
        self._bits.copy_(self.valid).neg_()

    def _as_bits(self, values: Tensor) -> Tensor:
        """The integers that values are stored as."""
        return values.view(self._bits.dtype)

    def _hold(self, values: Tensor, out: Tensor) -> Tensor:
        """The values where valid, else 0, in ``out``."""
        torch.bitwise_and(self._as_bits(values), self._bits, out=self._as_bits(out))
        return out

    def ratio(self) -> Tensor:
        """ρ."""
        return exp_ratio(self.log_ratio, self._buffers.two)

    def hold(self, values: Tensor) -> Tensor:
        """The values where valid, else 0."""
        return self._hold(values, self._buffers.one)

    def minus_one(self, values: Tensor) -> Tensor:
        """Values - 1."""
        return torch.sub(values, 1, out=self._buffers.one)

    def square(self, values: Tensor) -> Tensor:
        """values²."""
        return torch.mul(values, values, out=self._buffers.one)

    def clamp(self, values: Tensor, lower: float, upper: float) -> Tensor:
        """Values, 0 where invalid, within the bounds; 0 there still."""
        clamped = torch.clamp(values, lower, upper, out=self._buffers.one)
        return clamped if lower <= 0 <= upper else self.hold(clamped)

    def unchanged(self, values: Tensor, clamped: Tensor) -> Tensor:
        """Valid tokens that clamping left alone."""
        flags = self._buffers.flags.copy_(torch.eq(values, clamped, out=self._buffers.two))
        return torch.logical_and(flags, self.valid, out=flags)

    def _room_for_weights(self) -> Tensor:
        return torch.empty_like(self.log_ratio) if self.weights is None else self.weights

    def set_weights(self, values: Tensor) -> Tensor:
        """The weights: values where valid, else 0."""
        self.weights = self._hold(values, self._room_for_weights())
        return self.weights

    def set_unit_weights(self) -> None:
        """The weights: 1 where valid, else 0."""
        self.weights = self._room_for_weights().copy_(self.valid)

    def keep(self, flags: Tensor) -> None:
        """Take the others out of ``kept``."""
        self.kept.logical_and_(flags)

    def exact_sum(self, values: Tensor) -> Tensor:
        """[runs] float64, every addition in float64; of values that stand in neither ``one`` nor ``two``."""
        if self._run_sizes is not None:
            return of_segments(values, "sum", self._run_sizes)
        return (values if values.dtype == torch.float64 else self._buffers.wide.copy_(values)).sum(1)

    def sum(self, values: Tensor) -> Tensor:
        """[runs], to a relative 1e-7: as many tokens as float32 adds up well are added in their own dtype."""
        if self._run_sizes is not None:
            return of_segments(values, "sum", self._run_sizes)
        return values.sum(1) if values.shape[1] <= MAX_RUN else values.sum(1, dtype=torch.float64)

    def count(self, flags: Tensor) -> Tensor:
        """[runs]: how many flags are set."""
        flags = self._buffers.narrow.copy_(flags)
        if self._run_sizes is not None:
            return of_segments(flags, "sum", self._run_sizes)
        return flags.sum(1, dtype=torch.int32).to(self.log_ratio.dtype)

    def count_above(self, values: Tensor, bound: float) -> Tensor:
        """[runs]: how many values, 0 where invalid, are above the bound."""
        above = torch.gt(values, bound, out=self._buffers.two)
        return self.sum(above if bound >= 0 else self._hold(above, above))

    def count_below(self, values: Tensor, bound: float) -> Tensor:
        """[runs]: how many values, 0 where invalid, are below the bound."""
        below = torch.lt(values, bound, out=self._buffers.two)
        return self.sum(below if bound <= 0 else self._hold(below, below))

    def max(self, values: Tensor) -> Tensor:
        """[runs]: the largest value of each."""
        return values.amax(1) if self._run_sizes is None else of_segments(values, "max", self._run_sizes)

    def extremes(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """([runs], [runs]): the largest valid value and the largest negative of one; -inf without one."""
        hole = self._buffers.one  # 0 where valid, +inf elsewhere
        torch.bitwise_not(self._bits, out=self._as_bits(hole)).bitwise_and_(self._buffers.infinity)
        largest = self.max(torch.sub(values, hole, out=self._buffers.two))
        smallest = hole.add_(values)
        if self._run_sizes is not None:
            return largest, self.max(smallest.neg_())
        return largest, -smallest.amin(1)

    def codes(self) -> Tensor:
        """int64: the histogram's code of log ρ. Overwrites the bits: nothing can follow."""
        codes = self._bits if self._bits.dtype == torch.int32 else self._buffers.narrow
        return self._buffers.index.copy_(codes_of(self.log_ratio, codes))
