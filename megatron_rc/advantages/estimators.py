"""The estimators of advantages that compare the responses to one prompt: one function of their rewards each.

An :class:`AdvantageEstimator` is one entry of the table :data:`GROUP_ESTIMATORS`. The library's function
``group_advantages``, the launcher's flag and its checks read it. To add an estimator, define it at the end of this
module, or name one of a module of yours by ``--advantage-estimator python:pkg.module:OBJECT``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.advantages.responses import PromptSums
from megatron_rc.parallel.arguments import one_of
from megatron_rc.parallel.collectives import all_reduce_sum
from megatron_rc.parallel.groups import Group, ParallelGroups

EPSILON = 1e-6  # added to a standard deviation before a division


@dataclass(frozen=True)
class BatchSums:
    """Sums over the responses of the whole batch.

    Attributes:
        counts_here: [n] bool, rows that count on this rank, because it is the first of their CP group.
        dp_cp: the ranks that hold the other responses.
    """

    counts_here: Tensor
    dp_cp: Group | None


@dataclass(frozen=True, kw_only=True)
class PromptTerms:
    """The inputs of an estimator: the reward of each response, and numbers of the prompt that it answers.

    Every tensor is [n], one entry for each row, float64. Only kept responses count in a prompt's numbers; the advantage
    of another one becomes 0 afterwards. A response of several rows counts once.

    Attributes:
        rewards: x of the row's response.
        kept: bool, responses that count.
        counts: kept responses to the row's prompt.
        weights: w, how much the response counts in the mean and the variance: 1, or its importance weight; times its
            length, if the estimator is ``weighted_by_length``.
        means: Σ w x / Σ w over the prompt; 0 for a prompt with a single response.
        centred: x - mean; exactly 0 if it is only the rounding of equal rewards, and for the only kept one of several
            responses.
        variances: the prompt's variance of x, of a sample (n - 1 without weights); 1 if fewer than two responses have
            a weight.
        leave_one_out: Σ w / (Σ w - w): x - mean times this is x - the mean of the other responses; 0 if no other one
            counts.
        f_norm: the divisor ``f_norm`` of the call.
        shares: 1/k for each of the k kept rows of a response; 0 for a row that is not kept.
        prompts: the sums over each prompt, for :meth:`prompt_sum` and :meth:`prompt_max`.
        batch: the sums over the batch; None unless the estimator is declared with ``uses_batch``.
        given_lengths: tokens of each response, for :attr:`lengths`; None: the caller gave none.
    """

    rewards: Tensor
    kept: Tensor
    counts: Tensor
    weights: Tensor
    means: Tensor
    centred: Tensor
    variances: Tensor
    leave_one_out: Tensor
    f_norm: float
    shares: Tensor
    prompts: PromptSums
    batch: BatchSums | None
    given_lengths: Tensor | None

    @property
    def lengths(self) -> Tensor:
        """Tokens of each response, [n]; ValueError if the caller gave none."""
        if self.given_lengths is None:
            raise ValueError("the estimator uses the lengths of responses: give lengths")
        return self.given_lengths

    def prompt_sum(self, values: Tensor) -> Tensor:
        """Return the sum of a value over the kept responses to each row's prompt, [n].

        Every rank must call it alike. Collectives: with ``num_groups`` one SUM of [num_groups + 1] over ``dp_cp``.
        """
        (sums,) = self.prompts.sum(torch.where(self.kept, self.shares * values, 0))
        return sums[self.prompts.prompt_of_row]

    def prompt_max(self, values: Tensor) -> Tensor:
        """Return the largest value of the kept responses to each row's prompt, [n]; -inf without one.

        Every rank must call it alike. Collectives: with ``num_groups`` one MAX of [num_groups + 1] over ``dp_cp``.
        """
        largest = self.prompts.max(torch.where(self.kept, values, -torch.inf))
        return largest[self.prompts.prompt_of_row]

    def batch_sum(self, *values: Tensor) -> Tensor:
        """Return the sum of each [n] value over the kept responses of the whole batch, [number of values].

        Every rank must call it alike. Collectives: one SUM of [number of values] over ``dp_cp``.

        Raises:
            ValueError: the estimator is not declared with ``uses_batch=True``.
        """
        if self.batch is None:
            raise ValueError("the estimator uses terms.batch_sum: define it with uses_batch=True")
        counted = torch.where(self.kept & self.batch.counts_here, self.shares, 0)
        sums = torch.stack([torch.where(counted > 0, counted * value, 0).sum() for value in values])
        return all_reduce_sum(sums, self.batch.dp_cp)


@dataclass(frozen=True, kw_only=True)
class AdvantageEstimator:
    """An estimator of the advantages of whole responses: its function, and what the caller must give it.

    Attributes:
        name: as the user writes it.
        words: its formula, for a list of estimators: "x - mean".
        advantage: the advantage of each row, [n], from the terms of all rows.
        weighted_by_length: in means and variances each response also counts by its number of tokens.
        needs_several: the only response to a prompt always has the advantage 0.
        uses_batch: it calls ``terms.batch_sum``, so that it needs the groups of ranks that hold the other responses.

    Raises:
        ValueError: at definition: something is missing, or the function does not give one finite number a row.
    """

    name: str
    words: str
    advantage: Callable[[PromptTerms], Tensor]
    weighted_by_length: bool = False
    needs_several: bool = False
    uses_batch: bool = False

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem is not None:
            raise ValueError(f"estimator {self.name!r}: {problem}")


def _problem(estimator: AdvantageEstimator) -> str | None:
    """Return what is wrong with a definition, or None; the function is tried on four responses to two prompts."""
    characters = estimator.name.replace("-", "").replace("_", "")
    if not characters.isalnum() or estimator.name != estimator.name.lower():
        return "the name must be letters, digits, hyphens and underscores, in lower case"
    if not estimator.words or not callable(estimator.advantage):
        return "words and advantage must be given"
    for switch in ("weighted_by_length", "needs_several", "uses_batch"):
        if not isinstance(getattr(estimator, switch), bool):
            return f"{switch} must be True or False"
    terms = _four_responses(uses_batch=estimator.uses_batch)
    advantages = estimator.advantage(terms)
    if not isinstance(advantages, Tensor) or advantages.shape != terms.rewards.shape:
        return "advantage must give a tensor with one number a row"
    if not advantages.is_floating_point() or not advantages.isfinite().all():
        return "advantages must be finite floats, for equal rewards and a single response too"
    return None


def _four_responses(*, uses_batch: bool) -> PromptTerms:
    """Terms on which a new estimator is tried: three responses to one prompt, and a prompt with one of reward 0."""
    ones = torch.ones(4, dtype=torch.float64)
    group_ids = torch.tensor([0, 0, 0, 1])
    prompts = PromptSums(group_ids, num_groups=None, groups=ParallelGroups(), counts_here=ones > 0)
    return PromptTerms(
        rewards=torch.tensor([1.0, 0.0, 0.5, 0.0], dtype=torch.float64),
        kept=ones > 0,
        counts=torch.tensor([3.0, 3.0, 3.0, 1.0], dtype=torch.float64),
        weights=ones,
        means=torch.tensor([0.5, 0.5, 0.5, 0.0], dtype=torch.float64),
        centred=torch.tensor([0.5, -0.5, 0.0, 0.0], dtype=torch.float64),
        variances=torch.tensor([0.25, 0.25, 0.25, 1.0], dtype=torch.float64),
        leave_one_out=torch.tensor([1.5, 1.5, 1.5, 0.0], dtype=torch.float64),
        f_norm=1.0,
        shares=ones,
        prompts=prompts,
        batch=BatchSums(counts_here=ones > 0, dp_cp=None) if uses_batch else None,
        given_lengths=torch.tensor([3, 5, 1, 2]),
    )


GROUP_ESTIMATORS: dict[str, AdvantageEstimator] = {}


def define(*estimators: AdvantageEstimator) -> None:
    """Make estimators known by their names; ValueError for a name that is known already."""
    for estimator in estimators:
        if estimator.name in GROUP_ESTIMATORS:
            raise ValueError(f"estimator {estimator.name!r} is defined already: give it another name")
        GROUP_ESTIMATORS[estimator.name] = estimator


def estimator_of(estimator: str | AdvantageEstimator) -> AdvantageEstimator:
    """Return the estimator of this name, or the estimator itself; ValueError for an unknown name."""
    if isinstance(estimator, AdvantageEstimator):
        return estimator
    one_of("estimator", estimator, GROUP_ESTIMATORS)
    return GROUP_ESTIMATORS[estimator]


# The functions. Papers are in the docstring of ``megatron_rc.advantages.group.group_advantages``.


def _centred(terms: PromptTerms) -> Tensor:
    """The reward less the prompt's mean."""
    return terms.centred


