"""Rejection criteria: a table with one object each, and the reader of the comma list that names them.

To add a criterion, define it at the end of the table. Flags, errors, the pass over the tokens, verdicts, metrics and
descriptions follow from the object.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

from torch import Tensor

from megatron_rc.numerics import factor_error, k2, k3, larger_two_point_kl
from megatron_rc.settings.bounds import MARGIN, NONE_AT_ALL, RATIO, UPPER, UPPER_NUMBER, Threshold, aligned
from megatron_rc.settings.criterion import Criterion, Divergence, Need, SequenceValues

CRITERIA: dict[str, Criterion] = {}
# Names of the first releases with a rejection.
ALIASES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


def define(*criteria: Criterion) -> None:
    """Add criteria to the table; ValueError for a name in use, or another divergence with a name in use."""
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
    """The criteria that ``rollout_rs``, ``rollout_rs_threshold`` and its ``_lower`` describe; or ValueError."""
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
    found = []
    for one in criteria:
        low, high = one.bounds.read(one.name, thresholds.get(one.name) or "", lowers.get(one.name))
        found.append(dataclasses.replace(one, lower=low, upper=high))
    return tuple(found)


def criterion_names(text: str | None) -> list[str]:
    """The canonical names in a comma list, in its order, without duplicates; ValueError for an unknown one."""
    if text is not None and not isinstance(text, str):
        raise ValueError(f"rollout_rs={text!r} must be a comma list of criteria, for example 'token_k1,seq_mean_k3'")
    names = [part.strip() for part in text.split(",") if part.strip()] if text else []
    for name in names:
        if ALIASES.get(name, name) not in CRITERIA:
            raise ValueError(f"rollout_rs={name!r} is unknown: use {', '.join(CRITERIA)}")
    return list(dict.fromkeys(ALIASES.get(name, name) for name in names))


def _sum_of(divergence: Divergence) -> Callable[[SequenceValues], Tensor]:
    return lambda values: values.sum(divergence)


def _mean_of(divergence: Divergence) -> Callable[[SequenceValues], Tensor]:
    return lambda values: values.sum(divergence) / values.num_tokens


def _max_of(divergence: Divergence) -> Callable[[SequenceValues], Tensor]:
    return lambda values: values.max(divergence)


# Schulman's k1 is -log ρ. The test uses log ρ, so that the bounds are on ρ; metrics describe -log ρ, as verl's do.
K1 = Divergence("k1", "log ρ", of=None, least=-math.inf)
K2 = Divergence("k2", "k2 = ½(log ρ)²", of=k2, least=0.0)
K3 = Divergence("k3", "k3 = ρ - 1 - log ρ", of=k3, least=0.0)
ERROR = Divergence("error", "exp|log ρ| - 1", of=factor_error, least=0.0)
KPOP = Divergence("kpop", "max(D(p‖q), D(q‖p))", of=None, least=0.0, of_both=larger_two_point_kl)
_SUM = {x: (Need("sum", x),) for x in (K1, K2, K3, ERROR, KPOP)}
_RESPONSES = "all responses of a prompt"

# The table. k1 has two bounds on ρ; k2 and k3 have one upper bound.
_BOUNDS = {K1: RATIO, K2: UPPER, K3: UPPER}
_PARTS: tuple[tuple[str, Literal["sequence", "turn"], str], ...] = (
    ("seq", "sequence", "sequences"),
    ("turn", "turn", "turns"),
)
for x, bounds in _BOUNDS.items():
    words = f"tokens whose {'ρ_t' if x is K1 else x.words}"
    define(Criterion(f"token_{x.name}", "token", words, bounds, _SUM[x], _mean_of(x), tested=x))
for short, unit, things in _PARTS:
    for x, bounds in _BOUNDS.items():
        words = f"{things} whose {'Π ρ_t' if x is K1 else f'sum of {x.words}'}"
        define(Criterion(f"{short}_sum_{x.name}", unit, words, bounds, _SUM[x], _sum_of(x)))
    for x, bounds in _BOUNDS.items():
        words = f"{things} whose {'geometric mean ρ' if x is K1 else f'mean {x.words}'}"
        define(Criterion(f"{short}_mean_{x.name}", unit, words, bounds, _SUM[x], _mean_of(x)))
    for x in (K2, K3):
        words, largest = f"{things} whose largest {x.words}", (Need("max", x),)
        define(Criterion(f"{short}_max_{x.name}", unit, words, UPPER, largest, _max_of(x)))
for x, bounds in _BOUNDS.items():
    words = f"{_RESPONSES} whose {'geometric mean ρ' if x is K1 else f'mean {x.words}'} over their tokens"
    define(Criterion(f"group_mean_{x.name}", "prompt", words, bounds, _SUM[x], _mean_of(x)))
words = "sequences with A < 0 whose mean of -log ρ"
define(Criterion("opsm", "sequence", words, MARGIN, _SUM[K1], _mean_of(K1), only_negative=True))
words, lost = f"{_RESPONSES} of which one is rejected as a whole", lambda values: values.num_lost
define(Criterion("group_any", "prompt", words, NONE_AT_ALL, (), lost, follows_others=True))
# NeMo-RL's "multiplicative probability error" of a sequence, less 1.
words = f"sequences whose mean {ERROR.words}"
define(Criterion("seq_mean_error", "sequence", words, UPPER_NUMBER, _SUM[ERROR], _mean_of(ERROR)))
# KPop: p = π_train and q = π_rollout of the token, D between two events, this token and any other.
define(Criterion("token_kpop", "token", f"tokens whose {KPOP.words}", UPPER, _SUM[KPOP], _mean_of(KPOP), tested=KPOP))
