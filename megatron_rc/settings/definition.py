"""Checks of a rejection criterion when it is defined, so that a mistake in it does not first show in a training run."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_rc.numerics import POSITIVE_LIMIT
from megatron_rc.settings.bounds import Bounds
from megatron_rc.settings.criterion import Criterion, Divergence, Need, SequenceValues

# Trial inputs of a divergence that is a function of log ρ.
_LOG_RATIOS = (-50.0, -1.0, -0.1, 0.0, 0.1, 1.0, 50.0)
# Trial inputs of a divergence that is a function of two log-probs: every pair of these is tried. They range from the
# largest log-prob that is accepted (probability 1, and a rounding error above it) to a probability of 0.
_LOG_PROBS = (POSITIVE_LIMIT, 0.0, -1e-30, -1e-3, -0.1, -1.0, -50.0, -3e38)


def check_criterion(criterion: Criterion) -> None:
    """Raise ValueError, with the criterion's name, if a field is missing, or if two fields contradict each other.

    The statistic and the divergences are tried on a few made-up numbers.
    """
    problem = _problem_of_parts(criterion)
    if problem is None:
        for divergence in criterion.divergences:
            _check_divergence(divergence)
        problem = _problem_of_statistic(criterion)
    if problem is not None:
        raise ValueError(f"criterion {criterion.name!r}: {problem}")


def _problem_of_parts(criterion: Criterion) -> str | None:
    """Return the first problem of the criterion's fields, without calling its functions; None if they fit together."""
    if not criterion.name.replace("_", "").isalnum() or criterion.name != criterion.name.lower():
        return "the name must be letters, digits and underscores, in lower case"
    if criterion.unit not in ("token", "turn", "sequence", "prompt"):
        return f"unit={criterion.unit!r} must be token, turn, sequence or prompt"
    if not criterion.words or not isinstance(criterion.bounds, Bounds) or not callable(criterion.statistic):
        return "words, bounds and statistic must all be given"

    if not isinstance(criterion.needs, tuple) or not all(isinstance(need, Need) for need in criterion.needs):
        return f"needs={criterion.needs!r} must be a tuple of Need"
    if any(need.how not in ("sum", "max", "min") for need in criterion.needs):
        return "a need is a sum, max or min"
    if criterion.unit == "prompt" and any(need.how != "sum" for need in criterion.needs):
        return "prompts have sums of their responses alone"

    if (criterion.unit == "token") != (criterion.tested is not None):
        return "tested, the divergence of a token that the bounds apply to, belongs to the unit token alone"
    if criterion.only_negative and criterion.unit != "sequence":
        return "only_negative is for the unit sequence"
    if criterion.follows_others and criterion.unit != "prompt":
        return "follows_others is for the unit prompt"
    if criterion.bounds.on_ratio and not all(divergence.is_log_ratio for divergence in criterion.divergences):
        return "bounds on a ratio fit log ρ alone"
    return None


class _RecordedValues(dict[str, Tensor]):
    """Made-up values of two sequences, for ``SequenceValues.values``.

    A value is made when the statistic reads its name, so that afterwards the keys are the names that it has read. The
    two sequences differ in every value, so that equal statistics of both mean that the statistic is a constant.
    """

    def __missing__(self, name: str) -> Tensor:
        count = len(self) + 1
        self[name] = torch.tensor([1 + 0.7 * count, 2 + 0.3 * count**2], dtype=torch.float64)
        return self[name]


def _problem_of_statistic(criterion: Criterion) -> str | None:
    """Return the first problem of the statistic; None if it reads exactly its needs and gives usable numbers."""
    recorded = _RecordedValues()
    num_tokens = torch.ones(2, dtype=torch.float64)
    num_lost = torch.tensor([1.3, 2.9], dtype=torch.float64)
    statistic = criterion.statistic(SequenceValues(num_tokens=num_tokens, num_lost=num_lost, values=recorded))
    statistic_of_none_lost = criterion.statistic(
        SequenceValues(num_tokens=num_tokens, num_lost=torch.zeros_like(num_lost), values=recorded)
    )

    if not isinstance(statistic, Tensor) or statistic.shape != (2,) or statistic.dtype != torch.float64:
        return "statistic must give one float64 number for each sequence"
    uses_lost = not torch.equal(statistic, statistic_of_none_lost)
    if recorded.keys() != {need.name for need in criterion.needs} or uses_lost != criterion.follows_others:
        names = ", ".join(f"{need.how} of {need.divergence.name}" for need in criterion.needs)
        return f"statistic must use exactly needs and num_lost (follows_others): {names or 'nothing'}"
    if not statistic.isfinite().all() or statistic[0] == statistic[1]:
        return "statistic must be finite, and differ between sequences that differ"
    return None


def _check_divergence(divergence: Divergence) -> None:
    """Raise ValueError, with the divergence's name, if its function does not fit its description."""
    problem = _problem_of_divergence(divergence)
    if problem is not None:
        raise ValueError(f"divergence {divergence.name!r}: {problem}")


def _problem_of_divergence(divergence: Divergence) -> str | None:
    """Return the first problem of a divergence, or None; its function is tried on a few made-up tokens."""
    if not isinstance(divergence.name, str) or not divergence.name or not divergence.words:
        return "name and words must be given"
    if divergence.is_log_ratio:
        return None if divergence.least == -math.inf else "log ρ itself has no smallest value: least must be -inf"
    if divergence.of is not None and divergence.of_both is not None:
        return "of and of_both exclude each other: give the one that x is computed from"

    function_name = "of" if divergence.of_both is None else "of_both"
    argument = "log ρ" if divergence.of_both is None else "pair of log-probs"
    if not callable(getattr(divergence, function_name)) or not isinstance(divergence.least, (int, float)):
        return f"{function_name} must be a function of each {argument}, and least a number"

    values, policies_agree = _trial_values(divergence)
    if not isinstance(values, Tensor) or values.shape != policies_agree.shape or values.dtype != torch.float64:
        return f"{function_name} must give one float64 number for each {argument}"
    if not values.isfinite().all() or (values[policies_agree] != 0).any():
        return f"{function_name} must be finite, and 0 where log ρ is 0"
    if values.min() < divergence.least:
        return f"{function_name} gives {values.min().item():g}, below least"
    return None


def _trial_values(divergence: Divergence) -> tuple[Tensor, Tensor]:
    """Return the divergence of a few made-up tokens, and a bool for each token: both policies give it one log-prob."""
    if divergence.of_both is not None:
        log_probs = torch.tensor(_LOG_PROBS, dtype=torch.float64)
        train, rollout = torch.cartesian_prod(log_probs, log_probs).unbind(1)
        return divergence.of_both(train, rollout), train == rollout

    log_ratios = torch.tensor(_LOG_RATIOS, dtype=torch.float64)
    # ``of`` is not None here, because a divergence that is log ρ itself is not tried.
    return divergence.of(log_ratios), log_ratios == 0  # type: ignore[misc]
