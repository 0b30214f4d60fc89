"""Advantages of a rollout batch from its rewards, by the estimator of ``--advantage-estimator``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rc.advantages.estimators import GROUP_ESTIMATORS
from megatron_rc.advantages.group import group_advantages
from megatron_rc.advantages.returns import TokenAdvantages, discounted_returns, gae, outcome_rewards, remax, whiten
from megatron_rc.advantages.token_baseline import optimal_token_baseline
from megatron_rc.launch.rollouts.samples import dropped
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.batches.micro_batches import LocalBatch
from megatron_rc.loss.kl import kl_penalty
from megatron_rc.numerics import exp_weight, is_log_prob
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.collectives import all_reduce_sum, broadcast
from megatron_rc.parallel.groups import group_device, group_rank, group_size
from megatron_rc.records.rollout import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Inputs of the estimator on a rank of the last stage."""

    batch: RolloutBatch  # the records
    rewards: Tensor  # [rows of the batch], scaled and clipped
    turn_scale: float = 1.0  # factor of the parts of the rewards that came with earlier turns
    cut: LocalBatch  # this rank's tokens
    old: Tensor | None = None  # log π_old, like the tokens; None: the engine's log-probs are used
    squares: Tensor | None = None  # Σ π_old², like the tokens; needed by ``optimal-token-baseline``
    ref: Tensor | None = None  # log π_ref, like the tokens; needed if the rewards have a KL penalty
    values: Tensor | None = None  # a critic's values, like the tokens; needed by ``gae``
    # [rows], scaled and clipped reward of each prompt's greedy response; needed by ``remax``.
    baselines: Tensor | None = None


@dataclass(frozen=True)
class Estimated:
    """Advantages of this rank's tokens."""

    advantages: Tensor  # [n], or like the tokens; float32
    decided: Tensor  # [rows of the batch] bool: responses with an advantage other than 0
    returns: Tensor | None = None  # targets of a critic's values, like the tokens; None without a critic
    kl: Tensor | None = None  # KL penalty in the rewards, like the tokens; None if there is none


