"""The tokens of one block as plain expressions: the definition that everything else is compared with.

It runs as it stands on a GPU, and is what ``torch.compile`` gets. On a CPU its new tensors and its bools cost more than
the arithmetic; ``cpu_buffers`` has the same operations for there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rc.correction.histogram import codes_of
from megatron_rc.correction.token_pass.operations import MAX_RUN, BlockTokens, of_segments
from megatron_rc.numerics import exp_ratio, is_log_prob


class ExpressionBlock:
    """One block of tokens: a :class:`~megatron_rc.correction.token_pass.operations.TokenBlock`.

    Args:
        tokens: of the block, [runs, run] each, or flat.
        run_sizes: [runs] int64, the tokens of each run where they are flat, else None.
    """

    def __init__(self, tokens: BlockTokens, run_sizes: Tensor | None = None) -> None:
        self._run_sizes = run_sizes
        self.valid = tokens.mask & is_log_prob(tokens.train) & is_log_prob(tokens.rollout)
        train, rollout = self.hold(tokens.train), self.hold(tokens.rollout)
        self.log_ratio = train - rollout
        self.train_sum, self.rollout_sum = self.exact_sum(train), self.exact_sum(rollout)
        self.response = self.count(tokens.mask)
        self.kept = self.valid
        self.weights: Tensor | None = None

    def ratio(self) -> Tensor:
        """ρ."""
        return exp_ratio(self.log_ratio)

    def hold(self, values: Tensor) -> Tensor:
        """The values where valid, else 0."""
        return torch.where(self.valid, values, 0)

    def minus_one(self, values: Tensor) -> Tensor:
        """Values - 1."""
        return values - 1

    def square(self, values: Tensor) -> Tensor:
        """values²."""
        return values.square()

    def clamp(self, values: Tensor, lower: float, upper: float) -> Tensor:
        """Values, 0 where invalid, within the bounds; 0 there still."""
        clamped = values.clamp(lower, upper)
        return clamped if lower <= 0 <= upper else self.hold(clamped)

    def unchanged(self, values: Tensor, clamped: Tensor) -> Tensor:
        """Valid tokens that clamping left alone."""
        return self.valid & (values == clamped)

    def set_weights(self, values: Tensor) -> Tensor:
        """The weights: values where valid, else 0."""
        self.weights = self.hold(values)
        return self.weights

    def set_unit_weights(self) -> None:
        """The weights: 1 where valid, else 0."""
        self.weights = self.valid.to(self.log_ratio.dtype)

    def keep(self, flags: Tensor) -> None:
        """Take the others out of ``kept``."""
        self.kept = self.kept & flags

    def exact_sum(self, values: Tensor) -> Tensor:
        """[runs] float64, every addition in float64."""
        return values.double().sum(1) if self._run_sizes is None else of_segments(values, "sum", self._run_sizes)

    def sum(self, values: Tensor) -> Tensor:
        """[runs], to a relative 1e-7: as many tokens as float32 adds up well are added in their own dtype."""
        return values.sum(1) if self._run_sizes is None and values.shape[1] <= MAX_RUN else self.exact_sum(values)

    def count(self, flags: Tensor) -> Tensor:
        """[runs]: how many flags are set."""
        return self.sum(flags.to(self.log_ratio.dtype))

    def count_above(self, values: Tensor, bound: float) -> Tensor:
        """[runs]: how many values, 0 where invalid, are above the bound; invalid ones count nowhere."""
        above = values > bound
        return self.count(above if bound >= 0 else above & self.valid)

    def count_below(self, values: Tensor, bound: float) -> Tensor:
        """[runs]: likewise below the bound."""
        below = values < bound
        return self.count(below if bound <= 0 else below & self.valid)

    def max(self, values: Tensor) -> Tensor:
        """[runs]: the largest value of each."""
        return values.amax(1) if self._run_sizes is None else of_segments(values, "max", self._run_sizes)

    def extremes(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """([runs], [runs]): the largest valid value and the largest negative of one; -inf without one."""
        hole = torch.where(self.valid, 0.0, torch.inf).to(values.dtype)
        return self.max(values - hole), self.max(-values - hole)

    def codes(self) -> Tensor:
        """int64: the histogram's code of log ρ."""
        return codes_of(self.log_ratio).long()