def _standardised(terms: PromptTerms) -> Tensor:
    """The reward less the prompt's mean, divided by its standard deviation + 1e-6."""
    return terms.centred / (terms.variances.sqrt() + EPSILON)


def _leave_one_out(terms: PromptTerms) -> Tensor:
    """The reward less the mean of the prompt's other responses; x - mean if no other one counts."""
    factor = torch.where(terms.leave_one_out == 0, 1, terms.leave_one_out)
    return terms.centred * factor


def _leave_one_out_or_zero(terms: PromptTerms) -> Tensor:
    """The reward less the mean of the prompt's other responses; 0 if no other one counts."""
    return torch.where(terms.leave_one_out == 0, 0, terms.centred * terms.leave_one_out)


def _lead(terms: PromptTerms) -> Tensor:
    """How far the best response to a prompt lies above the second best; 0 for all others, and if two share the best."""
    best = terms.prompt_max(terms.rewards)
    is_best = terms.kept & (terms.rewards == best)
    # The rows of one response share it, so the number is whole but for a rounding.
    num_best = terms.prompt_sum(is_best.double()).round()
    second_best = terms.prompt_max(terms.rewards.masked_fill(is_best, -torch.inf))
    leads = is_best & (num_best == 1) & second_best.isfinite()
    lead = torch.where(leads, terms.rewards - second_best, 0)
    # NaN for the whole prompt if one of its rewards is not finite.
    return lead + 0 * terms.variances


