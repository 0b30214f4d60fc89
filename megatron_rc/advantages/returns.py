"""Token advantages from the rewards that follow: discounted returns, GAE with a critic, whitening over the batch.

The functions take the tokens of one rank's shard. *Counted* tokens are those for which ``response_mask`` is True.
"""

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

EPSILON = 1e-8  # added to the variance before whitening divides by its square root


@dataclass(frozen=True)
class TokenAdvantages:
    """Advantages and returns of every token of a shard.

    Attributes:
        advantages: of the layout's local shape; 0 at tokens that do not count.
        returns: of the same shape; the targets for a critic's values.
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
    """Return token rewards: the reward of each response at its last counted token, 0 at all other tokens.

    Args:
        rewards: [n], one for each sequence.
        response_mask: bool, of the layout's local shape, True if the token counts.
        layout: which tokens these are. Default: padded, rows of the mask.
        groups: ``cp`` holds the other slices of the sequences. Default: this process alone.

    Returns:
        Of the mask's shape, in the dtype of ``rewards``. NaN and infinite rewards are passed on.

    Collectives: one MAX of [n] int64 over ``cp``. Gradient: none.

    Raises:
        ValueError: shapes or dtypes are wrong.
    """
    groups = ParallelGroups.given(groups)
    layout = layout_of(response_mask, layout, groups)
    check_floats("rewards", rewards, (layout.num_sequences,), "sequences")

    # [n]: the position of the last counted token in each whole sequence; -1 if none counts.
    device = response_mask.device
    positions = layout.positions().to(device, non_blocking=True)
    counted_positions = torch.where(response_mask, positions, -1)
    sequence_of_token = layout.sequence_index.to(device, non_blocking=True)
    last_positions = torch.full((layout.num_sequences,), -1, dtype=torch.int64, device=device)
    last_positions.scatter_reduce_(0, sequence_of_token, counted_positions.flatten(), "amax")
    last_positions = all_reduce_max(last_positions, layout.cp(groups.cp))

    is_last = response_mask & (positions == layout.expand(last_positions))
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

    δ_t = r_t + γ V_{t+1} - V_t,  A_t = δ_t + γλ A_{t+1},  return_t = A_t + V_t    (Schulman et al. 2016,
    "High-Dimensional Continuous Control Using Generalized Advantage Estimation", Eq. 11 to 16)

    Here t+1 is the next counted token of the sequence. After the last counted token V and A are 0.

    Args:
        rewards: of the layout's local shape, one for each token.
        values: like ``rewards``: the critic's value V_t of the state in which the token is chosen.
        response_mask: bool, like ``rewards``, True if the token counts; other tokens change no bit of the result.
        gamma: γ, the discount.
        lam: λ; with 1 the advantage is return - V, with 0 it is δ.
        layout: which tokens these are. Default: padded, rows of the mask.
        groups: ``cp`` holds the other slices of the sequences. Default: this process alone.

    Returns:
        In the dtype of ``values``, at least float32; computed in float64. If a counted reward or value is NaN or
        infinite, so are the advantages and returns of its sequence up to that token; the correction's ``check()``
        reports it.

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

    # With H_t = V_t + λ A_t the definition of A_t becomes A_t = r_t - V_t + γ H_{t+1}, so that it needs one number of
    # the next token. H itself is a linear recurrence: H_t = (1 - λ) V_t + λ r_t + λγ H_{t+1}.
    # A token that does not count has the coefficient 1 and the offset 0: it passes H on to the counted token before it.
    coefficients = torch.where(response_mask, torch.full_like(value, lam * gamma), 1)
    offsets = (1 - lam) * value + lam * reward
    recurrence = Recurrence(layout, coefficients, offsets, backward=True)
    (next_h,) = neighbouring_values([recurrence], groups.cp)

    advantages = torch.where(response_mask, reward - value + gamma * next_h, 0)
    returns = advantages + value
    dtype = torch.promote_types(values.dtype, torch.float32)
    return TokenAdvantages(advantages.to(dtype), returns.to(dtype))


def _counted_values(name: str, values: Tensor, mask: Tensor) -> Tensor:
    """Return the values in float64, 0 outside the mask; ValueError with ``name`` if the shape or dtype is wrong."""
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
    """Return r_t + γ r_{t+1} + γ² r_{t+2} + … for each token, over the counted tokens of its sequence.

    These are the returns of :func:`gae` with λ = 1 and a critic whose values are 0. Arguments, collectives and errors
    are described there.
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
    """Return (x - mean) / sqrt(variance + 1e-8), with mean and variance over the counted tokens of all ranks.

    The variance is that of a sample (divided by n - 1). It is summed in a second pass, from deviations from the mean of
    the whole batch: the result does not depend on how the batch is split, and Σx² - (Σx)²/n does not cancel.

    Args:
        values: of the layout's local shape.
        response_mask: bool, like ``values``, True if the token counts; other tokens change no bit of the result.
        layout: which tokens these are. Default: padded, rows of ``values``.
        groups: the ranks of ``dp_cp`` hold the other tokens of the batch. Default: this process alone.

    Returns:
        Like ``values``, at least float32; 0 at tokens that do not count. But one counted value that is NaN or infinite,
        on any rank, makes the whole result NaN; the correction's ``check()`` reports it.

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
    """Advantages of REINFORCE++: discounted returns, whitened over the whole batch.

    return_t = r_t + γ return_{t+1}    (Hu et al. 2025, "REINFORCE++")

    The estimator needs neither a critic nor several responses to a prompt.

    Args:
        rewards: of the layout's local shape, one for each token.
        response_mask: bool, like ``rewards``, True if the token counts.
        gamma: γ, the discount.
        layout: which tokens these are. Default: padded, rows of the mask.
        groups: the ranks of ``cp`` hold the other slices of the sequences, those of ``dp_cp`` all other tokens of the
            batch. Default: this process alone.

    Returns:
        Advantages and returns, not whitened, in the dtype of ``rewards``, at least float32. A counted reward that is
        NaN or infinite makes the returns of its sequence up to that token so, and all advantages of the batch NaN.

    Collectives: those of :func:`gae`, then those of :func:`whiten`. Gradient: none.

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
    """Advantages of ReMax: the return of each token, minus the reward of the greedy response to the same prompt.

    Li et al. 2024, "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method".

    Args:
        rewards: of the layout's local shape, one for each token.
        baselines: [n], for each sequence the reward of the greedy response to its prompt.
        response_mask: bool, like ``rewards``, True if the token counts.
        layout: which tokens these are. Default: padded, rows of the mask.
        groups: ``cp`` holds the other slices of the sequences. Default: this process alone.

    Returns:
        In the dtype of ``rewards``, at least float32. A counted reward that is NaN or infinite makes the advantages and
        returns of its sequence up to that token so; such a baseline all advantages of its sequence.

    Collectives: those of :func:`gae`. Gradient: none.

    Raises:
        ValueError: shapes or dtypes are wrong.
    """
    layout = layout_of(response_mask, layout, groups)
    check_floats("baselines", baselines, (layout.num_sequences,), "sequences")
    returns = discounted_returns(rewards, response_mask, layout=layout, groups=groups)
    baseline_of_token = layout.expand(baselines.detach())
    advantages = torch.where(response_mask, returns - baseline_of_token, 0)
    return TokenAdvantages(advantages, returns)
