"""Which sequences are rejected, and the counts that the loss is divided by.

Verdicts follow from sums over whole sequences, and over all responses of a prompt; denominators follow from verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from megatron_rc.correction.inputs import Shards
from megatron_rc.correction.sequences import (
    SequenceSums,
    sequence_weights,
    statistics_of,
    threshold_scale,
)
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.criterion import Criterion, SequenceValues

N = TypeVar("N")  # Tensor on the device, float on the host


@dataclass(frozen=True)
class Verdicts:
    """The verdicts on whole sequences, [n] each, equal on all ranks of a CP group."""

    tokens: Tensor  # tokens under m, float64
    accept: Tensor  # bool: no criterion rejects the whole sequence
    accept_negative: Tensor | None  # bool: False if its tokens with A < 0 are rejected; None unless A is one a token
    accepted: Tensor  # tokens under m', float64
    by_criterion: dict[str, Tensor]  # bool: for each criterion on sequences or prompts, the sequences it accepts


def decide_sequences(
    sums: SequenceSums, shards: Shards, config: RolloutCorrectionConfig, prompts: Tensor | None = None
) -> Verdicts:
    """The verdicts on whole sequences; ``prompts`` are the reduced :func:`prompt_columns`.

    Criteria on prompts are left out if ``prompts`` is None.
    """
    statistics, scale = statistics_of(sums), threshold_scale(sums, config)
    accept = torch.ones_like(sums.valid, dtype=torch.bool)
    accept_negative, by_criterion = None, {}
    for criterion in config.criteria:
        if criterion.of_tokens or (criterion.unit == "prompt" and prompts is None):
            continue
        if criterion.unit == "prompt":
            verdict = _prompt_verdict(criterion, prompts, config)[shards.group_ids]  # type: ignore[arg-type]
        else:
            # Without a valid token there is nothing to test.
            verdict = criterion.within_bounds(criterion.statistic(statistics), scale) | (sums.valid == 0)
        if criterion.only_negative and shards.advantages is not None:
            verdict = verdict | ~(shards.advantages < 0)
        by_criterion[criterion.name] = verdict
        if criterion.only_negative and shards.advantages is None:
            accept_negative = verdict if accept_negative is None else accept_negative & verdict
        else:
            accept = accept & verdict
    if sums.vetoed is not None and config.rejecting_veto is not None:
        accept = accept & (sums.vetoed == 0)
    if config.bad_log_probs == "reject_sequence":
        accept = accept & (sums.response == sums.valid)
    tokens = sums.valid if config.bad_log_probs == "reject_token" else sums.response
    accepted = _left(sums.kept, sums.kept_negative, accept, accept_negative)
    return Verdicts(tokens, accept, accept_negative, accepted, by_criterion)


def accepted_weight(sums: SequenceSums, verdicts: Verdicts) -> Tensor:
    """[n] float64: the sum of token-level weights over accepted tokens; 0 without such weights."""
    if sums.kept_weight is None:
        return torch.zeros_like(sums.valid)
    return _left(sums.kept_weight, sums.kept_negative_weight, verdicts.accept, verdicts.accept_negative)


def accepted_masks(kept: Sequence[Tensor], shards: Shards, verdicts: Verdicts) -> list[Tensor]:
    """M' of each micro-batch: the kept tokens of accepted sequences."""
    found = []
    for part, mask, accept in zip(shards.parts, kept, shards.expand(verdicts.accept), strict=True):
        mask = mask & accept
        if part.advantages is not None and verdicts.accept_negative is not None:
            accept_negative = part.layout.expand(verdicts.accept_negative[part.sequences])
            mask = mask & (accept_negative | ~(part.advantages < 0))
        found.append(mask)
    return found


@dataclass(frozen=True)
class Denominators(Generic[N]):
    """Sums over the whole batch from which the loss's denominators follow."""

    counts: Any  # [num_mini_batches, 4] tokens and sequences under m, then under m'; lists on the host, like the next
    weights: Any  # [num_mini_batches] Σ w over accepted tokens, bounded and not normalised; 0 without weights
    total_weight: N  # the sum of weights that w̄ is the mean of: of valid or accepted tokens, or of such sequences
    weight_count: N  # the number of these weights


def count_batch(
    sums: SequenceSums, verdicts: Verdicts, shards: Shards, config: RolloutCorrectionConfig
) -> Denominators[Tensor]:
    """The part of this rank, 0 on all but the first CP rank, since each rank of ``cp`` knows whole sequences."""
    tokens, accepted, first = verdicts.tokens, verdicts.accepted, shards.is_first_cp_rank
    shared = sequence_weights(sums, config)
    of_accepted = accepted_weight(sums, verdicts) if shared is None else shared * accepted
    columns = torch.stack([tokens, tokens > 0, accepted, accepted > 0, of_accepted], dim=1) * first
    counts = columns.new_zeros(shards.counts.num_mini_batches, 5).index_add_(0, shards.mini_batch_ids, columns)
    # The weights that batch normalisation averages, and how many each sequence has.
    only_accepted = config.rollout_is_batch_normalize_scope == "accepted"
    if shared is not None:
        count = (accepted if only_accepted else sums.valid) > 0
        total = torch.where(count, shared, 0)
    elif only_accepted or sums.weight is None:
        total, count = of_accepted, accepted
    else:
        total, count = sums.weight, sums.valid
    return Denominators(counts[:, :4], counts[:, 4], total.sum() * first, count.double().sum() * first)


def prompt_columns(sums: SequenceSums, shards: Shards, config: RolloutCorrectionConfig) -> Tensor:
    """[num_groups, k] float64 of this rank's responses: valid tokens, lost responses, then each sum that is needed."""
    lost = ((sums.response > 0) & (decide_sequences(sums, shards, config).accepted == 0)).double()
    values = statistics_of(sums).values
    columns = torch.stack([sums.valid, lost, *(values[name] for name in prompt_needs(config))], dim=1)
    prompts = columns.new_zeros(shards.counts.num_groups or 0, columns.shape[1])
    return prompts.index_add_(0, shards.group_ids, columns)  # type: ignore[arg-type]


def prompt_needs(config: RolloutCorrectionConfig) -> list[str]:
    """The names of the sums over the responses of a prompt that criteria on prompts need, each once."""
    criteria = [criterion for criterion in config.criteria if criterion.unit == "prompt"]
    return list(dict.fromkeys(need.name for criterion in criteria for need in criterion.needs))


def _left(value: Tensor, negative: Tensor | None, accept: Tensor, accept_negative: Tensor | None) -> Tensor:
    """[n]: the part of a sum over kept tokens that the verdicts on sequences leave."""
    if accept_negative is not None and negative is not None:
        value = value - torch.where(accept_negative, 0, negative)
    return torch.where(accept, value, 0)


def _prompt_verdict(criterion: Criterion, prompts: Tensor, config: RolloutCorrectionConfig) -> Tensor:
    """[num_groups] bool: the prompts that a criterion accepts."""
    valid, lost, *sums = prompts.unbind(1)
    statistics = SequenceValues(valid.clamp(min=1), lost, dict(zip(prompt_needs(config), sums, strict=True)))
    verdict = criterion.within_bounds(criterion.statistic(statistics))
    if criterion.follows_others:
        # Another criterion on prompts that rejects one rejects all of its responses.
        for other in config.criteria:
            if other.unit == "prompt" and not other.follows_others:
                verdict = verdict & _prompt_verdict(other, prompts, config)
    return verdict
