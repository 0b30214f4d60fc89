"""Outcome of one correction on recorded tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_rc.batch.chain import correct_rollouts
from megatron_rc.doctor.advice import effective_share
from megatron_rc.replay.tokens import Recorded
from megatron_rc.settings.config import RolloutCorrectionConfig

# The histogram of weights has eight bins for each power of 2.
LOG_LIMIT = 6
BINS_PER_POWER = 8
NUM_BINS = 2 * LOG_LIMIT * BINS_PER_POWER
MOST_TURNS = 8


@dataclass(frozen=True)
class Bucket:
    """Counts for a part of the sequences, which ``label`` describes."""

    label: str
    sequences: int
    tokens: int
    rejected_sequences: int  # without an accepted token
    rejected_tokens: int  # not accepted, tokens of rejected sequences included


@dataclass(frozen=True)
class WeightSummary:
    """Weights of the accepted tokens; all are 1 if the correction has no weights."""

    mean: float
    smallest: float
    largest: float
    effective_share: float  # (Σ w)² / (n Σ w²) over all n sampled tokens, with w = 0 for rejected ones
    histogram: list[int]  # by the bins of edges(), the outer ones with all beyond; without weights of 0
    zeros: int  # accepted tokens with weight 0


@dataclass(frozen=True)
class Outcome:
    """Outcome of one correction. Sequences without a sampled token count nowhere."""

    name: str
    config: RolloutCorrectionConfig
    metrics: dict[str, float]  # that a training run would have logged
    total: Bucket  # all sequences
    by_reward: list[Bucket]  # by the sign of the reward
    by_length: list[Bucket]  # by powers of 2 of the length
    by_age: list[Bucket]  # by age, in steps, of the weights that sampled
    by_turn: list[Bucket]  # by turn; a sequence counts in each turn that it has
    weights: WeightSummary
    accepted: Tensor  # [n] int64, accepted tokens of each sequence
    mean_weights: Tensor  # [n] float64, mean weight of the sampled tokens of each sequence, 0 for rejected ones
    token_weights: list[Tensor] | None  # for each batch [n, s], 0 if not accepted; None without weights
    masks: list[Tensor]  # for each batch [n, s] bool, accepted tokens


def edges() -> list[float]:
    """Edges of the bins of the weights' histogram."""
    return [2 ** (index / BINS_PER_POWER - LOG_LIMIT) for index in range(NUM_BINS + 1)]


def outcome(data: Recorded, name: str, config: RolloutCorrectionConfig) -> Outcome:
    """Run the correction over all batches together; ValueError if the record lacks a field, or cannot be right."""
    if config.proximal_interpolation:
        raise ValueError(f"{name}: proximal_interpolation computes π_old during training, a record has none: remove it")
    records = data.parts[0].records
    # A token that was sampled from itself alone has log-prob 0.
    has_zeros = records.sampling.top_k == 1 or records.support_ids is not None
    result = correct_rollouts(
        [part.theta if config.bypass_mode else part.old for part in data.parts],
        [part.rollout for part in data.parts],
        [part.mask for part in data.parts],
        config,
        advantages=data.split(data.advantages),
        rewards=data.split(data.rewards),
        group_ids=data.split(data.group_ids),
        num_groups=int(data.group_ids.max()) + 1,
        policy_versions=[part.versions for part in data.parts],
        current_version=0,
        max_staleness=int(data.ages.max()),
        allow_zero_log_probs=has_zeros,
    )
    result.check()
    masks = _listed(result.mask)
    weights = _listed(result.weights) if config.applies_weights else None
    accepted = torch.cat([mask.sum(dim=1) for mask in masks])
    sums, summary = _summarised(masks, weights, num_sampled=int(data.lengths.sum()))
    count = partial(_buckets, data.lengths, accepted)
    return Outcome(
        name=name,
        config=config,
        metrics=result.metrics(),
        total=count(torch.zeros_like(accepted), lambda _: "all")[0],
        by_reward=count(data.rewards.sign().long() + 1, lambda sign: ("negative", "zero", "positive")[sign]),
        by_length=count(_power(data.lengths), lambda power: f"{2**power} to {2 ** (power + 1) - 1}" if power else "1"),
        by_age=count(data.ages, lambda age: f"{age} step{'s' * (age != 1)}"),
        by_turn=_by_turn(data, masks),
        weights=summary,
        accepted=accepted,
        mean_weights=sums / data.lengths.clamp(min=1),
        token_weights=weights,
        masks=masks,
    )