def _standardised_lead(terms: PromptTerms) -> Tensor:
    """The lead of the best response, divided by std + 1e-6."""
    return _lead(terms) / (terms.variances.sqrt() + EPSILON)


def _gpg(terms: PromptTerms) -> Tensor:
    """α (x - mean) / f_norm; α is the responses of the batch over those with a reward that is not 0."""
    is_nonzero = terms.rewards != 0
    num_responses, num_nonzero = terms.batch_sum(torch.ones_like(terms.rewards), is_nonzero.double())
    alpha: Tensor = num_responses / num_nonzero.clamp(min=1)
    return terms.centred * (alpha / terms.f_norm)


define(
    AdvantageEstimator(
        name="grpo",
        words="(x - mean) / (std + 1e-6)",
        advantage=_standardised,
    ),
    AdvantageEstimator(
        name="grpo-no-std",
        words="x - mean",
        advantage=_centred,
    ),
    AdvantageEstimator(
        name="rloo",
        words="x - mean of the other responses",
        advantage=_leave_one_out,
    ),
    AdvantageEstimator(
        name="rloo-vectorized",
        words="x - mean of the other responses, 0 without another one",
        advantage=_leave_one_out_or_zero,
        needs_several=True,
    ),
    AdvantageEstimator(
        name="opo",
        words="x - mean weighted by lengths",
        advantage=_centred,
        weighted_by_length=True,
    ),
    AdvantageEstimator(
        name="grpo-passk",
        words="(x - x of the second best) / (std + 1e-6) for the best response, else 0",
        advantage=_standardised_lead,
        needs_several=True,
    ),
    AdvantageEstimator(
        name="grpo-passk-no-std",
        words="x - x of the second best for the best response, else 0",
        advantage=_lead,
        needs_several=True,
    ),
    AdvantageEstimator(
        name="gpg",
        words="α (x - mean) / f_norm",
        advantage=_gpg,
        uses_batch=True,
    ),
)
