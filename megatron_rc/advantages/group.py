"""Advantages of whole responses, against the other responses to the same prompt."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_rc.advantages.shards import check_sequences
from megatron_rc.parallel.collectives import all_reduce_sum
from megatron_rc.parallel.groups import ParallelGroups, group_rank

EPSILON = 1e-6


def _grpo(centred: Tensor, variance: Tensor, size: Tensor) -> Tensor:
    return centred / (variance.sqrt() + EPSILON)


def _grpo_no_std(centred: Tensor, variance: Tensor, size: Tensor) -> Tensor:
    return centred


def _rloo(centred: Tensor, variance: Tensor, size: Tensor) -> Tensor:
    return centred * torch.where(size > 1, size / (size - 1).clamp(min=1), 1)


# From the reward less the mean of its group, the group's variance and its size, [n] each.
GROUP_ESTIMATORS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "grpo": _grpo,
    "grpo-no-std": _grpo_no_std,
    "rloo": _rloo,
    "opo": _grpo_no_std,  # over another mean
}


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    estimator: str = "grpo",
    lengths: Tensor | None = None,
    kept: Tensor | None = None,
    num_groups: int | None = None,
    groups: ParallelGroups | None = None,
) -> Tensor:
    """How much better a response is than the others to its prompt.

    x is the reward, mean and std (of a sample: n - 1) those of the prompt's kept responses:
    ``grpo`` (x - mean) / (std + 1e-6)     Shao et al. 2024, "DeepSeekMath"
    ``grpo-no-std`` x - mean               Liu et al. 2025, "Understanding R1-Zero-Like Training" (Dr. GRPO)
    ``rloo`` x - mean of the other ones    Ahmadian et al. 2024, "Back to Basics"
    ``opo`` x - mean weighted by lengths   Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline"
    A prompt with one response has nothing to compare it with: mean 0 and std 1 are taken. Where one alone of several
    is kept, it has 0.

    Args:
        rewards: [n], one for each response; summed in float64.
        group_ids: [n] int64, equal for the responses to one prompt.
        estimator: see above.
        lengths: [n], tokens of each response that count; ``opo`` needs it, the others have no use for it.
        kept: [n] bool; the others count in no mean and no deviation, and have 0. Default: all are.
        num_groups: number of prompts of the whole batch, where the responses to one lie on several data-parallel ranks;
            ids lie below it. Default: all responses to a prompt lie on this rank.
        groups: with ``num_groups``: the ranks that hold the others.

    Returns:
        [n], float64; equal on the ranks of ``groups.cp``.

    Collectives: with ``num_groups`` two SUMs over ``dp_cp``, of [num_groups, 4] and [num_groups] doubles; else none.
    Gradient: none.

    Raises:
        ValueError: the estimator is unknown or lacks the lengths, or shapes or dtypes are wrong.
    """
    if estimator not in GROUP_ESTIMATORS:
        raise ValueError(f"estimator={estimator!r} is unknown: use one of {', '.join(GROUP_ESTIMATORS)}")
    check_sequences("rewards", rewards, len(group_ids))
    if group_ids.dtype != torch.int64:
        raise ValueError(f"group_ids is {group_ids.dtype}: expected int64")
    kept = torch.ones_like(rewards, dtype=torch.bool) if kept is None else kept
    if kept.dtype != torch.bool or kept.shape != rewards.shape:
        raise ValueError(
            f"kept is {kept.dtype} {tuple(kept.shape)}: expected a bool for each of {len(rewards)} sequences"
        )
    weights = _weights(rewards, estimator, lengths)
    group, number = group_ids, num_groups
    if num_groups is None:
        known, group = group_ids.unique(return_inverse=True)
        number, groups = len(known), None
    add = _Totals(group, int(number or 0), groups)
    rewards, ones = rewards.detach().double(), torch.ones_like(rewards, dtype=torch.float64)
    count, size, weight, total = add(ones, *(torch.where(kept, each, 0) for each in (ones, weights, weights * rewards)))
    centred = rewards - torch.where(count > 1, total / weight.clamp(min=1), 0)[group]
    (squares,) = add(torch.where(kept, centred.square(), 0))
    variance = torch.where(count > 1, squares / (size - 1).clamp(min=1), 1)
    return torch.where(kept, GROUP_ESTIMATORS[estimator](centred, variance[group], size[group]), 0)


def _weights(rewards: Tensor, estimator: str, lengths: Tensor | None) -> Tensor:
    """How much each reward counts in the mean, [n] float64."""
    if estimator != "opo":
        return torch.ones_like(rewards, dtype=torch.float64)
    if lengths is None:
        raise ValueError("estimator='opo' weights rewards by the lengths of responses: give lengths")
    if lengths.shape != rewards.shape or lengths.dtype == torch.bool:
        raise ValueError(
            f"lengths is {lengths.dtype} {tuple(lengths.shape)}: expected a number of tokens for each of "
            f"{len(rewards)} sequences"
        )
    return lengths.double()


class _Totals:
    """Sums over the responses to each prompt, of all ranks; CP ranks hold the same responses, the first one counts."""

    def __init__(self, group: Tensor, number: int, groups: ParallelGroups | None) -> None:
        self.group, self.number, self.groups = group, number, groups or ParallelGroups()

    def __call__(self, *values: Tensor) -> tuple[Tensor, ...]:
        columns = torch.stack(values, dim=1)
        sums = columns.new_zeros(self.number, len(values)).index_add_(0, self.group, columns)
        if group_rank(self.groups.cp):
            sums = torch.zeros_like(sums)
        return all_reduce_sum(sums, self.groups.dp_cp).unbind(1)
