"""A rejection criterion: its statistic, bounds and words, checked when it is defined."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron_rc.numerics import POSITIVE_LIMIT, within
from megatron_rc.settings.bounds import Bounds


@dataclass(frozen=True)
class Divergence:
    """A number x of one token, computed from its log ρ, or from its two log-probs.

    Attributes:
        name: short name such as ``k3``; no other divergence may have it.
        words: name or formula of x, for descriptions.
        of: function from log ρ to x, elementwise, in float64; 0 for log ρ = 0. None: x is log ρ, or ``of_both``'s.
        least: the smallest possible x.
        of_both: function from (log π_train, log π_rollout) to x, elementwise, in float64; 0 if both are equal.

    Raises:
        ValueError: at definition: ``of`` or ``of_both`` does not fit this description.
    """

    name: str
    words: str
    of: Callable[[Tensor], Tensor] | None
    least: float
    of_both: Callable[[Tensor, Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        for problem in _problems_of_divergence(self):
            raise ValueError(f"divergence {self.name!r}: {problem}")

    @property
    def is_log_ratio(self) -> bool:
        """True if x is log ρ itself."""
        return self.of is None and self.of_both is None

    def values(self, train: Tensor, rollout: Tensor, log_ratio: Tensor) -> Tensor:
        """The x of each token, float64; log ρ itself in its own dtype."""
        if self.of_both is not None:
            return self.of_both(train.double(), rollout.double())
        return log_ratio if self.of is None else self.of(log_ratio.double())


class Need(NamedTuple):
    """A number that a statistic uses: the sum, the largest or the smallest x over the tokens of each sequence."""

    how: Literal["sum", "max", "min"]
    divergence: Divergence

    @property
    def name(self) -> str:
        """Name of the sum or extreme: ``sum_k3``; ``log_ratio`` for the sum of log ρ, which every batch has."""
        of_log_ratio = self.how == "sum" and self.divergence.is_log_ratio
        return "log_ratio" if of_log_ratio else f"{self.how}_{self.divergence.name}"


@dataclass(frozen=True)
class SequenceValues:
    """The values that a statistic may use: [n] float64 each, of whole sequences or of all responses of a prompt.

    Attributes:
        num_tokens: valid tokens, at least 1.
        num_lost: for prompts: number of responses of which other criteria reject every token.
        values: sums and extremes, by the name of the need; ``sum``, ``max`` and ``min`` read them.
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

    Attributes:
        name: the canonical name, for example ``seq_mean_k1``.
        unit: scope of one verdict: a ``token``, a ``turn`` (a run of trained tokens), a ``sequence``, or all responses
            of a ``prompt``.
        words: the rejected things, up to the bounds: "sequences whose Π ρ_t".
        bounds: the form of the bounds.
        needs: the sums and extremes that the statistic uses.
        statistic: [n] float64 of whole sequences (of prompts or turns for these units). For the unit token only metrics
            of sequences use it.
        tested: x of each token, for the unit token; else None.
        only_negative: accept tokens with an advantage of 0 or more, whatever the statistic.
        follows_others: the statistic uses ``num_lost``, the rejection by the other criteria.
        lower: lower bound on the statistic, in nats.
        upper: upper bound on the statistic, in nats.

    Raises:
        ValueError: at definition: something is missing or contradictory.
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

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise ValueError(f"criterion {self.name!r}: {problem}")

    @property
    def least(self) -> float:
        """The lower bound, or the statistic's smallest possible value if that is larger."""
        smallest = [need.divergence.least for need in self.needs]
        return max(self.lower, min(smallest)) if smallest else self.lower

    @property
    def divergences(self) -> tuple[Divergence, ...]:
        """The divergences of the test and of the statistic."""
        tested = () if self.tested is None else (self.tested,)
        return (*tested, *(need.divergence for need in self.needs))

    @property
    def of_tokens(self) -> bool:
        """True if tokens of one sequence may have different verdicts."""
        return self.unit in ("token", "turn")

    @property
    def is_measured(self) -> bool:
        """True if metrics describe the statistic of tokens or sequences."""
        return self.unit != "prompt" and not self.only_negative

    def within_bounds(self, statistic: Tensor, scale: Tensor | None = None) -> Tensor:
        """The verdict, bool: True for accepted; ``scale`` multiplies the bounds."""
        return within(statistic if scale is None else statistic / scale, self.lower, self.upper)

    def describe(self) -> str:
        """The rejected things in words."""
        return " ".join(filter(None, (self.words, self.bounds.words(self.lower, self.upper), f"({self.name})")))


