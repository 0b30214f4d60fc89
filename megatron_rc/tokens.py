"""The tokens of one block, with everything invalid cleared, and the few ways to sum over them.

Two classes do the same. :class:`TokenTerms` runs as it stands, in buffers that stay in a CPU's cache.
:class:`FusedTerms` is what a compiler wants to see: no buffers, and every quantity an expression of its inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_rc.histogram import codes_of
from megatron_rc.parallel.blocks import Block

POSITIVE_LIMIT = 1e-4  # a log-prob above this is no rounding error
_BITS = {torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF0000000000000)}


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

    @property
    def spare(self) -> Tensor | None:
        """A buffer for weights; None where none is needed."""
        return self.scratch.two

    def begin_mask(self, out: Tensor) -> Tensor:
        """The valid tokens, bool, to take rejected ones out of, in ``out``."""
        return out.copy_(self.valid)

    def end_mask(self, mask: Tensor, out: Tensor) -> None:
        """Write what is left of ``begin_mask`` to ``out``: there it is."""

    def clamp(self, values: Tensor, lower: float, upper: float) -> Tensor:
        """Clamped values; in ``scratch.one``."""
        return torch.clamp(values, lower, upper, out=self.scratch.one)

    def inside(self, values: Tensor, clamped: Tensor) -> Tensor:
        """Where clamping changed no valid value; in ``scratch.flags``."""
        return self.flag(torch.eq, torch.sub(values, clamped, out=self.scratch.two), 0)

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
        """The bins of log ρ; in ``scratch.narrow``."""
        return codes_of(self.log_ratio, self.scratch.narrow)

    def _as_bits(self, values: Tensor) -> Tensor:
        return values.view(self.bits.dtype)


class FusedTerms:
    """:class:`TokenTerms` as expressions, for a compiler, which cannot vectorise reads and writes of bool.

    Args:
        train: log π_train.
        rollout: log π_rollout.
        mask: int32, 1 in the response mask, 0 elsewhere.
    """

    spare: Tensor | None = None

    def __init__(self, train: Tensor, rollout: Tensor, mask: Tensor) -> None:
        lowest = torch.finfo(train.dtype).min
        self.valid = mask != 0
        for value in (train, rollout):
            self.valid = self.valid & (value <= POSITIVE_LIMIT) & (value >= lowest)
        train, rollout = torch.where(self.valid, train, 0.0), torch.where(self.valid, rollout, 0.0)
        self.train_sum, self.rollout_sum = self.sum(train), self.sum(rollout)
        self.log_ratio = train - rollout

    def begin_mask(self, out: Tensor) -> Tensor:
        """The valid tokens, bool, to take rejected ones out of."""
        return self.valid.clone()

    def end_mask(self, mask: Tensor, out: Tensor) -> None:
        """Write what is left of ``begin_mask`` to ``out``, int32."""
        out.copy_(torch.where(mask, 1, 0))

    def clamp(self, values: Tensor, lower: float, upper: float) -> Tensor:
        """Clamped values."""
        return values.clamp(lower, upper)

    def inside(self, values: Tensor, clamped: Tensor) -> Tensor:
        """Where clamping changed no valid value."""
        return self.valid & (values == clamped)

    def hold(self, values: Tensor, out: Tensor) -> Tensor:
        """The values where valid, 0 elsewhere, whatever stands there."""
        return out.copy_(torch.where(self.valid, values, 0.0))

    def flag(self, compare: Callable[..., Tensor], values: Tensor, bound: float) -> Tensor:
        """Where valid values compare with the bound."""
        flags: Tensor = compare(values, bound) & self.valid
        return flags

    def sum(self, values: Tensor) -> Tensor:
        """[rows] float64."""
        return values.double().sum(1)

    def total(self, values: Tensor) -> Tensor:
        """0-D float64."""
        return values.double().sum()

    def count(self, flags: Tensor) -> Tensor:
        """[rows] float64."""
        return torch.where(flags != 0, 1.0, 0.0).double().sum(1)

    def total_count(self, flags: Tensor) -> Tensor:
        """0-D float64."""
        return torch.where(flags, 1.0, 0.0).double().sum()

    def extremes(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """(largest, largest negative) over the valid tokens, 0-D float64."""
        largest = torch.where(self.valid, values, -torch.inf).amax().double()
        return largest, torch.where(self.valid, -values, -torch.inf).amax().double()

    def codes(self) -> Tensor:
        """The bins of log ρ."""
        return codes_of(self.log_ratio, torch.empty_like(self.log_ratio, dtype=torch.int32))
