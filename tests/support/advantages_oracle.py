"""Advantages by loops over whole sequences in float64, from their definitions; imports nothing of the library."""

from __future__ import annotations

import math
from collections.abc import Sequence

# One value for each token of each sequence.
Rows = Sequence[Sequence[float]]
# The estimators that ``group`` knows: the library's own.
GROUP_ESTIMATORS = (
    "grpo",
    "grpo-no-std",
    "rloo",
    "rloo-vectorized",
    "opo",
    "grpo-passk",
    "grpo-passk-no-std",
    "gpg",
)


def group(
    estimator: str,
    rewards: Sequence[float],
    ids: Sequence[int],
    kept: Sequence[bool],
    lengths: Sequence[int],
    f_norm: float = 1.0,
    weights: Sequence[float] | None = None,
) -> list[float]:
    """Return the advantage of each response, against the kept responses to the same prompt.

    Args:
        estimator: one of ``GROUP_ESTIMATORS``.
        rewards: the reward of each response.
        ids: the prompt of each response.
        kept: whether each response counts in means and variances; its advantage is 0 if it does not.
        lengths: number of tokens of each response, for ``opo``.
        f_norm: divisor of ``gpg``.
        weights: how much each response counts in means and variances. Default: 1 each.
    """
    if weights is None:
        weights = [1.0] * len(rewards)
    token_weights = [weight * length for weight, length in zip(weights, lengths, strict=True)]

    # verl's α of GPG: kept responses over kept responses with a reward that is not 0.
    kept_rewards = [reward for reward, is_kept in zip(rewards, kept, strict=True) if is_kept]
    num_nonzero = sum(reward != 0 for reward in kept_rewards)
    gpg_factor = len(kept_rewards) / max(num_nonzero, 1) / f_norm

    advantages = []
    for response, (reward, prompt) in enumerate(zip(rewards, ids, strict=True)):
        if not kept[response]:
            advantages.append(0.0)
            continue

        same_prompt = [index for index in range(len(ids)) if ids[index] == prompt]
        peers = [index for index in same_prompt if kept[index]]
        other_peers = [index for index in peers if index != response]
        is_only_response = len(same_prompt) == 1

        if is_only_response:
            # It has nothing to compare it with: all baselines are 0.
            mean = 0.0
            mean_by_length = 0.0
            mean_of_others = 0.0
        elif other_peers:
            mean = _weighted_mean(rewards, weights, peers)
            mean_by_length = _weighted_mean(rewards, token_weights, peers)
            mean_of_others = _weighted_mean(rewards, weights, other_peers)
        else:
            # The others are not kept: with its own reward as the baseline its advantage is 0.
            mean = _weighted_mean(rewards, weights, peers)
            mean_by_length = reward
            mean_of_others = reward

        std = 1.0
        if other_peers:
            std = _sample_std(rewards, weights, peers, mean=mean)

        # How far the best response leads the second best, for pass@k; 0 for all other responses.
        best_first = sorted((rewards[peer] for peer in peers), reverse=True)
        lead = 0.0
        if other_peers and reward == best_first[0]:
            lead = best_first[0] - best_first[1]

        by_estimator = {
            "grpo": (reward - mean) / (std + 1e-6),
            "grpo-no-std": reward - mean,
            "rloo": reward - mean_of_others,
            "rloo-vectorized": 0.0 if is_only_response else reward - mean_of_others,
            "opo": reward - mean_by_length,
            "grpo-passk": lead / (std + 1e-6),
            "grpo-passk-no-std": lead,
            "gpg": gpg_factor * (reward - mean),
        }
        advantages.append(by_estimator[estimator])
    return advantages


def _weighted_mean(values: Sequence[float], weights: Sequence[float], indices: Sequence[int]) -> float:
    """Return the weighted mean of the values at these indices; 0 if their weights add up to 0."""
    total_weight = math.fsum(weights[index] for index in indices)
    if not total_weight:
        return 0.0
    return math.fsum(weights[index] * values[index] for index in indices) / total_weight


def _sample_std(values: Sequence[float], weights: Sequence[float], indices: Sequence[int], *, mean: float) -> float:
    """Return the weighted standard deviation of the values at these indices; that of a sample if all weights are 1."""
    total_weight = math.fsum(weights[index] for index in indices)
    # n - 1 if all n weights are 1.
    degrees_of_freedom = total_weight - math.fsum(weights[index] ** 2 for index in indices) / total_weight
    squares = math.fsum(weights[index] * (values[index] - mean) ** 2 for index in indices)
    return math.sqrt(squares / degrees_of_freedom)


