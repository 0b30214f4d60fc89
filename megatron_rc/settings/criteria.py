"""The table of rejection criteria, and the reader of the settings that name them.

To add a criterion, ``define`` it at the end of this file. Flags, errors, the pass over the tokens, verdicts, metrics
and descriptions follow from the object.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

from torch import Tensor

from megatron_rc.numerics import factor_error, k2, k3, larger_two_point_kl
from megatron_rc.settings.bounds import MARGIN, NONE_AT_ALL, RATIO, UPPER, UPPER_NUMBER, Threshold
from megatron_rc.settings.criterion import Criterion, Divergence, Need, SequenceValues
from megatron_rc.settings.definition import check_criterion

# Schulman's k1 is -log ρ. The test uses log ρ, so that the bounds are on ρ; metrics describe -log ρ, as verl's do.
K1 = Divergence("k1", "log ρ", of=None, least=-math.inf)
K2 = Divergence("k2", "k2 = ½(log ρ)²", of=k2, least=0.0)
K3 = Divergence("k3", "k3 = ρ - 1 - log ρ", of=k3, least=0.0)
# NeMo-RL's "multiplicative probability error", less 1.
ERROR = Divergence("error", "exp|log ρ| - 1", of=factor_error, least=0.0)
# KPop: p = π_train and q = π_rollout of the token; D is the KL of two events, this token and any other one.
KPOP = Divergence("kpop", "max(D(p‖q), D(q‖p))", of=None, least=0.0, of_both=larger_two_point_kl)

CRITERIA: dict[str, Criterion] = {}
# Names of criteria in the first releases of verl that had a rejection.
ALIASES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


def define(*criteria: Criterion) -> None:
    """Add criteria to the table.

    Raises:
        ValueError: a name in use, another divergence with a name in use, or an incomplete criterion
            (``megatron_rc.settings.definition``).
    """
    for criterion in criteria:
        check_criterion(criterion)
        if criterion.name in CRITERIA or criterion.name in ALIASES:
            raise ValueError(f"criterion {criterion.name!r} is defined already: give it another name")

        divergences = {
            divergence.name: divergence for defined in CRITERIA.values() for divergence in defined.divergences
        }
        for divergence in criterion.divergences:
            if divergences.get(divergence.name, divergence) != divergence:
                raise ValueError(
                    f"criterion {criterion.name!r}: another divergence is named {divergence.name!r}: rename this one"
                )
        CRITERIA[criterion.name] = criterion


def parse_criteria(names: str | None, threshold: Threshold, lower: Threshold) -> tuple[Criterion, ...]:
    """Return the criteria, with bounds, that three fields describe.

    Args:
        names: ``rollout_rs``, a comma list.
        threshold: ``rollout_rs_threshold``: one bound for all criteria, or a comma list with one for each criterion
            that takes a bound.
        lower: ``rollout_rs_threshold_lower``: likewise, for the criteria that take a lower bound.

    Raises:
        ValueError: an unknown name, a bound that is missing or does nothing, or one that a criterion does not take.
    """
    criteria = [CRITERIA[name] for name in criterion_names(names)]
    with_threshold = [criterion.name for criterion in criteria if criterion.bounds.takes_threshold]
    with_lower = [criterion.name for criterion in criteria if criterion.bounds.takes_lower]

    if not with_threshold:
        for field, value in (("rollout_rs_threshold", threshold), ("rollout_rs_threshold_lower", lower)):
            if value is not None:
                raise ValueError(
                    f"{field}={value!r} does nothing without a criterion in rollout_rs that takes a bound: name one, "
                    "for example token_k1, or drop the threshold"
                )
    elif threshold is None:
        raise ValueError(f"rollout_rs={names!r} needs rollout_rs_threshold: one bound, or one a criterion")

    thresholds = _texts_by_criterion("rollout_rs_threshold", threshold, with_threshold)
    if lower is not None and not with_lower:
        raise ValueError(
            f"rollout_rs_threshold_lower={lower!r} does nothing for {names!r}: only k1 criteria have a lower bound; "
            "drop it"
        )
    lowers = _texts_by_criterion("rollout_rs_threshold_lower", lower, with_lower)

    with_bounds = []
    for criterion in criteria:
        low, high = criterion.bounds.read(
            criterion.name,
            thresholds.get(criterion.name, ""),
            lowers.get(criterion.name),
        )
        with_bounds.append(dataclasses.replace(criterion, lower=low, upper=high))
    return tuple(with_bounds)


def criterion_names(text: str | None) -> list[str]:
    """Return the names in a comma list, in its order, without duplicates; older names become today's.

    Raises:
        ValueError: no text, or an unknown name.
    """
    if text is not None and not isinstance(text, str):
        raise ValueError(f"rollout_rs={text!r} must be a comma list of criteria, for example 'token_k1,seq_mean_k3'")

    names = []
    for part in (text or "").split(","):
        name = part.strip()
        if not name:
            continue
        if ALIASES.get(name, name) not in CRITERIA:
            raise ValueError(f"rollout_rs={name!r} is unknown: use {', '.join(CRITERIA)}")
        names.append(ALIASES.get(name, name))
    return list(dict.fromkeys(names))


def _texts_by_criterion(field: str, value: Threshold, names: list[str]) -> dict[str, str]:
    """Return the text of the bound of each named criterion; one bound serves all of them; empty for None.

    Raises:
        ValueError: no number and no text, or another number of bounds than of criteria.
    """
    if value is None:
        return {}
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{field}={value!r} must be a number or a comma list of bounds")

    texts = [part.strip() for part in str(value).split(",")]
    if len(texts) == len(names):
        return dict(zip(names, texts, strict=True))
    if len(texts) == 1:
        return dict.fromkeys(names, texts[0])
    raise ValueError(
        f"{field}={value!r} has {len(texts)} bounds for {len(names)} criteria ({', '.join(names)}): give one, or one "
        "for each"
    )


def _statistic(how: str, divergence: Divergence) -> Callable[[SequenceValues], Tensor]:
    """Return the function that computes the ``sum``, ``mean`` or ``max`` of x over the tokens of each sequence."""
    if how == "sum":
        return lambda values: values.sum(divergence)
    if how == "mean":
        return lambda values: values.sum(divergence) / values.num_tokens
    return lambda values: values.max(divergence)


def _quantity(how: str, divergence: Divergence) -> str:
    """Return the statistic in words; k1's is a ratio, because its bounds are on ρ."""
    if divergence is K1:
        return "Π ρ_t" if how == "sum" else "geometric mean ρ"
    adjective = {"sum": "sum of", "mean": "mean", "max": "largest"}[how]
    return f"{adjective} {divergence.words}"


