"""Advantages of whole responses, against the other responses to the same prompt."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.advantages.shards import check_floats, kept_sequences
from megatron_rc.parallel.arguments import check_integer, check_kind, check_number, check_tensors, one_of
from megatron_rc.parallel.collectives import all_reduce_max, all_reduce_sum
from megatron_rc.parallel.groups import ParallelGroups, group_rank
from megatron_rc.parallel.layout import LAYOUT_REMEDY, Layouts, SequenceLayout

EPSILON = 1e-6
ROUNDING = 1e-12  # of a reward: a mean of equal rewards differs from them by less
_NO_FREEDOM = 1e-12  # of the sum of weights: the others of a response with so little weight give no deviation


# From the reward less the mean of its group, the group's variance, and the factor that leaves each response out of its
# own mean: 0 if no other response counts. [n] each.
GROUP_ESTIMATORS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "grpo": lambda centred, variance, factor: centred / (variance.sqrt() + EPSILON),
    "grpo-no-std": lambda centred, variance, factor: centred,
    "rloo": lambda centred, variance, factor: centred * torch.where(factor == 0, 1, factor),
    "rloo-vectorized": lambda centred, variance, factor: torch.where(factor == 0, 0, centred * factor),
    "opo": lambda centred, variance, factor: centred,  # over another mean
    # Of the lead over the second best.
    "grpo-passk": lambda lead, variance, factor: lead / (variance.sqrt() + EPSILON),
    "grpo-passk-no-std": lambda lead, variance, factor: lead + 0 * variance,  # NaN if a reward is not finite
    "gpg": lambda centred, variance, factor: centred,  # times one factor for the batch
}
_OF_THE_BEST = ("grpo-passk", "grpo-passk-no-std")


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    estimator: str = "grpo",
    lengths: Tensor | None = None,
    weights: Tensor | None = None,
    kept: Tensor | None = None,
    rollout_ids: Tensor | None = None,
    f_norm: float = 1.0,
    num_groups: int | None = None,
    groups: ParallelGroups | None = None,
    layout: Layouts | None = None,
) -> Tensor:
    """How much better a response is than the others to its prompt.

    x is the reward, mean and std (of a sample: n - 1) are over the prompt's kept responses::

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
    Σ w (x - mean)² / (Σ w - Σ w² / Σ w), or 1 if fewer than two responses have a weight; there a weight counts as none
    below 1e-12 of the prompt's sum. For ``rloo`` a response whose others all have weight 0 gets 0. With importance
    weights the mean estimates the mean reward of the policy that trains, not of the policy that sampled
    (self-normalised importance sampling, Hesterberg 1995, "Weighted Average Importance Sampling and Defensive Mixture
    Distributions").

    Args:
        rewards: [n], one for each response; summed in float64.
        group_ids: [n] int64, equal for the responses to one prompt.
        estimator: see above.
        lengths: [n], tokens of each response that count; needed and used by ``opo`` alone.
        weights: [n], finite and at least 0: how much each response counts in the mean and the deviation of its prompt;
            ``opo`` multiplies them by the lengths. A negative or NaN weight makes its prompt's advantages NaN.
            Default: all count alike.
        kept: [n] bool; the others count in no mean and no deviation, and have 0. Default: all are.
        rollout_ids: [n] int64: rows of one prompt with equal ids are parts of one response, for example what a
            sub-agent did, or what stood before and behind a compaction of the context. Such a response counts once, and
            each of its rows has its advantage. Its rows have equal rewards and weights, its length is the sum of
            theirs, and they lie on one rank. Default: each row is a response.
        f_norm: used by ``gpg`` alone.
        num_groups: number of prompts of the whole batch, if the responses to one lie on several data-parallel ranks;
            ids lie below it, from 0. Default: all responses to a prompt lie on this rank, and ids are any numbers.
        groups: the ranks that hold the other responses; needs ``num_groups``. ``gpg`` alone takes it without, for its α
            over the batch: all responses to a prompt then lie on this rank. Default: this process alone.
        layout: which responses these are, a layout or a list with one a micro-batch: needed if micro-batches have CP
            groups of their own. Default: all ranks of ``groups.cp`` hold the same responses.

    Returns:
        [n], float64; equal on the ranks of a CP group. If a kept reward is NaN or infinite, so are the advantages
        of its prompt, except those that are 0 in any case; the correction's ``check()`` reports them.

    Collectives: with ``num_groups`` two SUMs over ``dp_cp``, of [num_groups + 1, 5] doubles (6 with ``rollout_ids``)
    and of [num_groups + 1], and
    for ``grpo-passk`` and ``grpo-passk-no-std`` one SUM and two MAX of [num_groups + 1] more. For ``gpg`` one SUM of
    two doubles over ``dp_cp``.
    Host synchronisations: one, with or without ``num_groups``. Gradient: none.

    Raises:
        ValueError: the estimator is unknown or lacks the lengths, f_norm is not above 0, shapes or dtypes are wrong,
            ``groups`` comes without ``num_groups``, or ``num_groups`` without ``groups`` in a job of several ranks; on
            every rank alike, an id of any of them is not in [0, num_groups), or rows of one rollout have different
            rewards or weights.
    """
    one_of("estimator", estimator, GROUP_ESTIMATORS)
    check_tensors({}, rewards=rewards)
    kept = kept_sequences(group_ids, kept, rewards.numel())
    check_floats("rewards", rewards, group_ids.shape, "sequences")
    check_number("f_norm", f_norm, lambda x: 0 < x < math.inf, "must be finite and above 0")
    rollouts = _Rollouts(group_ids, rollout_ids, kept)
    counts = _weights(rewards, estimator, lengths if lengths is None else rollouts.total(lengths), weights)
    batch = ParallelGroups.given(groups)
    _check_together(estimator, num_groups, groups)
    if layout is not None and groups is None:
        raise ValueError("layout does nothing without groups, whose ranks share sequences: pass both, or drop layout")
    here = _counts_here(group_ids, layout, batch)
    add = _Totals(group_ids, num_groups, batch, here)
    group = add.group
    rewards = rewards.detach().double()
    # The rows of one response share what it counts, so that it counts once.
    share = rollouts.share_of_kept
    kept_terms = [share, share * counts, share * counts.square(), share * counts * rewards]
    terms = [rollouts.share_of_all, *(torch.where(kept, term, 0) for term in kept_terms)]
    if rollout_ids is not None:
        terms.append(rollouts.differ(rewards, counts).double())
    count, size, weight, square, total, *differing = add(*terms)
    if num_groups is not None and count[num_groups]:
        raise ValueError(
            f"{int(count[num_groups].ceil())} of group_ids do not lie in [0, num_groups={num_groups}): number the "
            "prompts of the batch from 0, alike on every rank"
        )
    if differing and differing[0].any():
        raise ValueError(
            f"rollout_ids: {int(differing[0].sum())} rows have another reward or weight than other rows of their "
            "rollout: give each row of a rollout the rollout's reward and weight, or leave rollout_ids out"
        )
    # Numbers of responses, from shares that add up to them but for their rounding.
    count, size = count.round(), size.round()
    centred = rewards - torch.where(count > 1, total / torch.where(weight > 0, weight, 1), 0)[group]
    # A mean with weights is not the only reward, or equal ones, to the last bit; 0, but NaN if not finite.
    is_alone = ((count > 1) & (size == 1))[group]
    centred = torch.where(is_alone | (centred.abs() <= ROUNDING * rewards.abs()), rewards - rewards, centred)
    (squares,) = add(torch.where(kept, share * counts * centred.square(), 0))
    # The number of responses less 1, if they count alike.
    freedom = weight - square / torch.where(weight > 0, weight, 1)
    variance = torch.where(freedom <= _NO_FREEDOM * weight, 1, squares / torch.where(freedom > 0, freedom, 1))
    others = weight[group] - counts
    factor = torch.where((size[group] < 2) | (others <= 0), 0, weight[group] / torch.where(others == 0, 1, others))
    above = add.lead(rewards, kept, share) if estimator in _OF_THE_BEST else centred
    found = GROUP_ESTIMATORS[estimator](above, variance[group], factor)
    if estimator == "gpg":
        found = found * (_alpha_of_gpg(rewards, torch.where(here, share, 0), batch) / f_norm)
    return torch.where(kept, found, 0)


def _check_together(estimator: str, num_groups: int | None, groups: ParallelGroups | None) -> None:
    """Refuse a call that gives the ranks without the prompts, or the reverse: its baselines would be a rank's own."""
    if num_groups is None and groups is not None and estimator != "gpg":
        raise ValueError(
            "groups does nothing without num_groups: pass num_groups= as well, the prompts of the whole batch, or drop "
            "groups if all responses to a prompt lie on this rank"
        )
    if num_groups is not None and groups is None and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"num_groups={num_groups} without groups is this rank's responses alone: pass groups= as well, for example "
            "ParallelGroups.from_megatron(), or drop num_groups if all responses to a prompt lie on this rank"
        )