class Advantages:
    """The estimator of advantages. All ranks of the last stage call it together, and no others."""

    def __init__(self, config: RunConfig, groups: ParallelGroups) -> None:
        self.wanted, self.groups = config.advantages, groups

    def of(self, scores: Scores, accepted: Tensor | None = None, weights: Tensor | None = None) -> Estimated:
        """Estimate the advantages.

        Args:
            scores: the inputs of the estimator.
            accepted: bool, like the tokens; responses without an accepted token are in no baseline. Default: all are.
            weights: the correction's weights, like the tokens, for ``--advantage-baseline-weights correction`` and
                ``optimal-token-baseline``; without them all responses count alike in a baseline.

        Collectives: as in :mod:`megatron_rc.advantages`, for estimators per token and those that use the whole batch,
            as ``gpg``. Up to six SUMs of [n] over ``cp``: for estimators per token, for rewards of turns, for
            ``accepted``, for a KL in the rewards, and two for the weights of responses.
        """
        mask = scores.cut.local.response_mask
        kl = self._kl(scores) if self.wanted.kl_in_reward else None
        name = self.wanted.advantage_estimator
        if name in GROUP_ESTIMATORS:
            per_row = self._of_responses(scores, name, kl, accepted, weights)
            return Estimated(scores.cut.sides(per_row.float()), per_row != 0, kl=kl)
        found = self._of_tokens(scores, kl, accepted, weights)
        advantages = found.advantages
        if self.wanted.whitens:
            counted = mask if accepted is None else mask & accepted
            advantages = whiten(advantages, counted, layout=scores.cut.local.layout, groups=self.groups)
        decided = self._by_row(scores, advantages != 0) > 0
        return Estimated(advantages.float(), decided, found.returns.float() if name == "gae" else None, kl)

    def _of_responses(
        self, scores: Scores, name: str, kl: Tensor | None, accepted: Tensor | None, weights: Tensor | None
    ) -> Tensor:
        """Advantages of responses, [rows], float64."""
        rewards, kept = scores.rewards, self._kept(scores, accepted)
        if kl is not None:
            penalty = _over_rollouts(scores.batch, self._by_row(scores, kl))
            rewards = rewards.double() - self.wanted.kl_in_reward * penalty
        lengths = scores.batch.response_mask.sum(1)
        return group_advantages(
            rewards,
            scores.batch.group_ids,
            estimator=name,
            lengths=lengths,
            weights=self._weights(scores, weights) if self.wanted.advantage_baseline == "weighted" else None,
            kept=kept,
            rollout_ids=scores.batch.rollout_ids,
            f_norm=self.wanted.gpg_f_norm,
            # All responses to a prompt are on one rank: only sums over the whole batch need the others.
            groups=self.groups if GROUP_ESTIMATORS[name].uses_batch else None,
        )

    def _kept(self, scores: Scores, accepted: Tensor | None) -> Tensor:
        """The responses in the baselines, [rows] bool."""
        kept = ~dropped(scores.batch)
        return kept if accepted is None else kept & (self._by_row(scores, accepted) > 0)

    def _weights(self, scores: Scores, corrected: Tensor | None) -> Tensor | None:
        """The weight of each response in the baseline of its prompt, [rows], float64; None: all count alike."""
        local = scores.cut.local
        if self.wanted.advantage_baseline_weights == "correction":
            if corrected is None:
                return None
            total = _over_rollouts(scores.batch, self._by_row(scores, corrected))
            tokens = _over_rollouts(scores.batch, self._by_row(scores, local.response_mask))
            return total / tokens.clamp(min=1)
        old, rollout = _given(scores.old, "a forward-only pass"), local.rollout_log_probs
        usable = local.response_mask & is_log_prob(old) & is_log_prob(rollout)
        log_ratio = self._by_row(scores, torch.where(usable, old.double() - rollout.double(), 0))
        log_ratio = _over_rollouts(scores.batch, log_ratio)
        return exp_weight(log_ratio).clamp(max=self.wanted.advantage_baseline_bound)

    def _of_tokens(
        self, scores: Scores, kl: Tensor | None, accepted: Tensor | None, weights: Tensor | None
    ) -> TokenAdvantages:
        """Advantages of tokens, like the tokens, not whitened."""
        local, sides = scores.cut.local, scores.cut.sides
        mask, layout, name = local.response_mask, local.layout, self.wanted.advantage_estimator
        where: dict[str, Any] = {"layout": layout, "groups": self.groups}
        if name == "reinforce-pp-baseline":
            of_groups = sides(self._of_responses(scores, "grpo-no-std", kl, accepted, weights))
            each = torch.where(mask, layout.expand(of_groups), 0)
            return TokenAdvantages(each, each)
        rewards = self._token_rewards(scores)
        if kl is not None:
            rewards = rewards - self.wanted.kl_in_reward * kl
        if name == "reinforce-pp":
            returns = discounted_returns(rewards, mask, gamma=self.wanted.gamma, **where)
            return TokenAdvantages(returns, returns)
        if name == "remax":
            return remax(rewards, sides(_given(scores.baselines, "a greedy response to each prompt")), mask, **where)
        if name == "optimal-token-baseline":
            old, squares = (_given(one, "a forward-only pass") for one in (scores.old, scores.squares))
            # An unusable token has the energy 1 - 2 + 1; the correction decides what becomes of it.
            usable = is_log_prob(old)
            old, squares = torch.where(usable, old, 0), torch.where(usable, squares, 1)
            ids, kept = sides(scores.batch.group_ids), sides(self._kept(scores, accepted))
            return optimal_token_baseline(rewards, old, squares, mask, ids, weights=weights, kept=kept, **where)
        values = _given(scores.values, "a critic").double()
        return gae(rewards, values, mask, gamma=self.wanted.gamma, lam=self.wanted.gae_lambda, **where)

    def _token_rewards(self, scores: Scores) -> Tensor:
        """Rewards like the tokens, float64: the parts of earlier turns at their last tokens, the rest at the end."""
        local, rewards, early = scores.cut.local, scores.rewards.double(), scores.cut.local.turn_rewards
        where: dict[str, Any] = {"layout": local.layout, "groups": self.groups}
        if early is None:
            return outcome_rewards(scores.cut.sides(rewards), local.response_mask, **where)
        early = early.double() * scores.turn_scale
        rest = scores.cut.sides(rewards - self._by_row(scores, early))
        return early + outcome_rewards(rest, local.response_mask, **where)

    def _kl(self, scores: Scores) -> Tensor:
        """KL to the reference, like the tokens, float64; 0 at masked tokens and at tokens with bad log-probs."""
        local = scores.cut.local
        old = local.rollout_log_probs if scores.old is None else scores.old
        usable = local.response_mask & is_log_prob(old)
        here, there = (torch.where(usable, one.double(), 0) for one in (old, _given(scores.ref, "a reference policy")))
        return torch.where(usable, kl_penalty(here, there, self.wanted.kl_in_reward_estimator), 0)

    def _by_row(self, scores: Scores, values: Tensor) -> Tensor:
        """Sums of tokens' values over whole responses, [rows], float64. Collectives: one SUM of [n] over ``cp``."""
        cut = scores.cut
        sums = all_reduce_sum(cut.local.layout.sum_sequences(values), self.groups.cp)
        rows = torch.zeros(len(scores.rewards), dtype=torch.float64, device=sums.device)
        return rows.index_add_(0, cut.rows.clamp(min=0), torch.where(cut.rows >= 0, sums, 0))