def _criterion(
    name: str,
    unit: Literal["turn", "sequence", "prompt"],
    words: str,
    *,
    how: Literal["sum", "mean", "max"],
    divergence: Divergence,
) -> Criterion:
    """Return the criterion that bounds the sum, mean or largest x of each unit: two bounds on ρ for k1, else one."""
    return Criterion(
        name=name,
        unit=unit,
        words=words,
        bounds=RATIO if divergence is K1 else UPPER,
        needs=(Need("max" if how == "max" else "sum", divergence),),
        statistic=_statistic(how, divergence),
    )


def _token_criterion(divergence: Divergence) -> Criterion:
    """Return the criterion that bounds the x of each token."""
    return Criterion(
        name=f"token_{divergence.name}",
        unit="token",
        words=f"tokens whose {'ρ_t' if divergence is K1 else divergence.words}",
        bounds=RATIO if divergence is K1 else UPPER,
        needs=(Need("sum", divergence),),
        statistic=_statistic("mean", divergence),
        tested=divergence,
    )


def _sequence_criteria(prefix: str, unit: Literal["sequence", "turn"]) -> list[Criterion]:
    """Return the criteria that bound a statistic of each sequence or turn; k1 has no largest value to bound."""
    combinations: list[tuple[Literal["sum", "mean", "max"], tuple[Divergence, ...]]] = [
        ("sum", (K1, K2, K3)),
        ("mean", (K1, K2, K3)),
        ("max", (K2, K3)),
    ]
    criteria = []
    for how, divergences in combinations:
        for divergence in divergences:
            name = f"{prefix}_{how}_{divergence.name}"
            words = f"{unit}s whose {_quantity(how, divergence)}"
            criteria.append(_criterion(name, unit, words, how=how, divergence=divergence))
    return criteria


def _prompt_criterion(divergence: Divergence) -> Criterion:
    """Return the criterion that bounds the mean x over the tokens of all responses of a prompt."""
    words = f"all responses of a prompt whose {_quantity('mean', divergence)} over their tokens"
    return _criterion(f"group_mean_{divergence.name}", "prompt", words, how="mean", divergence=divergence)


_TABLE = (
    _token_criterion(K1),
    _token_criterion(K2),
    _token_criterion(K3),
    *_sequence_criteria("seq", "sequence"),
    *_sequence_criteria("turn", "turn"),
    _prompt_criterion(K1),
    _prompt_criterion(K2),
    _prompt_criterion(K3),
    # Off-policy sequence masking.
    Criterion(
        name="opsm",
        unit="sequence",
        words="sequences with A < 0 whose mean of -log ρ",
        bounds=MARGIN,
        needs=(Need("sum", K1),),
        statistic=_statistic("mean", K1),
        only_negative=True,
    ),
    Criterion(
        name="group_any",
        unit="prompt",
        words="all responses of a prompt of which one is rejected as a whole",
        bounds=NONE_AT_ALL,
        needs=(),
        statistic=lambda values: values.num_lost,
        follows_others=True,
    ),
    Criterion(
        name="seq_mean_error",
        unit="sequence",
        words=f"sequences whose mean {ERROR.words}",
        bounds=UPPER_NUMBER,
        needs=(Need("sum", ERROR),),
        statistic=_statistic("mean", ERROR),
    ),
    _token_criterion(KPOP),
)
# The project's own criteria are tried by a test, not at every import.
CRITERIA.update({criterion.name: criterion for criterion in _TABLE})