def _weights(rewards: Tensor, estimator: str, lengths: Tensor | None, weights: Tensor | None) -> Tensor:
    """How much each reward counts in the mean, [n] float64."""
    counts = torch.ones_like(rewards, dtype=torch.float64)
    if weights is not None:
        check_floats("weights", weights, rewards.shape, "sequences")
        counts = torch.where(weights >= 0, weights.detach().double(), torch.nan)
    if estimator != "opo":
        return counts
    if lengths is None:
        raise ValueError("estimator='opo' weights rewards by the lengths of responses: give lengths")
    check_tensors({}, lengths=lengths)
    if lengths.shape != rewards.shape or lengths.dtype == torch.bool:
        raise ValueError(
            f"lengths is {lengths.dtype} {tuple(lengths.shape)}: expected a number of tokens for each of "
            f"{len(rewards)} sequences"
        )
    return counts * lengths.double()


def _alpha_of_gpg(rewards: Tensor, shares: Tensor, groups: ParallelGroups) -> Tensor:
    """α of GPG: kept responses of the batch, divided by the number of those whose reward is not 0, or by 1.

    ``shares``, [n] float64: 1 for a row that is a response, 1/k for each of k rows of one response; 0 for rows that are
    dropped, or that another rank of the CP group counts. Their sum over all ranks is the number of responses.
    """
    counts = torch.stack([shares.sum(), torch.where(rewards != 0, shares, 0).sum()])
    responses, nonzero = all_reduce_sum(counts, groups.dp_cp)
    factor: Tensor = responses / nonzero.clamp(min=1)
    return factor


