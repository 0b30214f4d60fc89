"""Advantages of whole responses, against the other responses to the same prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.advantages.estimators import GROUP_ESTIMATORS, AdvantageEstimator, BatchSums, PromptTerms, estimator_of
from megatron_rc.advantages.responses import PromptSums, ResponseRows
from megatron_rc.advantages.shards import check_floats, kept_sequences
from megatron_rc.parallel.arguments import check_kind, check_number, check_tensors
from megatron_rc.parallel.groups import ParallelGroups, group_rank
from megatron_rc.parallel.layout import LAYOUT_REMEDY, Layouts, SequenceLayout

__all__ = ["GROUP_ESTIMATORS", "group_advantages"]

ROUNDING = 1e-12  # relative: the mean of equal rewards differs from them by less than this, because of rounding
# Relative to the prompt's sum of weights: if the degrees of freedom are fewer, one response has all of the weight, and
# the prompt has no variance.
_NO_FREEDOM = 1e-12


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    estimator: str | AdvantageEstimator = "grpo",
    lengths: Tensor | None = None,
    weights: Tensor | None = None,
    kept: Tensor | None = None,
    rollout_ids: Tensor | None = None,
    f_norm: float = 1.0,
    num_groups: int | None = None,
    groups: ParallelGroups | None = None,
    layout: Layouts | None = None,
) -> Tensor:
    """Advantages of whole responses: how much better a response is than the others to the same prompt.

    x is the reward; mean and std (that of a sample, divided by n - 1) are over the kept responses to the prompt::

        grpo: (x - mean) / (std + 1e-6)    Shao et al. 2024, "DeepSeekMath"
        grpo-no-std: x - mean              Liu et al. 2025, "Understanding R1-Zero-Like Training" (Dr. GRPO)
        rloo: x - mean of the other ones   Ahmadian et al. 2024, "Back to Basics"
        rloo-vectorized:                   the same, and 0 for the only response to a prompt
        opo: x - mean weighted by lengths  Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline"
        grpo-passk: (x - x of the second best) / (std + 1e-6) for the best response, 0 for all others
                                           Tang et al. 2025, "Optimizing Language Models for Inference Time Objectives
                                           using Reinforcement Learning", divided as verl's ``grpo_passk`` is
        grpo-passk-no-std:                 the same without the division
        gpg: α (x - mean) / f_norm         Chu et al. 2025, "GPG: A Simple and Strong Reinforcement Learning Baseline",
                                           with verl's α: kept responses over kept responses with a reward that is not 0

    A prompt with one response has nothing to compare it with: its mean is taken as 0 and its std as 1. The mean of
    ``opo`` is also 0 if no kept response has a token. If only one of several responses is kept, its advantage is 0.
    ``grpo-passk`` and ``grpo-passk-no-std`` give 0 in both cases, and if two responses share the highest reward.

    With ``weights`` w the mean is Σ w x / Σ w, for ``rloo`` over the other responses, and the variance is
    Σ w (x - mean)² / (Σ w - Σ w² / Σ w). It is 1 if fewer than two responses have a weight; for this, a weight below
    1e-12 of the prompt's sum counts as 0. With ``rloo`` the advantage is 0 if all other responses have the weight 0.
    With importance weights the mean estimates the mean reward of the policy that trains, not of the policy that sampled
    (self-normalised importance sampling, Hesterberg 1995, "Weighted Average Importance Sampling and Defensive Mixture
    Distributions").

    Args:
        rewards: [n], one for each response; summed in float64.
        group_ids: [n] int64, equal for the responses to one prompt.
        estimator: see above, or an :class:`.AdvantageEstimator` of your own.
        lengths: [n], number of counted tokens of each response; needed by ``opo``, and by estimators of your own that
            use them.
        weights: [n], finite and at least 0: how much each response counts in its prompt's mean and variance. ``opo``
            multiplies them by the lengths. A negative or NaN weight makes the advantages of its prompt NaN. Default:
            all responses count alike.
        kept: [n] bool. A response for which it is False counts in no mean and no variance, and has the advantage 0.
            Default: all responses count.
        rollout_ids: [n] int64: rows of one prompt with equal ids are parts of one response, for example the
            conversation of a sub-agent, or the parts before and after a compaction of the context. Such a response
            counts once, and each of its rows gets its advantage. The rows must have equal rewards and weights, and must
            be on one rank; the length of the response is the sum of their lengths. Default: each row is a response.
        f_norm: used by ``gpg`` alone.
        num_groups: number of prompts of the whole batch; needed if the responses to a prompt are on several
            data-parallel ranks. Ids are then in [0, num_groups). Default: all responses to a prompt are on this rank,
            and ids may be any numbers.
        groups: the ranks that hold the other responses; needs ``num_groups``. Only estimators with a sum over the whole
            batch, such as the α of ``gpg``, take it without ``num_groups``, if all responses to a prompt are on one
            rank. Default: this process alone.
        layout: the layout of these responses, or a list with one for each micro-batch; needed if micro-batches have CP
            groups of their own. Default: all ranks of ``groups.cp`` hold the same responses.

    Returns:
        [n], float64; equal on the ranks of a CP group. If a kept reward is NaN or infinite, so are the advantages
        of its prompt, except those that are 0 in any case; the correction's ``check()`` reports them.

    Collectives: with ``num_groups`` two SUMs over ``dp_cp``, of [num_groups + 1, 5] doubles (6 with ``rollout_ids``)
    and of [num_groups + 1], and for ``grpo-passk`` and ``grpo-passk-no-std`` one SUM and two MAX of [num_groups + 1]
    more. For ``gpg`` one SUM of two doubles over ``dp_cp``. For an estimator of your own, those of the methods of
    :class:`.PromptTerms` that it calls.
    Host synchronisations: one, with or without ``num_groups``; with ``rollout_ids`` also those of ``torch.unique``.
    Gradient: none.

    Raises:
        ValueError: the estimator is unknown or lacks the lengths, f_norm is not above 0, shapes or dtypes are wrong,
            ``groups`` comes without ``num_groups``, or ``num_groups`` without ``groups`` in a job of several ranks. On
            every rank alike, if any rank has an id that is not in [0, num_groups), or rows of one rollout with
            different rewards or weights.
    """
    chosen = estimator_of(estimator)
    check_tensors({}, rewards=rewards)
    kept = kept_sequences(group_ids, kept, rewards.numel())
    check_floats("rewards", rewards, group_ids.shape, "sequences")
    check_number("f_norm", f_norm, lambda x: 0 < x < math.inf, "must be finite and above 0")
    rows = ResponseRows(group_ids, rollout_ids, kept)
    if lengths is not None:
        _check_lengths(lengths, len(rewards))
        lengths = rows.total(lengths)
    counted_weights = _weights(rewards, chosen, lengths=lengths, weights=weights)

    batch_groups = ParallelGroups.given(groups)
    _check_together(chosen, num_groups=num_groups, groups=groups)
    if layout is not None and groups is None:
        raise ValueError("layout does nothing without groups, whose ranks share sequences: pass both, or drop layout")
    counts_here = _counts_here(group_ids, layout, batch_groups)
    prompts = PromptSums(group_ids, num_groups=num_groups, groups=batch_groups, counts_here=counts_here)

    terms = _prompt_terms(
        rewards.detach().double(),
        counted_weights,
        rows=rows,
        prompts=prompts,
        num_groups=num_groups,
        checks_rows=rollout_ids is not None,
        f_norm=f_norm,
        batch=BatchSums(counts_here=counts_here, dp_cp=batch_groups.dp_cp) if chosen.uses_batch else None,
        lengths=lengths,
    )
    return torch.where(kept, chosen.advantage(terms), 0)


def _prompt_terms(
    rewards: Tensor,
    weights: Tensor,
    *,
    rows: ResponseRows,
    prompts: PromptSums,
    num_groups: int | None,
    checks_rows: bool,
    f_norm: float,
    batch: BatchSums | None,
    lengths: Tensor | None,
) -> PromptTerms:
    """The inputs of an estimator: counts, means and variances of every prompt, for each row.

    Args:
        rewards: [n] float64.
        weights: [n] float64, how much each response counts.
        rows: the rows that make each response.
        prompts: the sums over each prompt.
        num_groups: prompts of the whole batch, or None; ids out of its range are a ValueError on every rank.
        checks_rows: responses may have several rows, whose rewards and weights must be equal; else a ValueError on
            every rank.
        f_norm: divisor that some estimators use.
        batch: the sums over the batch for an estimator that uses them.
        lengths: [n] tokens of each response, or None.

    Collectives: the two SUMs of :func:`group_advantages`.
    """
    sums = _checked_sums(rewards, weights, rows=rows, prompts=prompts, num_groups=num_groups, checks_rows=checks_rows)
    prompt = prompts.prompt_of_row
    # A prompt with one response has nothing to compare it with.
    mean_of_prompt = torch.where(sums.num_all > 1, sums.weighted_rewards / sums.safe_weight, 0)
    means = mean_of_prompt[prompt]
    centred = _centred(rewards, means, is_only_kept=((sums.num_all > 1) & (sums.num_kept == 1))[prompt])

    (squares,) = prompts.sum(torch.where(rows.kept, rows.share_of_kept * weights * centred.square(), 0))
    variance_of_prompt = _variances(squares, sums)

    return PromptTerms(
        rewards=rewards,
        kept=rows.kept,
        counts=sums.num_kept[prompt],
        weights=weights,
        means=means,
        centred=centred,
        variances=variance_of_prompt[prompt],
        leave_one_out=_leave_one_out(weights, sums, prompt),
        f_norm=f_norm,
        shares=rows.share_of_kept,
        prompts=prompts,
        batch=batch,
        given_lengths=lengths,
    )


@dataclass(frozen=True)
class _PromptTable:
    """Sums over the responses to each prompt, [entries of the prompts' table] float64 each.

    Attributes:
        num_all: number of responses.
        num_kept: number of kept responses.
        weight: sum of the kept responses' weights w.
        squared_weight: sum of w².
        weighted_rewards: sum of w x, with the reward x.
    """

    num_all: Tensor
    num_kept: Tensor
    weight: Tensor
    squared_weight: Tensor
    weighted_rewards: Tensor

    @property
    def safe_weight(self) -> Tensor:
        """``weight``, with 1 where it is 0, to divide by."""
        return torch.where(self.weight > 0, self.weight, 1)


def _checked_sums(
    rewards: Tensor,
    weights: Tensor,
    *,
    rows: ResponseRows,
    prompts: PromptSums,
    num_groups: int | None,
    checks_rows: bool,
) -> _PromptTable:
    """Sum over the responses to each prompt, and refuse bad ids and rows; arguments as for :func:`_prompt_terms`.

    Collectives: one SUM of [num_groups + 1, 5] doubles over ``dp_cp``, or of 6 columns with ``checks_rows``.
    Host synchronisations: one with ``num_groups`` or ``checks_rows``.
    """
    # Each of a response's k kept rows counts 1/k, so that the response counts once.
    share = rows.share_of_kept
    columns = [
        rows.share_of_all,
        share,
        torch.where(rows.kept, share * weights, 0),
        torch.where(rows.kept, share * weights.square(), 0),
        torch.where(rows.kept, share * weights * rewards, 0),
    ]
    if checks_rows:
        columns.append(rows.differ(rewards, weights).double())
    sums = prompts.sum(*columns)

    # k shares of 1/k add up to 1 only up to rounding: round the sums to the numbers of responses that they are.
    num_all = sums[0].round()
    if num_groups is not None or checks_rows:
        none = rewards.new_zeros(())
        num_outside = none if num_groups is None else num_all[num_groups]
        num_differing = sums[5].sum() if checks_rows else none
        _check_counts(torch.stack([num_outside, num_differing]).tolist(), num_groups)
    return _PromptTable(
        num_all=num_all,
        num_kept=sums[1].round(),
        weight=sums[2],
        squared_weight=sums[3],
        weighted_rewards=sums[4],
    )


def _check_counts(counts: Sequence[float], num_groups: int | None) -> None:
    """Raise ValueError if responses have an id out of range, or rows of one rollout differ; ``counts`` of the two."""
    num_outside, num_differing = counts
    if num_outside:
        raise ValueError(
            f"group_ids of {int(num_outside)} responses do not lie in [0, num_groups={num_groups}): number the "
            "prompts of the batch from 0, alike on every rank"
        )
    if num_differing:
        raise ValueError(
            f"rollout_ids: {int(num_differing)} rows have another reward or weight than other rows of their "
            "rollout: give each row of a rollout the rollout's reward and weight, or leave rollout_ids out"
        )


def _centred(rewards: Tensor, means: Tensor, *, is_only_kept: Tensor) -> Tensor:
    """Return the rewards minus the means of their prompts, [n]; exactly 0 where they are equal.

    Rounding may leave a weighted mean different from equal rewards, or from the only one: ``is_only_kept``, [n] bool.
    """
    centred = rewards - means
    is_rounding = centred.abs() <= ROUNDING * rewards.abs()
    # x - x is 0, and NaN if the reward is not finite.
    zero_or_nan = rewards - rewards
    return torch.where(is_only_kept | is_rounding, zero_or_nan, centred)


def _variances(squares: Tensor, sums: _PromptTable) -> Tensor:
    """Return each prompt's variance from its sum of w (x - mean)²; 1 if fewer than two responses have a weight."""
    # The degrees of freedom: n - 1 if all n responses have the weight 1.
    freedom = sums.weight - sums.squared_weight / sums.safe_weight
    has_no_freedom = freedom <= _NO_FREEDOM * sums.weight
    return torch.where(has_no_freedom, 1, squares / torch.where(freedom > 0, freedom, 1))


def _leave_one_out(weights: Tensor, sums: _PromptTable, prompt: Tensor) -> Tensor:
    """Return the factor Σ w / (Σ w - w) of each row, [n]; 0 if no other response to its prompt counts.

    ``prompt``, [n]: the entry of each row's prompt in the table.
    """
    weight_of_prompt = sums.weight[prompt]
    weight_of_others = weight_of_prompt - weights
    has_no_other = (sums.num_kept[prompt] < 2) | (weight_of_others <= 0)
    safe_weight_of_others = torch.where(weight_of_others == 0, 1, weight_of_others)
    return torch.where(has_no_other, 0, weight_of_prompt / safe_weight_of_others)


def _check_together(estimator: AdvantageEstimator, *, num_groups: int | None, groups: ParallelGroups | None) -> None:
    """Refuse a call that gives the ranks without the prompts, or the reverse: its baselines would be a rank's own."""
    if num_groups is None and groups is not None and not estimator.uses_batch:
        raise ValueError(
            "groups does nothing without num_groups: pass num_groups= as well, the prompts of the whole batch, or drop "
            "groups if all responses to a prompt lie on this rank"
        )
    if num_groups is not None and groups is None and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"num_groups={num_groups} without groups is this rank's responses alone: pass groups= as well, for example "
            "ParallelGroups.from_megatron(), or drop num_groups if all responses to a prompt lie on this rank"
        )


def _check_lengths(lengths: Tensor, num_rows: int) -> None:
    """Raise ValueError unless there is one number of tokens for each row."""
    check_tensors({}, lengths=lengths)
    if lengths.shape != (num_rows,) or lengths.dtype == torch.bool:
        raise ValueError(
            f"lengths is {lengths.dtype} {tuple(lengths.shape)}: expected a number of tokens for each of {num_rows} "
            "sequences"
        )


def _weights(
    rewards: Tensor, estimator: AdvantageEstimator, *, lengths: Tensor | None, weights: Tensor | None
) -> Tensor:
    """How much each reward counts in its prompt's mean, [n] float64; NaN for a weight that is negative or NaN."""
    counted = torch.ones_like(rewards, dtype=torch.float64)
    if weights is not None:
        check_floats("weights", weights, rewards.shape, "sequences")
        counted = torch.where(weights >= 0, weights.detach().double(), torch.nan)
    if not estimator.weighted_by_length:
        return counted
    if lengths is None:
        raise ValueError(f"estimator={estimator.name!r} weights rewards by the lengths of responses: give lengths")
    return counted * lengths.double()


def _counts_here(group_ids: Tensor, layout: Layouts | None, groups: ParallelGroups) -> Tensor:
    """Return [n] bool: the rows that count on this rank, because it is the first of their CP group."""
    if layout is None:
        return torch.full_like(group_ids, group_rank(groups.cp) == 0, dtype=torch.bool)
    layouts = [layout] if isinstance(layout, SequenceLayout) else [*layout]
    for micro_batch in layouts:
        check_kind("layout", micro_batch, SequenceLayout, f"{LAYOUT_REMEDY}, or a list of them")
        if micro_batch.cp_group is None:
            groups.check_cut(micro_batch.cp_rank, micro_batch.cp_size)
    groups.check_sums(*(micro_batch.cp_group for micro_batch in layouts))

    is_first = [micro_batch.cp_rank == 0 for micro_batch in layouts for _ in micro_batch.full_lengths]
    if len(is_first) != len(group_ids):
        raise ValueError(f"layout has {len(is_first)} sequences: expected one for each of {len(group_ids)} group_ids")
    return torch.tensor(is_first, dtype=torch.bool, device=group_ids.device)
