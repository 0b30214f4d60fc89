"""The table of advantage estimators that compare the responses to one prompt, each a function of their rewards.

The library's function ``group_advantages``, the launcher's flag ``--advantage-estimator`` and its checks read the table
:data:`GROUP_ESTIMATORS`. To add an estimator, define it at the end of this module, or keep it in a module of your own
and name it by ``--advantage-estimator python:pkg.module:OBJECT``.

A *row* is one entry of the tensors of a batch. Usually it is a response. A response may also be several rows, the parts
of one rollout. A response is *kept* if the caller lets it count.
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

EPSILON = 1e-6  # added to a standard deviation before something is divided by it


@dataclass(frozen=True)
class BatchSums:
    """The arguments of sums over the responses of the whole batch.

    Attributes:
        counts_here: [n] bool, True for the rows that this rank adds to a sum. All ranks of a CP group hold the same
            rows, and only the first of these ranks adds them.
        dp_cp: the group of the ranks that hold the other responses.
    """

    counts_here: Tensor
    dp_cp: Group | None


@dataclass(frozen=True, kw_only=True)
class PromptTerms:
    """The inputs of an estimator: for each row the reward of its response, and statistics of its prompt.

    Every tensor is [n], one entry for each row, and float64 if nothing else is said. The statistics of a prompt are
    over its kept responses, each of them once, even if it has several rows. The estimator may return anything for a row
    that is not kept: its caller sets that advantage to 0.

    Attributes:
        rewards: x, the reward of the row's response.
        kept: bool, True if the row's response is kept.
        counts: number of kept responses to the row's prompt.
        weights: w, how much the response counts in the mean and the variance: 1, or its importance weight. With
            ``weighted_by_length`` it is multiplied by the length of the response.
        means: the prompt's mean, Σ w x / Σ w; 0 for a prompt with a single response.
        centred: x - mean. It is exactly 0 if the prompt's rewards are equal, without the rounding error of the mean;
            and if only one of several responses to the prompt is kept.
        variances: the prompt's variance of x: that of a sample, divided by n - 1 if all weights are 1. It is 1 if fewer
            than two responses have a weight.
        leave_one_out: the factor Σ w / (Σ w - w), by which ``centred`` must be multiplied to become x minus the mean
            of the *other* responses. It is 0 if no other response counts.
        f_norm: the argument ``f_norm`` of ``group_advantages``.
        shares: 1/k if the row is one of the k kept rows of its response; 0 if it is not kept.
        prompts: for :meth:`prompt_sum` and :meth:`prompt_max`: the prompt of each row, and the ranks with other rows.
        batch: for :meth:`batch_sum`; None unless the estimator is declared with ``uses_batch``.
        given_lengths: number of tokens of each response, for :attr:`lengths`; None if the caller passed no lengths.
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
        """Number of tokens of each row's response, [n]; ValueError if the caller passed no lengths."""
        if self.given_lengths is None:
            raise ValueError("the estimator uses the lengths of responses: give lengths")
        return self.given_lengths

    def prompt_sum(self, values: Tensor) -> Tensor:
        """Return, for each row, the sum of ``values`` over the kept responses to its prompt, [n].

        Every rank must make the same calls. Collectives: with ``num_groups`` one SUM of [num_groups + 1] over
        ``dp_cp``.
        """
        (sums,) = self.prompts.sum(torch.where(self.kept, self.shares * values, 0))
        return sums[self.prompts.prompt_of_row]

    def prompt_max(self, values: Tensor) -> Tensor:
        """Return, for each row, the largest of ``values`` among the kept responses to its prompt, [n]; -inf if none is.

        Every rank must make the same calls. Collectives: with ``num_groups`` one MAX of [num_groups + 1] over
        ``dp_cp``.
        """
        largest = self.prompts.max(torch.where(self.kept, values, -torch.inf))
        return largest[self.prompts.prompt_of_row]

    def batch_sum(self, *values: Tensor) -> Tensor:
        """Return the sum of each of these [n] tensors over the kept responses of the whole batch: [number of tensors].

        Every rank must make the same calls. Collectives: one SUM of [number of tensors] over ``dp_cp``.

        Raises:
            ValueError: the estimator is not declared with ``uses_batch=True``.
        """
        if self.batch is None:
            raise ValueError("the estimator uses terms.batch_sum: define it with uses_batch=True")
        shares_here = torch.where(self.kept & self.batch.counts_here, self.shares, 0)
        sums = torch.stack([torch.where(shares_here > 0, shares_here * value, 0).sum() for value in values])
        return all_reduce_sum(sums, self.batch.dp_cp)


