"""Rejection criteria: one object each, and the reader of the comma list that names them.

To add one, define it at the end of the table below. Everything else asks the object: the flags and their errors, the
pass over the tokens, the verdicts, the metrics, and the words.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_rc.numerics import factor_error, k2, k3, within
from megatron_rc.settings.bounds import MARGIN, NONE_AT_ALL, RATIO, UPPER, UPPER_NUMBER, Bounds, Threshold, aligned


@dataclass(frozen=True)
class Divergence:
    """A number x of one token, from its log ρ.

    Attributes:
        name: ``k3``; one object a name.
        words: what x is.
        of: x from log ρ, elementwise, in float64; 0 where log ρ is 0. None: log ρ itself.
        least: the smallest value that x can take.
    """

    name: str
    words: str
    of: Callable[[Tensor], Tensor] | None
    least: float

    def __call__(self, log_ratio: Tensor) -> Tensor:
        """The number x of each token."""
        return log_ratio if self.of is None else self.of(log_ratio)


class Need(NamedTuple):
    """What is needed of the tokens of each sequence: the sum of x over them, the largest or the smallest."""

    how: Literal["sum", "max", "min"]
    divergence: Divergence

    @property
    def name(self) -> str:
        """Name of the sum or extreme: ``sum_k3``. The sum of log ρ, which every batch has, is ``log_ratio``."""
        return "log_ratio" if self == ("sum", K1) else f"{self.how}_{self.divergence.name}"


class SequenceValues(Protocol):
    """What a statistic is made of: [n] float64 each, of whole sequences, or of all responses of a prompt."""

    @property
    def num_tokens(self) -> Tensor:
        """Valid tokens, at least 1."""

    @property
    def num_lost(self) -> Tensor:
        """For prompts: how many responses lose every token to the other criteria."""

    def sum(self, divergence: Divergence) -> Tensor:
        """The sum of x over the valid tokens."""

    def max(self, divergence: Divergence) -> Tensor:
        """The largest x of a valid token; -inf without one."""

    def min(self, divergence: Divergence) -> Tensor:
        """The smallest x of a valid token; +inf without one."""


@dataclass(frozen=True)
class Criterion:
    """One rejection test: accept where ``lower <= statistic <= upper``.

    Attributes:
        name: the canonical name, for example ``seq_mean_k1``.
        unit: what one verdict is about: each ``token``, each ``sequence``, or all responses of a ``prompt``.
        words: what is rejected, up to its bounds: "sequences whose Π ρ_t".
        bounds: how its bounds are read.
        needs: what the statistic is made of.
        statistic: [n] float64 of whole sequences (of prompts, where these are the unit). For tests of tokens it is what
            metrics say of a sequence.
        tested: x of each token, where the unit is the token; else None.
        only_negative: tokens with an advantage of 0 or more stay, whatever the verdict.
        follows_others: the statistic looks at ``num_lost``: what the other criteria reject.
        lower: bound on the statistic, in nats.
        upper: likewise.

    Raises:
        ValueError: at definition: something is missing, or does not fit together.
    """

    name: str
    unit: Literal["token", "sequence", "prompt"]
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
        """The lower bound, or the smallest value that the statistic can take."""
        smallest = [need.divergence.least for need in self.needs]
        return max(self.lower, min(smallest)) if smallest else self.lower

    @property
    def divergences(self) -> tuple[Divergence, ...]:
        """All numbers of a token that it looks at."""
        tested = () if self.tested is None else (self.tested,)
        return (*tested, *(need.divergence for need in self.needs))

    @property
    def is_measured(self) -> bool:
        """True where the statistic of tokens or sequences is described by metrics of its own."""
        return self.unit != "prompt" and not self.only_negative

    def within_bounds(self, statistic: Tensor, scale: Tensor | None = None) -> Tensor:
        """The verdict, bool: True where it is accepted; ``scale`` multiplies the bounds."""
        return within(statistic if scale is None else statistic / scale, self.lower, self.upper)

    def describe(self) -> str:
        """What is rejected, in words."""
        return " ".join(filter(None, (self.words, self.bounds.words(self.lower, self.upper), f"({self.name})")))


CRITERIA: dict[str, Criterion] = {}
# Names of the first releases that had a rejection.
ALIASES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


def define(*criteria: Criterion) -> None:
    """Make criteria known by their names.

    Raises:
        ValueError: a name that is known already, or another divergence of a known name.
    """
    for criterion in criteria:
        if criterion.name in CRITERIA or criterion.name in ALIASES:
            raise ValueError(f"criterion {criterion.name!r} is defined already: give it another name")
        known = {one.name: one for other in CRITERIA.values() for one in other.divergences}
        for divergence in criterion.divergences:
            if known.setdefault(divergence.name, divergence) != divergence:
                raise ValueError(
                    f"criterion {criterion.name!r}: another divergence is named {divergence.name!r}: rename this one"
                )
        CRITERIA[criterion.name] = criterion


def parse_criteria(names: str | None, threshold: Threshold, lower: Threshold) -> tuple[Criterion, ...]:
    """The criteria that ``rollout_rs``, ``rollout_rs_threshold`` and ``rollout_rs_threshold_lower`` describe.

    Raises:
        ValueError: names the field, the value and the remedy.
    """
    criteria = [CRITERIA[name] for name in criterion_names(names)]
    bounded = [criterion.name for criterion in criteria if criterion.bounds.takes_threshold]
    if not bounded:
        for field, value in (("rollout_rs_threshold", threshold), ("rollout_rs_threshold_lower", lower)):
            if value is not None:
                raise ValueError(
                    f"{field}={value!r} does nothing without a criterion in rollout_rs that takes a bound: name one, "
                    "for example token_k1, or drop the threshold"
                )
    if bounded and threshold is None:
        raise ValueError(f"rollout_rs={names!r} needs rollout_rs_threshold: one bound, or one a criterion")
    thresholds = dict(zip(bounded, aligned("rollout_rs_threshold", threshold, bounded), strict=True))
    two_sided = [criterion.name for criterion in criteria if criterion.bounds.takes_lower]
    if lower is not None and not two_sided:
        raise ValueError(
            f"rollout_rs_threshold_lower={lower!r} does nothing for {names!r}: only k1 criteria have a lower bound; "
            "drop it"
        )
    lowers = dict(zip(two_sided, aligned("rollout_rs_threshold_lower", lower, two_sided), strict=True))
    return tuple(
        _bounded(criterion, thresholds.get(criterion.name), lowers.get(criterion.name)) for criterion in criteria
    )


def criterion_names(text: str | None) -> list[str]:
    """The canonical names in a comma list, in its order, duplicates dropped.

    Raises:
        ValueError: an unknown name.
    """
    if text is not None and not isinstance(text, str):
        raise ValueError(f"rollout_rs={text!r} must be a comma list of criteria, for example 'token_k1,seq_mean_k3'")
    names = [part.strip() for part in text.split(",") if part.strip()] if text else []
    for name in names:
        if ALIASES.get(name, name) not in CRITERIA:
            raise ValueError(f"rollout_rs={name!r} is unknown: use {', '.join(CRITERIA)}")
    return list(dict.fromkeys(ALIASES.get(name, name) for name in names))


def _bounded(criterion: Criterion, threshold: str | None, lower: str | None) -> Criterion:
    low, high = criterion.bounds.read(criterion.name, threshold or "", lower)
    return dataclasses.replace(criterion, lower=low, upper=high)


class _Probe:
    """Stands for two sequences, to find what a statistic asks for."""

    def __init__(self) -> None:
        self.asked: set[object] = set()
        self.num_tokens = torch.ones(2, dtype=torch.float64)

    def _answer(self, key: object) -> Tensor:
        self.asked.add(key)
        return torch.ones(2, dtype=torch.float64)

    @property
    def num_lost(self) -> Tensor:
        return self._answer("num_lost")

    def sum(self, divergence: Divergence) -> Tensor:
        return self._answer(Need("sum", divergence))

    def max(self, divergence: Divergence) -> Tensor:
        return self._answer(Need("max", divergence))

    def min(self, divergence: Divergence) -> Tensor:
        return self._answer(Need("min", divergence))


def _problems(criterion: Criterion) -> list[str]:
    """What is wrong with a definition."""
    if not criterion.name.replace("_", "").isalnum() or criterion.name != criterion.name.lower():
        return ["the name must be letters, digits and underscores, in lower case"]
    if criterion.unit not in ("token", "sequence", "prompt"):
        return [f"unit={criterion.unit!r} must be token, sequence or prompt"]
    if not criterion.words or not isinstance(criterion.bounds, Bounds) or not callable(criterion.statistic):
        return ["words, bounds and statistic must all be given"]
    found = []
    if (criterion.unit == "token") != (criterion.tested is not None):
        found.append("tested, the number of a token, is given for the unit token and for no other")
    if criterion.only_negative and criterion.unit != "sequence":
        found.append("only_negative is for the unit sequence")
    if criterion.unit == "prompt" and any(need.how != "sum" for need in criterion.needs):
        found.append("of the responses of a prompt only sums are known")
    if criterion.bounds.on_ratio and any(divergence.of for divergence in criterion.divergences):
        found.append("bounds on a ratio fit log ρ alone")
    return found or _problems_of_statistic(criterion)


def _problems_of_statistic(criterion: Criterion) -> list[str]:
    probe = _Probe()
    value = criterion.statistic(probe)
    needed = {*criterion.needs, *(["num_lost"] if criterion.follows_others else [])}
    if not isinstance(value, Tensor) or value.shape != (2,) or value.dtype != torch.float64:
        return ["statistic must give one float64 number for each sequence"]
    if probe.asked != needed:
        names = [f"{need.how} of {need.divergence.name}" for need in criterion.needs]
        return [f"statistic does not use just what needs and follows_others say: {', '.join(names) or 'nothing'}"]
    if criterion.follows_others and criterion.unit != "prompt":
        return ["follows_others is for the unit prompt"]
    return []


def _sum_of(divergence: Divergence) -> Callable[[SequenceValues], Tensor]:
    return lambda values: values.sum(divergence)


def _mean_of(divergence: Divergence) -> Callable[[SequenceValues], Tensor]:
    return lambda values: values.sum(divergence) / values.num_tokens


def _max_of(divergence: Divergence) -> Callable[[SequenceValues], Tensor]:
    return lambda values: values.max(divergence)


K1 = Divergence("k1", "log ρ", of=None, least=-math.inf)
K2 = Divergence("k2", "k2 = ½(log ρ)²", of=k2, least=0.0)
K3 = Divergence("k3", "k3 = ρ - 1 - log ρ", of=k3, least=0.0)
ERROR = Divergence("error", "exp|log ρ| - 1", of=factor_error, least=0.0)
_SUM = {x: (Need("sum", x),) for x in (K1, K2, K3, ERROR)}
_RESPONSES = "all responses of a prompt"

# The table. k1 has bounds on ρ, k2 and k3 have one upper bound.
define(Criterion("token_k1", "token", "tokens whose ρ_t", RATIO, _SUM[K1], _mean_of(K1), tested=K1))
for x in (K2, K3):
    define(Criterion(f"token_{x.name}", "token", f"tokens whose {x.words}", UPPER, _SUM[x], _mean_of(x), tested=x))
define(Criterion("seq_sum_k1", "sequence", "sequences whose Π ρ_t", RATIO, _SUM[K1], _sum_of(K1)))
for x in (K2, K3):
    define(Criterion(f"seq_sum_{x.name}", "sequence", f"sequences whose sum of {x.words}", UPPER, _SUM[x], _sum_of(x)))
define(Criterion("seq_mean_k1", "sequence", "sequences whose geometric mean ρ", RATIO, _SUM[K1], _mean_of(K1)))
for x in (K2, K3):
    define(Criterion(f"seq_mean_{x.name}", "sequence", f"sequences whose mean {x.words}", UPPER, _SUM[x], _mean_of(x)))
for x in (K2, K3):
    words, largest = f"sequences whose largest {x.words}", (Need("max", x),)
    define(Criterion(f"seq_max_{x.name}", "sequence", words, UPPER, largest, _max_of(x)))
words = f"{_RESPONSES} whose geometric mean ρ over their tokens"
define(Criterion("group_mean_k1", "prompt", words, RATIO, _SUM[K1], _mean_of(K1)))
for x in (K2, K3):
    words = f"{_RESPONSES} whose mean {x.words} over their tokens"
    define(Criterion(f"group_mean_{x.name}", "prompt", words, UPPER, _SUM[x], _mean_of(x)))
words = "sequences with A < 0 whose mean of -log ρ"
define(Criterion("opsm", "sequence", words, MARGIN, _SUM[K1], _mean_of(K1), only_negative=True))
words, lost = f"{_RESPONSES} of which one is rejected as a whole", lambda values: values.num_lost
define(Criterion("group_any", "prompt", words, NONE_AT_ALL, (), lost, follows_others=True))
# NeMo-RL's "multiplicative probability error" of a sequence, less 1.
words = f"sequences whose mean {ERROR.words}"
define(Criterion("seq_mean_error", "sequence", words, UPPER_NUMBER, _SUM[ERROR], _mean_of(ERROR)))
