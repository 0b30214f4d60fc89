"""Which sequences are rejected: verdicts from sums over whole sequences, and over all responses of a prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.correction.inputs import Shards
from megatron_rc.correction.token_pass.terms import Sums
from megatron_rc.numerics import within
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.criteria import GROUP_ANY, OPSM, Criterion


@dataclass(frozen=True)
class Verdicts:
    """What is known of whole sequences, [n] each, equal on all ranks of a CP group.

    Attributes:
        tokens: tokens under m, float64.
        accept: bool: no criterion rejects the whole sequence.
        accept_negative: bool: ``opsm`` leaves the tokens of negative advantage too; None where it does not test tokens.
        accepted: tokens under m', float64.
        rejected_by: for each criterion, by name, the valid tokens that it rejects by itself, float64.
    """

    tokens: Tensor
    accept: Tensor
    accept_negative: Tensor | None
    accepted: Tensor
    rejected_by: Sums


def decide(sums: Sums, shards: Shards, config: RolloutCorrectionConfig, groups: Tensor | None) -> Verdicts:
    """The verdicts on whole sequences.

    Args:
        sums: of whole sequences, by name.
        shards: ids, and advantages where there is one a sequence.
        config: the criteria.
        groups: [num_groups, columns] over all responses of a prompt, as :func:`group_columns` has them; None before
            they are known.
    """
    valid = sums["valid"]
    scale = threshold_scale(sums, config)
    accept = torch.ones_like(valid, dtype=torch.bool)
    accept_negative, rejected_by = None, {}
    for criterion in config.criteria:
        name = criterion.name
        if criterion.aggregation == "token":
            rejected_by[name] = valid - sums[f"accepted_{name}"]
            continue
        if criterion.needs_groups:
            if groups is None:
                continue
            verdict = _group_verdict(criterion, groups, config)[shards.group_ids]
        else:
            verdict = _sequence_verdict(criterion, sums, scale)
        if name == OPSM and shards.advantages is not None:
            verdict = verdict | ~(shards.advantages < 0)
        elif name == OPSM:
            accept_negative = verdict
            rejected_by[name] = torch.where(verdict, 0, sums["negative"])
            continue
        accept = accept & verdict
        rejected_by[name] = torch.where(verdict, 0, valid)
    if config.rollout_token_veto_threshold is not None:
        accept = accept & (sums["catastrophic"] == 0)
    if config.bad_log_probs == "reject_sequence":
        accept = accept & (sums["response"] == valid)
    tokens = sums["valid"] if config.bad_log_probs == "reject_token" else sums["response"]
    return Verdicts(
        tokens, accept, accept_negative, _left("kept", "kept_negative", sums, accept, accept_negative), rejected_by
    )


def _left(name: str, negative: str, sums: Sums, accept: Tensor, accept_negative: Tensor | None) -> Tensor:
    """[n] float64: the part of a sum over token-level survivors that the verdicts on sequences leave."""
    left = sums[name]
    if accept_negative is not None:
        left = left - torch.where(accept_negative, 0, sums[negative])
    return torch.where(accept, left, 0)


def accepted_weight(sums: Sums, verdicts: Verdicts) -> Tensor:
    """[n] float64: the sum of token-level weights over accepted tokens."""
    return _left("kept_weight", "kept_negative_weight", sums, verdicts.accept, verdicts.accept_negative)


def sequence_statistic(criterion: Criterion, sums: Sums) -> Tensor:
    """[n] float64: what a criterion tests of whole sequences (k1 as log ρ), their mean for token-level ones."""
    by_sum = criterion.aggregation == "seq_sum"
    if criterion.divergence == "k1":
        return sums["log_ratio" if by_sum else "mean_log_ratio"]
    return sums[criterion.divergence] if by_sum else sums[criterion.divergence] / sums["length"]


def threshold_scale(sums: Sums, config: RolloutCorrectionConfig) -> Tensor | None:
    """[n] float64: what the bounds of a whole sequence are multiplied by in nats: the factor of its oldest valid token.

    From counts of the tokens that reach each level, which add up over the shards of the sequence.
    """
    if config.staleness_scale is None:
        return None
    reached = [sums[f"older_{step}"] > 0 for step in config.staleness_scale.steps]
    return config.staleness_scale.of(torch.stack(reached).sum(0), sums["valid"].dtype)


def group_columns(config: RolloutCorrectionConfig) -> list[str]:
    """What is summed over the responses of a prompt; nothing without group criteria."""
    if not config.needs_groups:
        return []
    kinds = {criterion.divergence for criterion in config.criteria if criterion.aggregation == "group_mean"}
    return ["valid", *sorted(kinds), *(["lost"] if any(c.name == GROUP_ANY for c in config.criteria) else [])]


def local_group_sums(sums: Sums, shards: Shards, config: RolloutCorrectionConfig) -> Tensor:
    """[num_groups, columns] float64 of this rank's responses."""
    verdicts = decide(sums, shards, config, None)
    lost = ((sums["response"] > 0) & (verdicts.accepted == 0)).double()
    if shards.group_ids is None:
        raise ValueError("group criteria need group_ids")
    values = {"valid": sums["valid"], "k1": sums["log_ratio"], "lost": lost} | sums
    columns = torch.stack([values[name] for name in group_columns(config)], dim=1)
    groups = torch.zeros(shards.counts.num_groups or 0, columns.shape[1], dtype=torch.float64, device=columns.device)
    return groups.index_add_(0, shards.group_ids, columns)


def _group_verdict(criterion: Criterion, groups: Tensor, config: RolloutCorrectionConfig) -> Tensor:
    """[num_groups] bool."""
    column = dict(zip(group_columns(config), groups.unbind(1), strict=True))
    if criterion.name == GROUP_ANY:
        # A mean out of bounds rejects every response of the prompt.
        means = [other for other in config.criteria if other.aggregation == "group_mean"]
        verdicts = [_group_verdict(other, groups, config) for other in means]
        return torch.stack([column["lost"] == 0, *verdicts]).all(0)
    return within(column[criterion.divergence] / column["valid"].clamp(min=1), criterion.lower, criterion.upper)


def _sequence_verdict(criterion: Criterion, sums: Sums, scale: Tensor | None) -> Tensor:
    if criterion.aggregation == "seq_max" and scale is None:
        return sums[f"over_{criterion.name}"] == 0
    if criterion.aggregation == "seq_max":
        # How many tokens are over the bound is not known before the bound is: the maximum is there too.
        statistic = sums[f"max_{criterion.name}"]
    else:
        statistic = sequence_statistic(criterion, sums)
    statistic = statistic if scale is None else statistic / scale
    verdict = within(statistic, criterion.lower, criterion.upper)
    # Without a valid token there is nothing to test.
    return verdict | (sums["valid"] == 0)
