"""The advantages of a rollout batch: rewards, what is taken off them, the estimator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rc.advantages.group import GROUP_ESTIMATORS, group_advantages
from megatron_rc.advantages.returns import TokenAdvantages, discounted_returns, gae, outcome_rewards, remax
from megatron_rc.advantages.whitening import whiten
from megatron_rc.launch.rollouts.samples import dropped
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.micro_batches import LocalBatch
from megatron_rc.loss.policy import kl_penalty
from megatron_rc.numerics import is_log_prob
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.collectives import all_reduce_sum, broadcast
from megatron_rc.parallel.groups import group_device, group_rank, group_size
from megatron_rc.records.rollout import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What a rollout batch says of its responses, on a rank of the last stage.

    Attributes:
        batch: the records.
        rewards: [rows of the batch], scaled and clipped.
        cut: this rank's tokens.
        old: log π_old, like them; None: the engine's log-probs stand for it.
        ref: log π_ref, where a KL is taken off the rewards.
        values: of a critic, likewise, with the estimator that needs them.
        baselines: [rows], the reward of each prompt's greedy response, scaled and clipped likewise.
    """

    batch: RolloutBatch
    rewards: Tensor
    cut: LocalBatch
    old: Tensor | None = None
    ref: Tensor | None = None
    values: Tensor | None = None
    baselines: Tensor | None = None


@dataclass(frozen=True)
class Estimated:
    """Advantages of this rank's tokens.

    Attributes:
        advantages: [n], one a sequence, or one a token; float32.
        decided: [rows of the batch] bool: the responses that have an advantage anywhere.
        returns: what a critic's values are trained towards, like the tokens; None without one.
        kl: the KL that is taken off the rewards, like the tokens; None: none is.
    """

    advantages: Tensor
    decided: Tensor
    returns: Tensor | None = None
    kl: Tensor | None = None