def _over_rollouts(batch: RolloutBatch, values: Tensor) -> Tensor:
    """[rows] float64: the sum of a value over the rows of each row's rollout."""
    if batch.rollout_ids is None:
        return values
    pairs = torch.stack([batch.group_ids.long(), batch.rollout_ids.long()], dim=1)
    _, rollout = pairs.unique(dim=0, return_inverse=True)
    sums = torch.zeros_like(values).index_add_(0, rollout, values)
    return sums[rollout]


def summarize(
    scores: Scores | None, estimated: Estimated | None, mini_batches: int, groups: ParallelGroups
) -> tuple[list[float], dict[str, float]]:
    """Summarize the advantages on the last stage (the others give None), and broadcast the result to all stages.

    Returns, equal on all ranks, for each mini-batch the share of its responses with an advantage other than 0, and
    metrics of the whole batch.

    Collectives: one SUM of 2 · mini_batches + 2 doubles over ``dp_cp``, one broadcast of them over ``pp``.
    """
    sums = torch.zeros(2 * mini_batches + 2, dtype=torch.float64)
    if scores is not None and estimated is not None:
        sums = all_reduce_sum(_counts(scores, estimated, mini_batches, groups), groups.dp_cp)
    sums = broadcast(sums.to(group_device(groups.pp)), group_size(groups.pp) - 1, groups.pp).cpu()
    decided, responses, (kl, tokens) = sums.split([mini_batches, mini_batches, 2])
    return (decided / responses.clamp(min=1)).tolist(), {"reward/kl": float(kl / tokens)} if tokens else {}


def _counts(scores: Scores, estimated: Estimated, mini_batches: int, groups: ParallelGroups) -> Tensor:
    """This rank's counts; only CP rank 0 counts responses, each CP rank counts its own tokens."""
    kept = ~dropped(scores.batch)
    rows = torch.stack([estimated.decided & kept, kept]).double().unflatten(1, (mini_batches, -1)).sum(dim=2)
    if group_rank(groups.cp):
        rows = torch.zeros_like(rows)
    tokens = rows.new_zeros(2)
    if estimated.kl is not None:
        tokens = torch.stack([estimated.kl.sum(), scores.cut.local.response_mask.sum(dtype=torch.float64)])
    return torch.cat([rows.flatten(), tokens])


def _given(value: Tensor | None, what: str) -> Tensor:
    if value is None:
        raise ValueError(f"this estimator of advantages needs {what}")
    return value
