"""Advantages of tokens from later rewards: discounted returns, a critic's values, and whitening over the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.advantages.shards import check_floats, layout_of
from megatron_rc.parallel.arguments import check_number
from megatron_rc.parallel.collectives import all_reduce_max, all_reduce_sum
from megatron_rc.parallel.groups import ParallelGroups
from megatron_rc.parallel.layout import SequenceLayout
from megatron_rc.parallel.recurrence import Recurrence, neighbouring_values

EPSILON = 1e-8  # of the variance in whitening


@dataclass(frozen=True)
class TokenAdvantages:
    """Advantages and returns of every token of a shard.

    Attributes:
        advantages: of the layout's local shape; 0 at masked positions.
        returns: of the same shape; the targets of a critic's values.
    """

    advantages: Tensor
    returns: Tensor


def outcome_rewards(
    rewards: Tensor,
    response_mask: Tensor,
    *,
    layout: SequenceLayout | None = None,
    groups: ParallelGroups | None = None,
) -> Tensor:
    """The reward of each response at its last counted token, 0 at all others.

    Args:
        rewards: [n], one for each sequence.
        response_mask: bool, of the layout's local shape, True if the token counts.
        layout: which tokens these are. Default: padded, rows of the mask.
        groups: ``cp`` holds the other slices of the sequences. Default: this process alone.

    Returns:
        Like the mask, in the dtype of ``rewards``, NaN and infinite ones as they are.

    Collectives: one MAX of [n] int64 over ``cp``. Gradient: none.

    Raises:
        ValueError: shapes or dtypes are wrong.
    """
    groups = ParallelGroups.given(groups)
    layout = layout_of(response_mask, layout, groups)
    check_floats("rewards", rewards, (layout.num_sequences,), "sequences")

    # The last counted position of each whole sequence, -1 without one.
    device = response_mask.device
    positions = layout.positions().to(device, non_blocking=True)
    counted_positions = torch.where(response_mask, positions, -1)
    sequence_of_token = layout.sequence_index.to(device, non_blocking=True)
    last = torch.full((layout.num_sequences,), -1, dtype=torch.int64, device=device)
    last.scatter_reduce_(0, sequence_of_token, counted_positions.flatten(), "amax")
    last = all_reduce_max(last, layout.cp(groups.cp))

    is_last = response_mask & (positions == layout.expand(last))
    return torch.where(is_last, layout.expand(rewards.detach()), 0)


def gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    layout: SequenceLayout | None = None,
    groups: ParallelGroups | None = None,
) -> TokenAdvantages:
    """Generalized advantage estimation, without whitening.

    δ_t = r_t + γ V_{t+1} - V_t,  A_t = δ_t + γλ A_{t+1},  return_t = A_t + V_t;  t+1 is the next counted token of the
    sequence, and behind the last one V and A are 0.    (Schulman et al. 2016, "High-Dimensional Continuous Control
    Using Generalized Advantage Estimation", Eq. 11 to 16)

    Args:
        rewards: of the layout's local shape, one for each token.
        values: like ``rewards``: the critic's, of the state in which the token is chosen.
        response_mask: bool, like ``rewards``, True if the token counts; others change no bit.
        gamma: γ, the discount.
        lam: λ; 1 gives return - V, 0 gives δ.
        layout: which tokens these are. Default: padded, rows of the mask.
        groups: ``cp`` holds the other slices of the sequences. Default: this process alone.

    Returns:
        In the dtype of ``values``, at least float32; computed in float64. If a counted reward or value is NaN or
        infinite, so is everything of its sequence up to there; the correction's ``check()`` reports it.

    Collectives: one SUM of [n, chunks of a sequence, 2] doubles over ``cp``. Gradient: none.

    Raises:
        ValueError: shapes or dtypes are wrong, or γ or λ lies outside [0, 1].
    """
    layout = layout_of(response_mask, layout, groups)
    groups = ParallelGroups.given(groups)
    check_number("gamma", gamma, lambda x: 0 <= x <= 1, "must be a number between 0 and 1")
    check_number("lam", lam, lambda x: 0 <= x <= 1, "must be a number between 0 and 1")
    reward = _counted_values("rewards", rewards, response_mask)
    value = _counted_values("values", values, response_mask)

    # A_t needs one number of the token behind it, H_{t+1}, where H_t = V_t + λ A_t. Put into the definition of A_t:
    # A_t = r_t - V_t + γ H_{t+1}, and H_t = (1 - λ) V_t + λ r_t + λγ H_{t+1}.
    # A masked token has the coefficient 1 and the offset 0: it hands H on to the counted token before it.
    coefficients = torch.where(response_mask, torch.full_like(value, lam * gamma), 1)
    offsets = (1 - lam) * value + lam * reward
    recurrence = Recurrence(layout, coefficients, offsets, backward=True)
    (h_behind,) = neighbouring_values([recurrence], groups.cp)

    advantages = torch.where(response_mask, reward - value + gamma * h_behind, 0)
    returns = advantages + value
    dtype = torch.promote_types(values.dtype, torch.float32)
    return TokenAdvantages(advantages.to(dtype), returns.to(dtype))


def _counted_values(name: str, values: Tensor, mask: Tensor) -> Tensor:
    """Return the values in float64, 0 outside the mask; ValueError with their ``name`` for another shape or dtype."""
    check_floats(name, values, mask.shape, "tokens")
    return torch.where(mask, values.detach().double(), 0)


def discounted_returns(
    rewards: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
    layout: SequenceLayout | None = None,
    groups: ParallelGroups | None = None,
) -> Tensor:
    """The return of each token, r_t + γ r_{t+1} + γ² r_{t+2} + …, over the counted tokens of its sequence.

    These are the returns of :func:`gae` for λ = 1 and values of 0, which has the arguments, collectives and errors.
    """
    without_critic = torch.zeros_like(rewards)
    return gae(rewards, without_critic, response_mask, gamma=gamma, layout=layout, groups=groups).returns


def whiten(
    values: Tensor,
    response_mask: Tensor,
    *,
    layout: SequenceLayout | None = None,
    groups: ParallelGroups | None = None,
) -> Tensor:
    """Whitened values: (x - mean) / sqrt(variance + 1e-8), over all counted tokens of all ranks.

    The variance is a sample's (n - 1).

    The deviations are taken from the mean of the whole batch, in a second pass, so that the result is the same for
    every split, and no large moments are subtracted.

    Args:
        values: of the layout's local shape.
        response_mask: bool, like ``values``, True if the token counts; others change no bit.
        layout: which tokens these are. Default: padded, rows of ``values``.
        groups: ``dp_cp`` holds the other tokens. Default: this process alone.

    Returns:
        Like ``values``, at least float32; 0 if nothing counts. One counted value of any rank that is NaN or infinite
        makes everything NaN, which the correction's ``check()`` reports.

    Collectives: two SUMs over ``dp_cp``, of two doubles and of one. Gradient: none.

    Raises:
        ValueError: shapes or dtypes are wrong.
    """
    groups = ParallelGroups.given(groups)
    groups.check_sums(layout_of(response_mask, layout, groups).cp_group)
    check_floats("values", values, response_mask.shape, "tokens")
    counted = torch.where(response_mask, values.detach().double(), 0)

    sums = torch.stack([response_mask.sum(dtype=torch.float64), counted.sum()])
    num_tokens, total = all_reduce_sum(sums, groups.dp_cp)
    mean = total / num_tokens.clamp(min=1)
    centred = torch.where(response_mask, counted - mean, 0)

    squares = all_reduce_sum(centred.square().sum(), groups.dp_cp)
    variance = squares / (num_tokens - 1).clamp(min=1)
    white: Tensor = centred / (variance + EPSILON).sqrt()
    return white.to(torch.promote_types(values.dtype, torch.float32))


def reinforce_plus_plus(
    rewards: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
    layout: SequenceLayout | None = None,
    groups: ParallelGroups | None = None,
) -> TokenAdvantages:
    """Discounted returns, whitened over the whole batch: they need no critic and no group of responses.

    return_t = r_t + γ return_{t+1}.    (Hu et al. 2025, "REINFORCE++")

    Args:
        rewards: of the layout's local shape, one for each token.
        response_mask: bool, like ``rewards``, True if the token counts.
        gamma: γ.
        layout: which tokens these are. Default: padded, rows of the mask.
        groups: ``cp`` holds the other slices of the sequences, ``dp_cp`` all other tokens. Default: this process alone.

    Returns:
        In the dtype of ``rewards``, at least float32. Rewards that are not finite: see :func:`gae` for the returns, and
        :func:`whiten`, for which one is enough.

    Collectives: as :func:`gae` and :func:`whiten`. Gradient: none.

    Raises:
        ValueError: shapes or dtypes are wrong, or γ lies outside [0, 1].
    """
    returns = discounted_returns(rewards, response_mask, gamma=gamma, layout=layout, groups=groups)
    advantages = whiten(returns, response_mask, layout=layout, groups=groups)
    return TokenAdvantages(advantages, returns)


def remax(
    rewards: Tensor,
    baselines: Tensor,
    response_mask: Tensor,
    *,
    layout: SequenceLayout | None = None,
    groups: ParallelGroups | None = None,
) -> TokenAdvantages:
    """The rewards that follow a token, less the reward of the most likely response to the same prompt.

    Li et al. 2024, "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method".

    Args:
        rewards: of the layout's local shape, one for each token.
        baselines: [n], for each sequence the reward of its prompt's greedy response.
        response_mask: bool, like ``rewards``, True if the token counts.
        layout: which tokens these are. Default: padded, rows of the mask.
        groups: ``cp`` holds the other slices of the sequences. Default: this process alone.

    Returns:
        In the dtype of ``rewards``, at least float32. Rewards that are not finite: see :func:`gae`; a baseline that is
        not makes all advantages of its sequence so.

    Collectives: as :func:`gae`. Gradient: none.

    Raises:
        ValueError: shapes or dtypes are wrong.
    """
    layout = layout_of(response_mask, layout, groups)
    check_floats("baselines", baselines, (layout.num_sequences,), "sequences")
    returns = discounted_returns(rewards, response_mask, layout=layout, groups=groups)
    baseline = layout.expand(baselines.detach())
    return TokenAdvantages(torch.where(response_mask, returns - baseline, 0), returns)