# Log ρ, and log-probs from a certain token to one that no policy samples, with which a divergence is tried.
_LOG_RATIOS = (-50.0, -1.0, -0.1, 0.0, 0.1, 1.0, 50.0)
_LOG_PROBS = (POSITIVE_LIMIT, 0.0, -1e-30, -1e-3, -0.1, -1.0, -50.0, -3e38)


def _problems_of_divergence(divergence: Divergence) -> list[str]:
    """Problems of a divergence, found with a few tokens."""
    if not isinstance(divergence.name, str) or not divergence.name or not divergence.words:
        return ["name and words must be given"]
    if divergence.is_log_ratio:
        return [] if divergence.least == -math.inf else ["log ρ itself has no smallest value: least must be -inf"]
    if divergence.of is not None and divergence.of_both is not None:
        return ["of and of_both exclude each other: give the one that x is computed from"]
    of, given = ("of", "log ρ") if divergence.of_both is None else ("of_both", "pair of log-probs")
    if not callable(getattr(divergence, of)) or not isinstance(divergence.least, (int, float)):
        return [f"{of} must be a function of each {given}, and least a number"]
    log_ratios, log_probs = (torch.tensor(numbers, dtype=torch.float64) for numbers in (_LOG_RATIOS, _LOG_PROBS))
    pairs = torch.cartesian_prod(log_probs, log_probs).unbind(1)
    values = divergence.of(log_ratios) if divergence.of else divergence.of_both(*pairs)  # type: ignore[misc]
    equal = log_ratios == 0 if divergence.of else pairs[0] == pairs[1]
    if not isinstance(values, Tensor) or values.shape != equal.shape or values.dtype != torch.float64:
        return [f"{of} must give one float64 number for each {given}"]
    if not values.isfinite().all() or (values[equal] != 0).any():
        return [f"{of} must be finite, and 0 where log ρ is 0"]
    return [f"{of} gives {values.min().item():g}, below least"] if values.min() < divergence.least else []


class _Asked(dict[str, Tensor]):
    """The values of two made sequences that a statistic asks for; each answer has other numbers."""

    def __missing__(self, name: str) -> Tensor:
        count = len(self) + 1
        self[name] = torch.tensor([1 + 0.7 * count, 2 + 0.3 * count**2], dtype=torch.float64)
        return self[name]


def _problems(criterion: Criterion) -> list[str]:
    if not criterion.name.replace("_", "").isalnum() or criterion.name != criterion.name.lower():
        return ["the name must be letters, digits and underscores, in lower case"]
    if criterion.unit not in ("token", "turn", "sequence", "prompt"):
        return [f"unit={criterion.unit!r} must be token, turn, sequence or prompt"]
    if not criterion.words or not isinstance(criterion.bounds, Bounds) or not callable(criterion.statistic):
        return ["words, bounds and statistic must all be given"]
    if not isinstance(criterion.needs, tuple) or any(not isinstance(need, Need) for need in criterion.needs):
        return [f"needs={criterion.needs!r} must be a tuple of Need"]
    if any(need.how not in ("sum", "max", "min") for need in criterion.needs):
        return ["a need is a sum, max or min"]
    found = []
    if (criterion.unit == "token") != (criterion.tested is not None):
        found.append("tested, the divergence of a token, belongs to the unit token alone")
    if criterion.only_negative and criterion.unit != "sequence":
        found.append("only_negative is for the unit sequence")
    if criterion.unit == "prompt" and any(need.how != "sum" for need in criterion.needs):
        found.append("prompts have sums of their responses alone")
    if criterion.bounds.on_ratio and not all(divergence.is_log_ratio for divergence in criterion.divergences):
        found.append("bounds on a ratio fit log ρ alone")
    return found or _problems_of_statistic(criterion)


def _problems_of_statistic(criterion: Criterion) -> list[str]:
    asked, ones = _Asked(), torch.ones(2, dtype=torch.float64)
    value, without_lost = (
        criterion.statistic(SequenceValues(ones, lost, asked)) for lost in (torch.tensor([1.3, 2.9]).double(), 0 * ones)
    )
    if not isinstance(value, Tensor) or value.shape != (2,) or value.dtype != torch.float64:
        return ["statistic must give one float64 number for each sequence"]
    if asked.keys() != {need.name for need in criterion.needs} or (
        torch.equal(value, without_lost) == criterion.follows_others
    ):
        names = [f"{need.how} of {need.divergence.name}" for need in criterion.needs]
        return [f"statistic must use exactly needs and num_lost (follows_others): {', '.join(names) or 'nothing'}"]
    if not value.isfinite().all() or value[0] == value[1]:
        return ["statistic must be finite, and differ between sequences that differ"]
    if criterion.follows_others and criterion.unit != "prompt":
        return ["follows_others is for the unit prompt"]
    return []
