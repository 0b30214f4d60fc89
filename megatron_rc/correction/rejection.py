"""Which sequences are rejected: verdicts from sums over whole sequences, and over all responses of a prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.correction.shards import Shards
from megatron_rc.correction.token_pass.terms import Sums
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.criterion import Criterion, Divergence, Need


@dataclass(frozen=True)
class Verdicts:
    """What is known of whole sequences, [n] each, equal on all ranks of a CP group.

    Attributes:
        tokens: tokens under m, float64.
        accept: bool: no criterion rejects the whole sequence.
        accept_negative: bool: criteria of tokens with a negative advantage leave these too; None where the advantage is
            one a sequence, and in ``accept``.
        accepted: tokens under m', float64.
        rejected_by: for each criterion, by name, the valid tokens that it rejects by itself, float64.
    """

    tokens: Tensor
    accept: Tensor
    accept_negative: Tensor | None
    accepted: Tensor
    rejected_by: Sums


@dataclass(frozen=True)
class SequenceSums:
    """What a criterion's statistic is made of, from the sums and maxima by name: of whole sequences, or of prompts."""

    named: Sums

    @property
    def num_tokens(self) -> Tensor:
        """Valid tokens, at least 1."""
        return self.named["num_tokens"]

    @property
    def num_lost(self) -> Tensor:
        """For prompts: how many responses lose every token to the other criteria."""
        return self.named["lost"]

    def sum(self, divergence: Divergence) -> Tensor:
        """The sum of x over the valid tokens."""
        return self.named[Need("sum", divergence).name]

    def max(self, divergence: Divergence) -> Tensor:
        """The largest x of a valid token; without one -inf, or 0 where x cannot be less."""
        return self.named[Need("max", divergence).name]

    def min(self, divergence: Divergence) -> Tensor:
        """The smallest x of a valid token; +inf without one."""
        return -self.named[Need("min", divergence).name]


def decide(sums: Sums, shards: Shards, config: RolloutCorrectionConfig, prompts: Tensor | None) -> Verdicts:
    """The verdicts on whole sequences.

    Args:
        sums: of whole sequences, by name.
        shards: ids, and advantages where there is one a sequence.
        config: the criteria.
        prompts: [num_groups, columns] over all responses of a prompt, as :func:`prompt_columns` has them; None before
            they are known.
    """
    valid = sums["valid"]
    scale = threshold_scale(sums, config)
    accept = torch.ones_like(valid, dtype=torch.bool)
    accept_negative, rejected_by = None, {}
    for criterion in config.criteria:
        if criterion.unit == "token":
            rejected_by[criterion.name] = valid - sums[f"accepted_{criterion.name}"]
            continue
        if criterion.unit == "prompt":
            if prompts is None:
                continue
            verdict = _prompt_verdict(criterion, prompts, config)[shards.prompt_ids]
        else:
            # Without a valid token there is nothing to test.
            verdict = criterion.within_bounds(sequence_statistic(criterion, sums), scale) | (valid == 0)
        if criterion.only_negative and shards.advantages is not None:
            verdict = verdict | ~(shards.advantages < 0)
        elif criterion.only_negative:
            accept_negative = verdict if accept_negative is None else accept_negative & verdict
            rejected_by[criterion.name] = torch.where(verdict, 0, sums["negative"])
            continue
        accept = accept & verdict
        rejected_by[criterion.name] = torch.where(verdict, 0, valid)
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
    """[n] float64: the statistic of each whole sequence (of k1: of log ρ)."""
    return criterion.statistic(SequenceSums(sums))


def threshold_scale(sums: Sums, config: RolloutCorrectionConfig) -> Tensor | None:
    """[n] float64: what the bounds of a whole sequence are multiplied by in nats: the factor of its oldest valid token.

    From counts of the tokens that reach each level, which add up over the shards of the sequence.
    """
    if config.staleness_scale is None:
        return None
    reached = [sums[f"older_{step}"] > 0 for step in config.staleness_scale.steps]
    return config.staleness_scale.of(torch.stack(reached).sum(0), sums["valid"].dtype)


def prompt_columns(config: RolloutCorrectionConfig) -> list[str]:
    """What is summed over the responses of a prompt; nothing without criteria of prompts."""
    criteria = [criterion for criterion in config.criteria if criterion.unit == "prompt"]
    sums = sorted({need.name for criterion in criteria for need in criterion.needs})
    return ["valid", *sums, *["lost"] * any(criterion.follows_others for criterion in criteria)] if criteria else []


def local_prompt_sums(sums: Sums, shards: Shards, config: RolloutCorrectionConfig) -> Tensor:
    """[num_groups, columns] float64 of this rank's responses."""
    verdicts = decide(sums, shards, config, None)
    lost = ((sums["response"] > 0) & (verdicts.accepted == 0)).double()
    if shards.prompt_ids is None:
        raise ValueError("criteria of prompts need prompt_ids")
    columns = torch.stack([(sums | {"lost": lost})[name] for name in prompt_columns(config)], dim=1)
    prompts = torch.zeros(shards.counts.num_groups or 0, columns.shape[1], dtype=torch.float64, device=columns.device)
    return prompts.index_add_(0, shards.prompt_ids, columns)


def _prompt_verdict(criterion: Criterion, prompts: Tensor, config: RolloutCorrectionConfig) -> Tensor:
    """Which prompts a criterion accepts, [num_groups] bool."""
    named = dict(zip(prompt_columns(config), prompts.unbind(1), strict=True))
    named["num_tokens"] = named["valid"].clamp(min=1)
    verdict = criterion.within_bounds(criterion.statistic(SequenceSums(named)))
    if not criterion.follows_others:
        return verdict
    # Another criterion on prompts that rejects one rejects all of its responses.
    others = [other for other in config.criteria if other.unit == "prompt" and not other.follows_others]
    return torch.stack([verdict, *(_prompt_verdict(other, prompts, config) for other in others)]).all(0)
