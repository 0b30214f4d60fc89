"""A baseline for each token of a prompt's responses."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rc.advantages.group import ROUNDING
from megatron_rc.advantages.returns import TokenAdvantages, discounted_returns
from megatron_rc.advantages.shards import check_floats, kept_sequences, layout_of
from megatron_rc.parallel.collectives import all_reduce_sum
from megatron_rc.parallel.groups import ParallelGroups
from megatron_rc.parallel.layout import SequenceLayout
from megatron_rc.parallel.recurrence import Recurrence, neighbouring_values


def optimal_token_baseline(
    rewards: Tensor,
    log_probs: Tensor,
    sum_pi_squared: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    *,
    weights: Tensor | None = None,
    kept: Tensor | None = None,
    layout: SequenceLayout | None = None,
    groups: ParallelGroups | None = None,
) -> TokenAdvantages:
    """Advantages with the optimal token baseline: the return of the t-th token, minus a baseline of its prompt for t.

    With G_t = r_t + r_{t+1} + … and W_t = Σ_{j ≤ t} w_j² (1 - 2 π_j + Σ_v π_v²), the advantage is G_t - B_t. The
    baseline B_t = Σ G_t W_t / Σ W_t is over the responses to the prompt that have a t-th counted token; it is 0 if only
    one has. 1 - 2 π + Σ π² is the squared length of the gradient of log π with respect to the logits.
    (Li et al. 2026, optimal token baseline, arXiv 2602.07078)

    Args:
        rewards: of the layout's local shape, one for each token.
        log_probs: like ``rewards``: log π of the trained policy before the step, nats.
        sum_pi_squared: like ``rewards``: Σ_v π_v² of the same distributions, the third result of
            ``vocab_parallel_log_probs_and_entropy(..., sum_squares=True)``.
        response_mask: bool, like ``rewards``, True if the token counts; other tokens change no bit of the result.
        group_ids: [n] int64, equal for the responses to one prompt, which all lie on this data-parallel rank.
        weights: like ``rewards``: the importance weights that multiply the loss. Default: 1.
        kept: [n] bool. A response for which it is False counts in no baseline, and has the advantage 0. Default: all
            responses count.
        layout: which tokens these are. Default: padded, rows of the mask.
        groups: ``cp`` holds the other slices of the sequences. Default: this process alone.

    Returns:
        In the dtype of ``rewards``, at least float32; computed in float64. If a counted value is NaN or infinite, so
        are advantages of its prompt; the correction's ``check()`` reports it.

    Collectives over ``cp``: SUMs of [n · chunks of a sequence, 2] doubles, of [2 n · chunks of a sequence, 2] doubles,
    and of [prompts, longest sequence, 3] doubles. Gradient: none.

    Raises:
        ValueError: shapes or dtypes are wrong.
    """
    groups = ParallelGroups.given(groups)
    layout = layout_of(response_mask, layout, groups)
    check_floats("rewards", rewards, response_mask.shape, "tokens")
    check_floats("log_probs", log_probs, response_mask.shape, "tokens")
    check_floats("sum_pi_squared", sum_pi_squared, response_mask.shape, "tokens")
    if weights is not None:
        check_floats("weights", weights, response_mask.shape, "tokens")
    kept = kept_sequences(group_ids, kept, layout.num_sequences)
    counted = response_mask & layout.expand(kept)

    returns = discounted_returns(rewards.double(), response_mask, layout=layout, groups=groups)
    energy = 1 - 2 * log_probs.detach().double().exp() + sum_pi_squared.detach().double()
    if weights is not None:
        energy = energy * weights.detach().double().square()
    energy = torch.where(counted, energy, 0)
    total_energy, num_tokens = _sums_so_far(energy, counted, layout, groups)
    baseline = _prompt_means(
        returns,
        total_energy,
        step=num_tokens.long() - 1,
        counted=counted,
        group_ids=group_ids,
        layout=layout,
        groups=groups,
    )
    advantages = returns - baseline

    # The mean of equal returns may differ from them by rounding: such an advantage is set to 0. That of an infinite
    # return is not.
    is_rounding = returns.isfinite() & (advantages.abs() <= ROUNDING * returns.abs())
    advantages = torch.where(counted & ~is_rounding, advantages, 0)
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    return TokenAdvantages(advantages.to(dtype), returns.to(dtype))


def _sums_so_far(
    energy: Tensor, counted: Tensor, layout: SequenceLayout, groups: ParallelGroups
) -> tuple[Tensor, Tensor]:
    """Return W_t and t of each token: the energy and the number of the counted tokens up to this one.

    Args:
        energy: w_t² (1 - 2 π_t + Σ π²), of the layout's local shape, float64; 0 for tokens that do not count.
        counted: bool, like ``energy``.
        layout: which tokens these are.
        groups: ``cp`` holds the other slices of the sequences.

    Returns:
        Two tensors like ``energy``.

    Collectives: one SUM of [2 n · chunks of a sequence, 2] doubles over ``cp``.
    """
    is_counted = counted.double()
    # A recurrence with coefficients of 1 is a running sum; it gives each token the sum before it.
    recurrences = [
        Recurrence(layout, torch.ones_like(energy), energy),
        Recurrence(layout, torch.ones_like(is_counted), is_counted),
    ]
    energy_before, tokens_before = neighbouring_values(recurrences, groups.cp)
    return energy + energy_before, is_counted + tokens_before


def _prompt_means(
    returns: Tensor,
    total_energy: Tensor,
    *,
    step: Tensor,
    counted: Tensor,
    group_ids: Tensor,
    layout: SequenceLayout,
    groups: ParallelGroups,
) -> Tensor:
    """Return B_t of each counted token: the mean return of its prompt's responses at their t-th token, weighted by W_t.

    Args:
        returns: G_t, of the layout's local shape, float64.
        total_energy: W_t, like ``returns``.
        step: t - 1, int64, like ``returns``.
        counted: bool, like ``returns``.
        group_ids: [n] int64, the prompt of each sequence.
        layout: which tokens these are.
        groups: ``cp`` holds the other slices of the sequences.

    Returns:
        Like ``returns``; 0 if no other response has a t-th token. Tokens that do not count have any value.

    Collectives: one SUM of [prompts, longest sequence, 3] doubles over ``cp``.
    """
    # One entry of a flat table for each prompt and step.
    prompt_ids, prompt_of_sequence = group_ids.unique(return_inverse=True)
    longest = max(layout.full_lengths, default=0)
    num_entries = max(len(prompt_ids) * longest, 1)
    entry = layout.expand(prompt_of_sequence) * longest + step
    entry = torch.where(counted, entry, 0).flatten()

    columns = torch.stack([counted.double(), total_energy, total_energy * returns], dim=-1).view(-1, 3)
    columns = torch.where(counted.view(-1, 1), columns, 0)
    sums = columns.new_zeros(num_entries, 3).index_add_(0, entry, columns)
    num_responses, weight, weighted_returns = all_reduce_sum(sums, layout.cp(groups.cp)).unbind(1)

    mean = weighted_returns / torch.where(weight == 0, 1, weight)
    mean = torch.where(num_responses > 1, mean, 0)
    return mean[entry].view(counted.shape)
