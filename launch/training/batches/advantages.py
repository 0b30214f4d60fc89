"""Advantages of a rollout batch from its rewards, by the estimator of ``--advantage-estimator``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.advantages.distillation import distillation_advantages
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
    # KL penalty in the rewards, or with ``distillation`` log π_old minus the teachers' mean log-prob, like the tokens;
    # None if there is none.
    kl: Tensor | None = None


class Advantages:
    """The estimator of advantages. All ranks of the last stage call it together, and no others."""

    def __init__(self, config: RunConfig, groups: ParallelGroups) -> None:
        self.settings = config.advantages
        self.teacher_weights = config.distillation and config.distillation.teacher_weights
        self.groups = groups

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
        local = scores.cut.local
        kl = self._kl(scores) if self.settings.kl_in_reward else None
        estimator = self.settings.advantage_estimator
        if estimator in GROUP_ESTIMATORS:
            row_advantages = self._of_responses(scores, estimator, kl, accepted, weights)
            return Estimated(
                advantages=scores.cut.sides(row_advantages.float()),
                decided=row_advantages != 0,
                kl=kl,
            )

        estimated = self._of_tokens(scores, kl, accepted, weights)
        advantages = estimated.advantages
        if self.settings.needs_teachers:
            kl = -advantages
        if self.settings.whitens:
            counted = local.response_mask if accepted is None else local.response_mask & accepted
            advantages = whiten(advantages, counted, layout=local.layout, groups=self.groups)
        # One token with an advantage other than 0 decides its response.
        decided = self._by_row(scores, advantages != 0) > 0
        return Estimated(
            advantages=advantages.float(),
            decided=decided,
            returns=estimated.returns.float() if estimator == "gae" else None,
            kl=kl,
        )

    def _of_responses(
        self, scores: Scores, estimator: str, kl: Tensor | None, accepted: Tensor | None, weights: Tensor | None
    ) -> Tensor:
        """Advantages of responses, [rows], float64."""
        in_baselines = self._in_baselines(scores, accepted)
        rewards = scores.rewards
        if kl is not None:
            penalty = _over_rollouts(scores.batch, self._by_row(scores, kl))
            rewards = rewards.double() - self.settings.kl_in_reward * penalty
        is_weighted = self.settings.advantage_baseline == "weighted"
        return group_advantages(
            rewards,
            scores.batch.group_ids,
            estimator=estimator,
            lengths=scores.batch.response_mask.sum(1),
            weights=self._response_weights(scores, weights) if is_weighted else None,
            kept=in_baselines,
            rollout_ids=scores.batch.rollout_ids,
            f_norm=self.settings.gpg_f_norm,
            # All responses to a prompt are on one rank: only sums over the whole batch need the others.
            groups=self.groups if GROUP_ESTIMATORS[estimator].uses_batch else None,
        )

    def _in_baselines(self, scores: Scores, accepted: Tensor | None) -> Tensor:
        """The responses that count in the baselines, [rows] bool: not dropped, and with an accepted token."""
        in_baselines = ~dropped(scores.batch)
        if accepted is None:
            return in_baselines
        return in_baselines & (self._by_row(scores, accepted) > 0)

    def _response_weights(self, scores: Scores, token_weights: Tensor | None) -> Tensor | None:
        """The weight of each response in the baseline of its prompt, [rows], float64; None: all count alike.

        ``correction``: the mean of the correction's weights over the tokens of the rollout. ``ratio``: the bounded
        ratio π_old/π_rollout of the whole rollout.
        """
        local = scores.cut.local
        if self.settings.advantage_baseline_weights == "correction":
            if token_weights is None:
                return None
            total_weight = _over_rollouts(scores.batch, self._by_row(scores, token_weights))
            num_tokens = _over_rollouts(scores.batch, self._by_row(scores, local.response_mask))
            return total_weight / num_tokens.clamp(min=1)

        old = _required(scores.old, "a forward-only pass")
        rollout = local.rollout_log_probs
        usable = local.response_mask & is_log_prob(old) & is_log_prob(rollout)
        token_log_ratio = torch.where(usable, old.double() - rollout.double(), 0)
        log_ratio = _over_rollouts(scores.batch, self._by_row(scores, token_log_ratio))
        return exp_weight(log_ratio).clamp(max=self.settings.advantage_baseline_bound)

    def _of_tokens(
        self, scores: Scores, kl: Tensor | None, accepted: Tensor | None, weights: Tensor | None
    ) -> TokenAdvantages:
        """Advantages of tokens, like the tokens, not whitened."""
        mask = scores.cut.local.response_mask
        layout = scores.cut.local.layout
        estimator = self.settings.advantage_estimator
        if estimator == "reinforce-pp-baseline":
            row_advantages = self._of_responses(scores, "grpo-no-std", kl, accepted, weights)
            advantages = torch.where(mask, layout.expand(scores.cut.sides(row_advantages)), 0)
            return TokenAdvantages(advantages, returns=advantages)

        if estimator == "distillation":
            advantages = self._from_teachers(scores)
            return TokenAdvantages(advantages, returns=advantages)

        rewards = self._token_rewards(scores)
        if kl is not None:
            rewards = rewards - self.settings.kl_in_reward * kl
        if estimator == "reinforce-pp":
            returns = discounted_returns(rewards, mask, gamma=self.settings.gamma, layout=layout, groups=self.groups)
            return TokenAdvantages(advantages=returns, returns=returns)
        if estimator == "remax":
            baselines = _required(scores.baselines, "a greedy response to each prompt")
            return remax(rewards, scores.cut.sides(baselines), mask, layout=layout, groups=self.groups)
        if estimator == "optimal-token-baseline":
            return self._with_token_baseline(scores, rewards, accepted, weights)
        return gae(
            rewards,
            _required(scores.values, "a critic").double(),
            mask,
            gamma=self.settings.gamma,
            lam=self.settings.gae_lambda,
            layout=layout,
            groups=self.groups,
        )

    def _from_teachers(self, scores: Scores) -> Tensor:
        """Advantages of tokens from the teachers' log-probs, like the tokens; 0 at tokens with bad log-probs."""
        local = scores.cut.local
        of_teachers = _required(local.teacher_log_probs, "a teacher").movedim(-1, 0)
        old = local.rollout_log_probs if scores.old is None else scores.old
        weights = self.teacher_weights
        return distillation_advantages(
            of_teachers,
            old,
            local.response_mask & is_log_prob(old),
            teacher_weights=None if weights is None else torch.tensor(weights, device=old.device),
        )

    def _with_token_baseline(
        self, scores: Scores, rewards: Tensor, accepted: Tensor | None, weights: Tensor | None
    ) -> TokenAdvantages:
        """Advantages with the optimal token baseline, from rewards like the tokens."""
        old = _required(scores.old, "a forward-only pass")
        squares = _required(scores.squares, "a forward-only pass")
        # With π = Σπ² = 1 an unusable token has the energy 1 - 2 + 1 = 0; the correction decides what becomes of it.
        usable = is_log_prob(old)
        return optimal_token_baseline(
            rewards,
            torch.where(usable, old, 0),
            torch.where(usable, squares, 1),
            scores.cut.local.response_mask,
            scores.cut.sides(scores.batch.group_ids),
            weights=weights,
            kept=scores.cut.sides(self._in_baselines(scores, accepted)),
            layout=scores.cut.local.layout,
            groups=self.groups,
        )

    def _token_rewards(self, scores: Scores) -> Tensor:
        """Rewards like the tokens, float64: the parts of earlier turns at their last tokens, the rest at the end."""
        local = scores.cut.local
        final_rewards = scores.rewards.double()
        turn_rewards = local.turn_rewards
        if turn_rewards is not None:
            turn_rewards = turn_rewards.double() * scores.turn_scale
            final_rewards = final_rewards - self._by_row(scores, turn_rewards)

        token_rewards = outcome_rewards(
            scores.cut.sides(final_rewards), local.response_mask, layout=local.layout, groups=self.groups
        )
        return token_rewards if turn_rewards is None else turn_rewards + token_rewards

    def _kl(self, scores: Scores) -> Tensor:
        """KL to the reference, like the tokens, float64; 0 at masked tokens and at tokens with bad log-probs."""
        local = scores.cut.local
        ref = _required(scores.ref, "a reference policy")
        old = local.rollout_log_probs if scores.old is None else scores.old
        usable = local.response_mask & is_log_prob(old)
        usable_old = torch.where(usable, old.double(), 0)
        usable_ref = torch.where(usable, ref.double(), 0)
        return torch.where(usable, kl_penalty(usable_old, usable_ref, self.settings.kl_in_reward_estimator), 0)

    def _by_row(self, scores: Scores, values: Tensor) -> Tensor:
        """Sums of tokens' values over whole responses, [rows], float64. Collectives: one SUM of [n] over ``cp``."""
        cut = scores.cut
        sums = all_reduce_sum(cut.local.layout.sum_sequences(values), self.groups.cp)
        by_row = torch.zeros(len(scores.rewards), dtype=torch.float64, device=sums.device)
        # Padding, whose row is -1, adds 0 to row 0.
        return by_row.index_add_(0, cut.rows.clamp(min=0), torch.where(cut.rows >= 0, sums, 0))


