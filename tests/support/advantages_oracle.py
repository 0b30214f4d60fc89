"""Advantages by loops over whole sequences in float64, from their definitions; imports nothing of the library."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    """The advantage of each response, from the kept responses to its prompt, each counted by its weight."""
    found = []
    weights = [1.0] * len(rewards) if weights is None else weights
    counted = [reward for reward, one in zip(rewards, kept, strict=True) if one]
    factor = len(counted) / max(sum(reward != 0 for reward in counted), 1) / f_norm
    for place, (mine, prompt) in enumerate(zip(rewards, ids, strict=True)):
        everyone = [other for other in range(len(ids)) if ids[other] == prompt]
        rest = [other for other in everyone if kept[other]]
        alone = len(everyone) == 1
        if not kept[place]:
            found.append(0.0)
            continue
        mean = 0.0 if alone else _mean(rewards, weights, rest)
        total = math.fsum(weights[other] for other in rest)
        freedom = total - math.fsum(weights[other] ** 2 for other in rest) / total
        spread = math.fsum(weights[other] * (rewards[other] - mean) ** 2 for other in rest)
        std = 1.0 if len(rest) == 1 else math.sqrt(spread / freedom)
        others = 0.0 if alone else mine
        if len(rest) > 1:
            others = _mean(rewards, weights, [other for other in rest if other != place])
        tokens = [weight * length for weight, length in zip(weights, lengths, strict=True)]
        optimal = 0.0 if alone else _mean(rewards, tokens, rest)
        optimal = mine if len(rest) == 1 and not alone else optimal
        best = sorted((rewards[other] for other in rest), reverse=True)
        lead = best[0] - best[1] if len(best) > 1 and mine == best[0] else 0.0
        found.append(
            {
                "grpo": (mine - mean) / (std + 1e-6),
                "grpo-no-std": mine - mean,
                "rloo": mine - others,
                "rloo-vectorized": 0.0 if alone else mine - others,
                "opo": mine - optimal,
                "grpo-passk": lead / (std + 1e-6),
                "grpo-passk-no-std": lead,
                "gpg": factor * (mine - mean),
            }[estimator]
        )
    return found


def _mean(values: Sequence[float], weights: Sequence[float], places: Sequence[int]) -> float:
    """The mean of the values at these places, by weight; 0 without a weight."""
    total = math.fsum(weights[place] for place in places)
    return math.fsum(weights[place] * values[place] for place in places) / total if total else 0.0


def gae(
    rewards: Rows, values: Rows, mask: Rows, gamma: float, lam: float
) -> tuple[list[list[float]], list[list[float]]]:
    """(advantages, returns), 0 at tokens that do not count."""
    advantages, returns = [], []
    for reward, value, counts in zip(rewards, values, mask, strict=True):
        row, after, advantage = [0.0] * len(reward), 0.0, 0.0
        back = [0.0] * len(reward)
        for t in reversed(range(len(reward))):
            if counts[t]:
                advantage = reward[t] + gamma * after - value[t] + gamma * lam * advantage
                after = value[t]
                row[t], back[t] = advantage, advantage + after
        advantages.append(row)
        returns.append(back)
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
    """Rewards to come less a mean by the energy so far, over the prompt's responses that have a t-th counted token."""
    rows = range(len(ids))
    tokens = [[t for t, one in enumerate(mask[row]) if one and (kept is None or kept[row])] for row in rows]
    later = [[math.fsum(rewards[row][u] for u in tokens[row][n:]) for n in range(len(tokens[row]))] for row in rows]
    energies = [
        [
            (1 - 2 * math.exp(log_probs[row][t]) + squares[row][t]) * (1 if weights is None else weights[row][t] ** 2)
            for t in tokens[row]
        ]
        for row in rows
    ]
    so_far = [[math.fsum(energy[: n + 1]) for n in range(len(energy))] for energy in energies]
    found = [[0.0] * len(row) for row in mask]
    for row in rows:
        for n, t in enumerate(tokens[row]):
            others = [other for other in rows if ids[other] == ids[row] and len(tokens[other]) > n]
            total = math.fsum(so_far[other][n] for other in others)
            weighted = math.fsum(so_far[other][n] * later[other][n] for other in others)
            found[row][t] = later[row][n] - (weighted / total if len(others) > 1 and total else 0)
    return found


def whiten(values: Rows, mask: Rows) -> list[list[float]]:
    counted = [x for row, counts in zip(values, mask, strict=True) for x, one in zip(row, counts, strict=True) if one]
    mean = math.fsum(counted) / max(len(counted), 1)
    variance = math.fsum((x - mean) ** 2 for x in counted) / max(len(counted) - 1, 1)
    return [
        [(x - mean) / math.sqrt(variance + 1e-8) if one else 0.0 for x, one in zip(row, counts, strict=True)]
        for row, counts in zip(values, mask, strict=True)
    ]


def at_the_end(rewards: Sequence[float], mask: Rows) -> list[list[float]]:
    """Each reward at the last counted token of its row."""
    found = [[0.0] * len(row) for row in mask]
    for row, counts, reward in zip(found, mask, rewards, strict=True):
        counted = [t for t, one in enumerate(counts) if one]
        if counted:
            row[counted[-1]] = reward
    return found