def _counts_here(group_ids: Tensor, layout: Layouts | None, groups: ParallelGroups) -> Tensor:
    """[n] bool: the responses that count on this rank, because it is the first of their CP group."""
    if layout is None:
        return torch.full_like(group_ids, group_rank(groups.cp) == 0, dtype=torch.bool)
    layouts = [layout] if isinstance(layout, SequenceLayout) else [*layout]
    for one in layouts:
        check_kind("layout", one, SequenceLayout, f"{LAYOUT_REMEDY}, or a list of them")
        if one.cp_group is None:
            groups.check_cut(one.cp_rank, one.cp_size)
    groups.check_sums(*(one.cp_group for one in layouts))
    firsts = [one.cp_rank == 0 for one in layouts for _ in one.full_lengths]
    if len(firsts) != len(group_ids):
        raise ValueError(f"layout has {len(firsts)} sequences: expected one for each of {len(group_ids)} group_ids")
    return torch.tensor(firsts, dtype=torch.bool, device=group_ids.device)


class _Rollouts:
    """The responses that consist of several rows, all of them on this rank."""

    def __init__(self, group_ids: Tensor, rollout_ids: Tensor | None, kept: Tensor) -> None:
        """Rows of one prompt with equal ``rollout_ids`` are one response; without ids each row is one."""
        ones = torch.ones_like(group_ids, dtype=torch.float64)
        self.share_of_all = ones  # [n] float64, 1 over the rows of the response
        self.share_of_kept = torch.where(kept, ones, 0)  # [n] float64, 1 over its kept rows; 0 for the others
        self._response: Tensor | None = None  # [n] int64, the number of each row's response
        self._kept = kept
        if rollout_ids is None:
            return
        check_tensors({}, rollout_ids=rollout_ids)
        if rollout_ids.shape != group_ids.shape or rollout_ids.dtype != torch.int64:
            raise ValueError(
                f"rollout_ids is {rollout_ids.dtype} {tuple(rollout_ids.shape)}: expected torch.int64 "
                f"{tuple(group_ids.shape)}, one a row"
            )
        pairs = torch.stack([group_ids, rollout_ids], dim=1)
        _, self._response = pairs.unique(dim=0, return_inverse=True)
        self.share_of_all = 1 / self._sum(ones)
        self.share_of_kept = self.share_of_kept / self._sum(self.share_of_kept).clamp(min=1)

    def total(self, values: Tensor) -> Tensor:
        """[n]: the sum of a value over the kept rows of each row's response."""
        if self._response is None:
            return values
        return self._sum(torch.where(self._kept, values.double(), 0))

    def differ(self, *values: Tensor) -> Tensor:
        """[n] bool: kept rows with another value than the first kept row of their response."""
        if self._response is None:
            return torch.zeros_like(self.share_of_all, dtype=torch.bool)
        last_row = len(self._response) - 1
        rows = torch.arange(len(self._response), device=self._response.device)
        kept_rows = torch.where(self._kept, rows, last_row)
        first = torch.full_like(rows, last_row).scatter_reduce_(0, self._response, kept_rows, "amin")[self._response]
        # NaN is no difference: the correction's check reports it.
        differs = [(value != value[first]) & (value == value) for value in values]
        return torch.stack(differs).any(dim=0) & self._kept

    def _sum(self, values: Tensor) -> Tensor:
        sums = torch.zeros(len(values), dtype=torch.float64, device=values.device)
        return sums.index_add_(0, self._response, values)[self._response]  # type: ignore[arg-type]


