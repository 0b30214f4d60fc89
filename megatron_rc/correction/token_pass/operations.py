"""One block of tokens: what it is given, where its results go, and the operations that the token pass is written in."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

MIN_RUN, MAX_RUN = 64, 1024  # so many tokens float32 adds up to a relative 1e-7
How = Literal["sum", "max"]


@functools.cache
def run_length(length: int) -> int:
    """The length of the equal runs that a row is cut into: at most ``MAX_RUN`` unless that leaves short ones."""
    return next((run for run in range(min(length, MAX_RUN), MIN_RUN - 1, -1) if length % run == 0), length)


def of_segments(values: Tensor, how: How, run_sizes: Tensor) -> Tensor:
    """[runs] float64: sums or maxima of the runs of a flat block, which have these sizes."""
    return torch.segment_reduce(values.double(), how, lengths=run_sizes, unsafe=True)


@dataclass(frozen=True)
class BlockTokens:
    """The tokens of one block, as they were given; all of the block's shape.

    Where its sequences have equally many tokens in it, that is ``[runs, run]``: equal runs, each of one sequence. Else
    it is flat, and a run is what the block has of a sequence.

    Attributes:
        train: log π_train, float32 or float64.
        rollout: log π_rollout, alike.
        mask: the response mask, bool.
        negative: bool, where the advantage of the token is below 0; None where ``opsm`` does not test tokens.
        level: int64, which factor of the staleness scale is the token's; None without one.
    """

    train: Tensor
    rollout: Tensor
    mask: Tensor
    negative: Tensor | None = None
    level: Tensor | None = None

    def in_runs(self, run: int) -> BlockTokens:
        """The same tokens as [runs, run]; the length of every row is a multiple of ``run``."""
        return BlockTokens(
            train=self.train.reshape(-1, run),
            rollout=self.rollout.reshape(-1, run),
            mask=self.mask.reshape(-1, run),
            negative=None if self.negative is None else self.negative.reshape(-1, run),
            level=None if self.level is None else self.level.reshape(-1, run),
        )


@dataclass(frozen=True)
class TokenResults:
    """Where a block's part of the results goes; of the block's shape.

    Attributes:
        weights: bounded weights at token level, else 1 where valid, 0 where not; None without weights.
        kept: bool, where valid and accepted by the token-level criteria.
    """

    weights: Tensor | None
    kept: Tensor

    def in_runs(self, run: int) -> TokenResults:
        """The same memory as [runs, run]."""
        return TokenResults(None if self.weights is None else self.weights.view(-1, run), self.kept.view(-1, run))


class TokenBlock(Protocol):
    """One block of tokens and the operations on it.

    Whatever stands at an invalid position of the input, NaN and infinities included, is replaced by 0 before any
    arithmetic. What an operation returns for each token may be overwritten by a later one, and is used at once.

    Attributes:
        valid: bool: in the response mask, with two usable log-probs.
        log_ratio: log ρ where valid, else 0.
        train_sum: [runs] float64, the sum of log π_train over valid tokens.
        rollout_sum: likewise.
        response: [runs], tokens in the response mask.
        weights: the weight of each token, once it is set.
        kept: bool: valid tokens that no criterion has taken out yet.
    """

    valid: Tensor
    log_ratio: Tensor
    train_sum: Tensor
    rollout_sum: Tensor
    response: Tensor
    weights: Tensor | None
    kept: Tensor

    def ratio(self) -> Tensor:
        """ρ."""

    def hold(self, values: Tensor) -> Tensor:
        """The values where valid, else 0."""

    def minus_one(self, values: Tensor) -> Tensor:
        """Values - 1, to 6e-8 of the values in float32, where expm1 of their logarithms would cost six exponentials."""

    def square(self, values: Tensor) -> Tensor:
        """values²."""

    def clamp(self, values: Tensor, lower: float, upper: float) -> Tensor:
        """Values, 0 where invalid, within the bounds; 0 there still."""

    def unchanged(self, values: Tensor, clamped: Tensor) -> Tensor:
        """Valid tokens that clamping left alone."""

    def set_weights(self, values: Tensor) -> Tensor:
        """The weights: values where valid, else 0."""

    def set_unit_weights(self) -> None:
        """The weights: 1 where valid, else 0."""

    def keep(self, flags: Tensor) -> None:
        """Take the others out of ``kept``."""

    def exact_sum(self, values: Tensor) -> Tensor:
        """[runs] float64, every addition in float64."""

    def sum(self, values: Tensor) -> Tensor:
        """[runs], to a relative 1e-7: as many tokens as float32 adds up well are added in their own dtype."""

    def count(self, flags: Tensor) -> Tensor:
        """[runs]: how many flags are set."""

    def count_above(self, values: Tensor, bound: float) -> Tensor:
        """[runs]: how many values, 0 where invalid, are above the bound; invalid ones count nowhere."""

    def count_below(self, values: Tensor, bound: float) -> Tensor:
        """[runs]: likewise below the bound."""

    def max(self, values: Tensor) -> Tensor:
        """[runs]: the largest value of each."""

    def extremes(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """([runs], [runs]): the largest valid value and the largest negative of one; -inf without one."""

    def codes(self) -> Tensor:
        """int64: the histogram's code of log ρ. The last operation."""