def gae(
    rewards: Rows, values: Rows, mask: Rows, gamma: float, lam: float
) -> tuple[list[list[float]], list[list[float]]]:
    """Return (advantages, returns), 0 at tokens that do not count."""
    advantages = []
    returns = []
    for row_rewards, row_values, row_mask in zip(rewards, values, mask, strict=True):
        row_advantages = [0.0] * len(row_rewards)
        row_returns = [0.0] * len(row_rewards)
        # The value and the advantage of the next token that counts.
        next_value = 0.0
        next_advantage = 0.0
        for t in reversed(range(len(row_rewards))):
            if not row_mask[t]:
                continue
            advantage = row_rewards[t] + gamma * next_value - row_values[t] + gamma * lam * next_advantage
            row_advantages[t] = advantage
            row_returns[t] = advantage + row_values[t]
            next_value = row_values[t]
            next_advantage = advantage
        advantages.append(row_advantages)
        returns.append(row_returns)
    return advantages, returns


def token_baseline(
    rewards: Rows,
    log_probs: Rows,
    squares: Rows,
    mask: Rows,
    ids: Sequence[int],
    weights: Rows | None = None,
    kept: Sequence[bool] | None = None,
) -> list[list[float]]:
    """Return the advantages with the optimal token baseline, 0 at tokens that do not count.

    The advantage of a response's n-th counted token is the sum of its rewards from there on, minus the mean of these
    sums over the prompt's responses that have an n-th counted token. In this mean a response counts by the sum of
    (1 - 2π + Σπ²) w² over its counted tokens up to the n-th. If only one response has an n-th token, the mean is 0.

    Args:
        rewards: the reward of each token.
        log_probs: log π of each token.
        squares: Σπ² over the vocabulary, at each token.
        mask: whether each token counts.
        ids: the prompt of each response.
        weights: the importance weight w of each token. Default: 1 each.
        kept: whether each response's tokens count. Default: all do.
    """
    rows = range(len(ids))
    # By response: the positions of its counted tokens. The lists below have one number for each of them.
    positions = []
    for row in rows:
        is_kept = kept is None or kept[row]
        positions.append([t for t, counts in enumerate(mask[row]) if counts and is_kept])

    rewards_to_come = []
    energies_so_far = []
    for row in rows:
        token_rewards = [rewards[row][t] for t in positions[row]]
        rewards_to_come.append([math.fsum(token_rewards[n:]) for n in range(len(token_rewards))])
        energies = []
        for t in positions[row]:
            weight_squared = 1 if weights is None else weights[row][t] ** 2
            energies.append((1 - 2 * math.exp(log_probs[row][t]) + squares[row][t]) * weight_squared)
        energies_so_far.append([math.fsum(energies[: n + 1]) for n in range(len(energies))])

    advantages = [[0.0] * len(row_mask) for row_mask in mask]
    for row in rows:
        for n, t in enumerate(positions[row]):
            peers = [peer for peer in rows if ids[peer] == ids[row] and len(positions[peer]) > n]
            total_energy = math.fsum(energies_so_far[peer][n] for peer in peers)
            weighted_sum = math.fsum(energies_so_far[peer][n] * rewards_to_come[peer][n] for peer in peers)
            baseline = 0.0
            if len(peers) > 1 and total_energy:
                baseline = weighted_sum / total_energy
            advantages[row][t] = rewards_to_come[row][n] - baseline
    return advantages


def whiten(values: Rows, mask: Rows) -> list[list[float]]:
    """Return (x - mean) / sqrt(variance + 1e-8) over all tokens that count, 0 at the others."""
    counted_values = []
    for row_values, row_mask in zip(values, mask, strict=True):
        counted_values.extend(value for value, counts in zip(row_values, row_mask, strict=True) if counts)
    mean = math.fsum(counted_values) / max(len(counted_values), 1)
    variance = math.fsum((value - mean) ** 2 for value in counted_values) / max(len(counted_values) - 1, 1)

    whitened = []
    for row_values, row_mask in zip(values, mask, strict=True):
        whitened.append(
            [
                (value - mean) / math.sqrt(variance + 1e-8) if counts else 0.0
                for value, counts in zip(row_values, row_mask, strict=True)
            ]
        )
    return whitened


def at_the_end(rewards: Sequence[float], mask: Rows) -> list[list[float]]:
    """Return token rewards: the reward of each row at its last counted token, 0 at all other tokens."""
    token_rewards = [[0.0] * len(row_mask) for row_mask in mask]
    for row, (reward, row_mask) in enumerate(zip(rewards, mask, strict=True)):
        positions = [t for t, counts in enumerate(row_mask) if counts]
        if positions:
            token_rewards[row][positions[-1]] = reward
    return token_rewards
