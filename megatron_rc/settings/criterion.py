"""Rejection criteria as objects: their statistic, bounds and words."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from megatron_rc.numerics import within
from megatron_rc.settings.bounds import Bounds


@dataclass(frozen=True)
class Divergence:
    """A number x of one token that measures how far apart the two policies are there.

    Attributes:
        name: short name such as ``k3``; no other divergence may have it.
        words: name or formula of x, for descriptions.
        of: function from log ρ to x, elementwise, in float64; 0 for log ρ = 0. None: ``of_both`` gives x, and if that
            is None too, x is log ρ itself.
        least: the smallest possible x.
        of_both: function from (log π_train, log π_rollout) to x, elementwise, in float64; 0 if both are equal.
    """

    name: str
    words: str
    of: Callable[[Tensor], Tensor] | None
    least: float
    of_both: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def is_log_ratio(self) -> bool:
        """True if x is log ρ itself."""
        return self.of is None and self.of_both is None

    def values(self, train: Tensor, rollout: Tensor, log_ratio: Tensor) -> Tensor:
        """Return the x of each token, like ``log_ratio``, in float64; if x is log ρ itself, ``log_ratio`` unchanged.

        Args:
            train: log π_train of each token.
            rollout: log π_rollout of each token.
            log_ratio: log ρ = log π_train - log π_rollout of each token.
        """
        if self.of_both is not None:
            return self.of_both(train.double(), rollout.double())
        if self.of is not None:
            return self.of(log_ratio.double())
        return log_ratio


class Need(NamedTuple):
    """A number that a statistic is computed from: the sum, the largest or the smallest x of a sequence's tokens."""

    how: Literal["sum", "max", "min"]
    divergence: Divergence

    @property
    def name(self) -> str:
        """Name of the number, such as ``sum_k3``; ``log_ratio`` for the sum of log ρ, which every batch has."""
        if self.how == "sum" and self.divergence.is_log_ratio:
            return "log_ratio"
        return f"{self.how}_{self.divergence.name}"


@dataclass(frozen=True)
class SequenceValues:
    """The numbers that a statistic may use, [n] float64 each: of n sequences or turns, or of n prompts.

    The numbers of a prompt are those of all its responses together.

    Attributes:
        num_tokens: number of valid tokens, at least 1.
        num_lost: for prompts: number of responses that other criteria reject as a whole, so that no token is left.
        values: sums and extremes, by :attr:`Need.name`; read them with the methods ``sum``, ``max`` and ``min``.
    """

    num_tokens: Tensor
    num_lost: Tensor
    values: Mapping[str, Tensor]

    def sum(self, divergence: Divergence) -> Tensor:
        """The sum of x over the valid tokens."""
        return self.values[Need("sum", divergence).name]

    def max(self, divergence: Divergence) -> Tensor:
        """The largest x of a valid token; -inf without one."""
        return self.values[Need("max", divergence).name]

    def min(self, divergence: Divergence) -> Tensor:
        """The smallest x of a valid token; +inf without one."""
        return self.values[Need("min", divergence).name]


@dataclass(frozen=True)
class Criterion:
    """One rejection test: accept if ``lower <= statistic <= upper``.

    The criteria in the table of ``megatron_rc.settings.criteria`` have no bounds yet. ``config.criteria`` are those
    that ``rollout_rs`` names, with the bounds that the config's thresholds set.

    Attributes:
        name: the name in ``rollout_rs``, for example ``seq_mean_k1``.
        unit: scope of one verdict: a ``token``, a ``turn`` (a run of trained tokens), a ``sequence``, or all responses
            of a ``prompt``.
        words: beginning of the description of what is rejected; the bounds follow: "sequences whose Π ρ_t".
        bounds: the form of the bounds, for example an upper one alone.
        needs: the sums and extremes that the statistic uses.
        statistic: function from the values of n sequences (or prompts, or turns) to [n] float64. For the unit token
            only metrics of sequences use it.
        tested: for the unit token: the divergence whose x must lie within the bounds; else None.
        only_negative: True: tokens with an advantage of 0 or more are accepted, whatever the statistic.
        follows_others: True: the statistic uses ``num_lost``, and so depends on what the other criteria reject.
        lower: lower bound on the statistic, in nats.
        upper: upper bound on the statistic, in nats.
    """

    name: str
    unit: Literal["token", "turn", "sequence", "prompt"]
    words: str
    bounds: Bounds
    needs: tuple[Need, ...]
    statistic: Callable[[SequenceValues], Tensor]
    tested: Divergence | None = None
    only_negative: bool = False
    follows_others: bool = False
    lower: float = -math.inf
    upper: float = math.inf

    @property
    def least(self) -> float:
        """The lower bound, or the statistic's smallest possible value if that is larger."""
        if not self.needs:
            return self.lower
        return max(self.lower, min(need.divergence.least for need in self.needs))

    @property
    def divergences(self) -> tuple[Divergence, ...]:
        """The divergences of the test and of the statistic."""
        of_statistic = tuple(need.divergence for need in self.needs)
        return of_statistic if self.tested is None else (self.tested, *of_statistic)

    @property
    def of_tokens(self) -> bool:
        """True if tokens of one sequence may have different verdicts."""
        return self.unit in ("token", "turn")

    @property
    def is_measured(self) -> bool:
        """True if metrics describe the statistic of tokens or sequences."""
        return self.unit != "prompt" and not self.only_negative

    def within_bounds(self, statistic: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return the verdicts, bool, like ``statistic``: True for accepted; ``scale`` multiplies the bounds."""
        if scale is not None:
            statistic = statistic / scale
        return within(statistic, self.lower, self.upper)

    def describe(self) -> str:
        """Return in words what is rejected, with the bounds and the criterion's name."""
        parts = [self.words, self.bounds.words(self.lower, self.upper), f"({self.name})"]
        return " ".join(part for part in parts if part)