class _Totals:
    """Sums over the responses to each prompt, of all ranks; CP ranks hold the same responses, the first one counts."""

    def __init__(self, group_ids: Tensor, num_groups: int | None, groups: ParallelGroups, here: Tensor) -> None:
        """Sums for ids that are any numbers on this rank, or with ``num_groups`` lie below it on all ranks."""
        if num_groups is None:
            known, self.group = group_ids.unique(return_inverse=True)
            self.number, self.groups, self.here = len(known), ParallelGroups(), torch.ones_like(here)
            return
        check_integer("num_groups", num_groups, least=0)
        # The last one is of ids that belong to none.
        self.group = torch.where((group_ids >= 0) & (group_ids < num_groups), group_ids, num_groups)
        self.number, self.groups, self.here = num_groups + 1, groups, here

    def __call__(self, *values: Tensor) -> tuple[Tensor, ...]:
        columns = torch.where(self.here.unsqueeze(1), torch.stack(values, dim=1), 0)
        sums = columns.new_zeros(self.number, len(values)).index_add_(0, self.group, columns)
        return all_reduce_sum(sums, self.groups.dp_cp).unbind(1)

    def lead(self, rewards: Tensor, kept: Tensor, shares: Tensor) -> Tensor:
        """[n] by how much a prompt's best kept response exceeds its second best; 0 for the others, and without one.

        ``shares``, [n] float64, of a response's kept rows add up to 1.
        """
        best = self._highest(rewards, kept)[self.group]
        is_best = kept & (rewards == best)
        (sharing,) = self(torch.where(is_best, shares, 0))
        second = self._highest(rewards, kept & ~is_best)[self.group]
        leads = is_best & (sharing.round()[self.group] == 1) & second.isfinite()
        return torch.where(leads, rewards - second, 0)

    def _highest(self, values: Tensor, counted: Tensor) -> Tensor:
        """The highest counted value of each prompt; -inf without one."""
        values = torch.where(counted, values, -torch.inf)
        highest = values.new_full((self.number,), -torch.inf).scatter_reduce_(0, self.group, values, "amax")
        return all_reduce_max(highest, self.groups.dp_cp)