def _over_rollouts(batch: RolloutBatch, values: Tensor) -> Tensor:
    """The sum of a value over the rows of each row's rollout, [rows] float64."""
    if batch.rollout_ids is None:
        return values
    ids = torch.stack([batch.group_ids.long(), batch.rollout_ids.long()], dim=1)
    _, rollout_of_row = ids.unique(dim=0, return_inverse=True)
    sums = torch.zeros_like(values).index_add_(0, rollout_of_row, values)
    return sums[rollout_of_row]


def summarize(
    scores: Scores | None,
    estimated: Estimated | None,
    mini_batches: int,
    groups: ParallelGroups,
    *,
    kl_metric: str = "reward/kl",
) -> tuple[list[float], dict[str, float]]:
    """Summarize the advantages on the last stage (the others give None), and broadcast the result to all stages.

    Returns, equal on all ranks, for each mini-batch the share of its responses with an advantage other than 0, and
    metrics of the whole batch; ``kl_metric`` is the name of the mean KL.

    Collectives: one SUM of 2 · mini_batches + 2 doubles over ``dp_cp``, one broadcast of them over ``pp``.
    """
    sums = torch.zeros(2 * mini_batches + 2, dtype=torch.float64)
    if scores is not None and estimated is not None:
        sums = all_reduce_sum(_counts(scores, estimated, mini_batches, groups), groups.dp_cp)
    last_stage = group_size(groups.pp) - 1
    sums = broadcast(sums.to(group_device(groups.pp)), last_stage, groups.pp).cpu()

    decided, responses, (kl, tokens) = sums.split([mini_batches, mini_batches, 2])
    decided_shares = (decided / responses.clamp(min=1)).tolist()
    metrics = {kl_metric: float(kl / tokens)} if tokens else {}
    return decided_shares, metrics


def _counts(scores: Scores, estimated: Estimated, mini_batches: int, groups: ParallelGroups) -> Tensor:
    """This rank's counts; only CP rank 0 counts responses, each CP rank counts its own tokens.

    Decided responses of each mini-batch, responses of each mini-batch, the sum of the KL, and its tokens.
    """
    present = ~dropped(scores.batch)
    by_row = torch.stack([estimated.decided & present, present]).double()
    responses = by_row.unflatten(1, (mini_batches, -1)).sum(dim=2)
    if group_rank(groups.cp) != 0:
        responses = torch.zeros_like(responses)
    kl_and_tokens = responses.new_zeros(2)
    if estimated.kl is not None:
        num_tokens = scores.cut.local.response_mask.sum(dtype=torch.float64)
        kl_and_tokens = torch.stack([estimated.kl.sum(), num_tokens])
    return torch.cat([responses.flatten(), kl_and_tokens])


def _required(value: Tensor | None, source: str) -> Tensor:
    """Return the value; ValueError that names its source if it is None."""
    if value is None:
        raise ValueError(f"this estimator of advantages needs {source}")
    return value