def _listed(values: Tensor | list[Tensor] | None) -> list[Tensor]:
    """A result's tensors, one for each batch; an empty list for None."""
    return values if isinstance(values, list) else []


def _buckets(lengths: Tensor, accepted: Tensor, keys: Tensor, label: Callable[[int], str]) -> list[Bucket]:
    """Counts for each value of a key, all [n]; sequences without a token count nowhere."""
    has_tokens = lengths > 0
    distinct_keys, bucket = keys[has_tokens].unique(return_inverse=True)
    columns = (has_tokens.long(), lengths, (accepted == 0).long(), lengths - accepted)
    sums = [torch.zeros_like(distinct_keys).index_add_(0, bucket, column[has_tokens]).tolist() for column in columns]
    return [Bucket(label(key), *counts) for key, *counts in zip(distinct_keys.tolist(), *sums, strict=True)]


def _by_turn(data: Recorded, masks: Sequence[Tensor]) -> list[Bucket]:
    """Counts for each turn, the last one with all later turns."""
    turns = [torch.where(part.mask, part.records.turn_ids, -1).clamp(max=MOST_TURNS - 1) for part in data.parts]
    buckets = []
    for turn in range(1 + max(int(ids.max()) for ids in turns)):
        in_turn = [ids == turn for ids in turns]
        tokens = torch.cat([part.sum(dim=1) for part in in_turn])
        accepted = torch.cat([(part & mask).sum(dim=1) for part, mask in zip(in_turn, masks, strict=True)])
        counts = (tokens > 0, tokens, (tokens > 0) & (accepted == 0), tokens - accepted)
        label = f"turn {turn + 1}" + (" and later" if turn == MOST_TURNS - 1 else "")
        buckets.append(Bucket(label, *(int(count.sum()) for count in counts)))
    return buckets


def _power(lengths: Tensor) -> Tensor:
    """[n] int64: floor of log2 of the length; 0 for length 0."""
    return torch.frexp(lengths.clamp(min=1).double()).exponent.long() - 1


def _summarised(masks: list[Tensor], weights: list[Tensor] | None, *, num_sampled: int) -> tuple[Tensor, WeightSummary]:
    """Return the sum of each sequence's accepted weights, [n] float64, and a summary of all accepted weights.

    Args:
        masks: for each batch [n, s] bool, the accepted tokens.
        weights: for each batch [n, s]. None: every accepted token has the weight 1.
        num_sampled: all sampled tokens, accepted or not, for the effective share.
    """
    if weights is None:
        weights = [mask.double() for mask in masks]
    sums = []
    histogram = torch.zeros(NUM_BINS, dtype=torch.int64)
    smallest = math.inf
    largest = 0.0
    num_accepted = 0
    num_zero = 0
    for mask, values in zip(masks, weights, strict=True):
        sums.append(torch.where(mask, values, 0).sum(dim=1, dtype=torch.float64))
        accepted_weights = values[mask]
        if not len(accepted_weights):
            continue
        num_accepted += len(accepted_weights)
        smallest = min(smallest, float(accepted_weights.amin()))
        largest = max(largest, float(accepted_weights.amax()))
        num_zero += int((accepted_weights == 0).sum())

        powers = accepted_weights[accepted_weights > 0].log2()
        bins = ((powers + LOG_LIMIT) * BINS_PER_POWER).clamp(0, NUM_BINS - 1)
        histogram += torch.bincount(bins.long(), minlength=NUM_BINS)
    sequence_sums = torch.cat(sums)
    return sequence_sums, WeightSummary(
        mean=float(sequence_sums.sum()) / max(num_accepted, 1),
        smallest=smallest if num_accepted else 0.0,
        largest=largest,
        effective_share=effective_share(masks, weights, num_sampled),
        histogram=histogram.tolist(),
        zeros=num_zero,
    )