class Advantages:
    """The estimator that the flags name. Ranks of the last stage alone call it, and all of these together.

    Args:
        config: of the run.
        groups: of this rank.
    """

    def __init__(self, config: RunConfig, groups: ParallelGroups) -> None:
        self.wanted, self.groups = config.advantages, groups

    def of(self, scores: Scores, accepted: Tensor | None = None) -> Estimated:
        """The advantages, measured by all responses, or by those that are accepted.

        Args:
            scores: of the rollout batch.
            accepted: bool, like the tokens: what the rejection leaves; None: all counts.

        Collectives: those of :mod:`megatron_rc.advantages` where tokens have advantages of their own, and of ``gpg``;
        with ``accepted``, with a KL in the rewards, and for those advantages, a SUM of a number a sequence over ``cp``.
        """
        mask = scores.cut.local.response_mask
        kl = self._kl(scores) if self.wanted.kl_in_reward else None
        name = self.wanted.advantage_estimator
        if name in GROUP_ESTIMATORS:
            per_row = self._of_responses(scores, name, kl, accepted)
            return Estimated(scores.cut.sides(per_row.float()), per_row != 0, kl=kl)
        found = self._of_tokens(scores, kl, accepted)
        advantages = found.advantages
        if self.wanted.whitens:
            counted = mask if accepted is None else mask & accepted
            advantages = whiten(advantages, counted, layout=scores.cut.local.layout, groups=self.groups)
        decided = self._by_row(scores, advantages != 0) > 0
        return Estimated(advantages.float(), decided, found.returns.float() if name == "gae" else None, kl)

    def _of_responses(self, scores: Scores, name: str, kl: Tensor | None, accepted: Tensor | None) -> Tensor:
        """[rows], float64."""
        rewards, kept = scores.rewards, ~dropped(scores.batch)
        if kl is not None:
            rewards = rewards.double() - self.wanted.kl_in_reward * self._by_row(scores, kl)
        if accepted is not None:
            kept &= self._by_row(scores, accepted) > 0
        lengths = scores.batch.response_mask.sum(1)
        return group_advantages(
            rewards,
            scores.batch.group_ids,
            estimator=name,
            lengths=lengths,
            kept=kept,
            f_norm=self.wanted.gpg_f_norm,
            groups=self.groups if name == "gpg" else None,  # responses to a prompt lie on one rank
        )

    def _of_tokens(self, scores: Scores, kl: Tensor | None, accepted: Tensor | None) -> TokenAdvantages:
        """Like the tokens, not whitened yet."""
        local, sides = scores.cut.local, scores.cut.sides
        mask, layout, name = local.response_mask, local.layout, self.wanted.advantage_estimator
        where: dict[str, Any] = {"layout": layout, "groups": self.groups}
        if name == "reinforce-pp-baseline":
            of_groups = sides(self._of_responses(scores, "grpo-no-std", kl, accepted))
            each = torch.where(mask, layout.expand(of_groups), 0)
            return TokenAdvantages(each, each)
        rewards = outcome_rewards(sides(scores.rewards.double()), mask, **where)
        if kl is not None:
            rewards = rewards - self.wanted.kl_in_reward * kl
        if name == "reinforce-pp":
            returns = discounted_returns(rewards, mask, gamma=self.wanted.gamma, **where)
            return TokenAdvantages(returns, returns)
        if name == "remax":
            return remax(rewards, sides(_given(scores.baselines, "a greedy response to each prompt")), mask, **where)
        values = _given(scores.values, "a critic").double()
        return gae(rewards, values, mask, gamma=self.wanted.gamma, lam=self.wanted.gae_lambda, **where)

    def _kl(self, scores: Scores) -> Tensor:
        """Like the tokens, float64; 0 where nothing counts, and where the engine's log-prob is none."""
        local = scores.cut.local
        old = local.rollout_log_probs if scores.old is None else scores.old
        usable = local.response_mask & is_log_prob(old)
        here, there = (torch.where(usable, one.double(), 0) for one in (old, _given(scores.ref, "a reference policy")))
        return torch.where(usable, kl_penalty(here, there, self.wanted.kl_in_reward_estimator), 0)

    def _by_row(self, scores: Scores, values: Tensor) -> Tensor:
        """The sums of values of tokens over whole responses, [rows], float64. Collectives: one SUM of [n] over cp."""
        cut = scores.cut
        sums = all_reduce_sum(cut.local.layout.sum_sequences(values), self.groups.cp)
        rows = torch.zeros(len(scores.rewards), dtype=torch.float64, device=sums.device)
        return rows.index_add_(0, cut.rows.clamp(min=0), torch.where(cut.rows >= 0, sums, 0))


@dataclass(frozen=True)
class AdvantageSummary:
    """What the advantages of a rollout batch are like, equal on all ranks.

    Attributes:
        nonzero: for each mini-batch the share of its responses that have an advantage.
        metrics: of the whole batch.
    """

    nonzero: tuple[float, ...]
    metrics: dict[str, float]


def summarize(
    scores: Scores | None, estimated: Estimated | None, mini_batches: int, groups: ParallelGroups
) -> AdvantageSummary:
    """Count them, on all stages together; those before the last know nothing, and hear of it.

    Args:
        scores: of the rollout batch; None before the last stage, likewise the next.
        estimated: its advantages.
        mini_batches: of the batch.
        groups: of this rank.

    Collectives: one SUM of 2 · mini_batches + 2 doubles over ``dp_cp``, one broadcast of them over ``pp``.
    """
    sums = torch.zeros(2 * mini_batches + 2, dtype=torch.float64)
    if scores is not None and estimated is not None:
        sums = all_reduce_sum(_counts(scores, estimated, mini_batches, groups), groups.dp_cp)
    sums = broadcast(sums.to(group_device(groups.pp)), group_size(groups.pp) - 1, groups.pp).cpu()
    decided, responses, (kl, tokens) = sums.split([mini_batches, mini_batches, 2])
    nonzero: list[float] = (decided / responses.clamp(min=1)).tolist()
    metrics = {"reward/kl": float(kl / tokens)} if tokens else {}
    return AdvantageSummary(tuple(nonzero), metrics)


def _counts(scores: Scores, estimated: Estimated, mini_batches: int, groups: ParallelGroups) -> Tensor:
    """This rank's part: CP ranks hold the same responses, of which the first one counts, and tokens of their own."""
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