@dataclass(frozen=True, kw_only=True)
class AdvantageEstimator:
    """An estimator of the advantages of whole responses: its function, and the inputs that it needs.

    Attributes:
        name: the name in flags and arguments, for example ``grpo-no-std``.
        words: the formula, for a list of estimators, for example "x - mean".
        advantage: function from the terms of all rows to the advantage of each row, [n].
        weighted_by_length: True: in the prompt's mean and variance a response counts by its number of tokens, too.
        needs_several: True: the only response to a prompt always has the advantage 0.
        uses_batch: True: the function calls ``terms.batch_sum``, and so needs the groups of ranks that hold the other
            responses.

    Raises:
        ValueError: at definition, if something is missing, or the function does not give one finite number a row.
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
    """Return the first mistake in a definition, or None; the function is tried on four responses to two prompts."""
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
    """Return terms to try an estimator on: three responses to one prompt, and a single response to another prompt."""
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
    """Add estimators to the table; ValueError for a name that is in it already."""
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


# The functions of the estimators. ``megatron_rc.advantages.group.group_advantages`` names their papers.


def _centred(terms: PromptTerms) -> Tensor:
    """The reward minus the prompt's mean."""
    return terms.centred


def _standardised(terms: PromptTerms) -> Tensor:
    """The reward minus the prompt's mean, divided by (the prompt's standard deviation + 1e-6)."""
    return terms.centred / (terms.variances.sqrt() + EPSILON)


def _leave_one_out(terms: PromptTerms) -> Tensor:
    """The reward minus the mean reward of the other responses to the prompt; x - mean if no other one counts."""
    factor = torch.where(terms.leave_one_out == 0, 1, terms.leave_one_out)
    return terms.centred * factor


def _leave_one_out_or_zero(terms: PromptTerms) -> Tensor:
    """The reward minus the mean reward of the other responses to the prompt; 0 if no other one counts."""
    return torch.where(terms.leave_one_out == 0, 0, terms.centred * terms.leave_one_out)


def _lead(terms: PromptTerms) -> Tensor:
    """For the best response to a prompt, its reward minus the second best; for all others, and if two are best, 0."""
    best = terms.prompt_max(terms.rewards)
    is_best = terms.kept & (terms.rewards == best)
    # A response of k rows is added as k times 1/k: rounding makes the sum a whole number again.
    num_best = terms.prompt_sum(is_best.double()).round()
    second_best = terms.prompt_max(terms.rewards.masked_fill(is_best, -torch.inf))
    is_ahead = is_best & (num_best == 1) & second_best.isfinite()
    lead = torch.where(is_ahead, terms.rewards - second_best, 0)
    # The variance is NaN if a reward of the prompt is not finite: adding 0 · NaN makes all its advantages NaN.
    return lead + 0 * terms.variances


def _standardised_lead(terms: PromptTerms) -> Tensor:
    """The lead of the best response, divided by (the prompt's standard deviation + 1e-6)."""
    return _lead(terms) / (terms.variances.sqrt() + EPSILON)


def _gpg(terms: PromptTerms) -> Tensor:
    """α (x - mean) / f_norm; α is (number of responses in the batch) / (number of those whose reward is not 0)."""
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
