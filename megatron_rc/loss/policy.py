"""The policy's loss of every token: objective, distillation, entropy bonus and KL penalty, and their settings.

:func:`policy_loss` is the objective alone, times the importance weights. :func:`token_loss` adds the other terms.
:class:`PolicyLossConfig` has the settings of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.loss.aggregation import check_aggregation
from megatron_rc.loss.kl import KL_ESTIMATORS, WEIGHTED_KL_ESTIMATORS, kl_penalty
from megatron_rc.loss.metrics import LossStatistics
from megatron_rc.loss.objectives import Objective, TokenLoss, TokenTerms, objective_of
from megatron_rc.numerics import check_mask
from megatron_rc.parallel.arguments import check_alike, check_number, check_tensors, one_of
from megatron_rc.parallel.divergence import check_kind_of_divergence
from megatron_rc.parallel.groups import ParallelGroups
from megatron_rc.parallel.layout import SequenceLayout
from megatron_rc.parallel.softmax import arithmetic
from megatron_rc.parallel.whole import WholeSequences

_NOT_NEGATIVE = "must be 0 or more, and finite"


@dataclass(frozen=True)
class PolicyLossConfig:
    """The settings of the loss: the objective, the bonus and penalty, and how per-token losses become one number.

    Attributes:
        algorithm: one of the objectives of :func:`policy_loss`; None: ``ppo_clip``, or in bypass mode the correction's
            ``loss_type``.
        clip_low: the lower bound. The ratio is clipped below 1 - this; in ``dppo_tv``, ``dppo_kl``, ``cppo`` and
            ``gmpo`` it is a bound of another kind (see :func:`policy_loss`).
        clip_high: the upper bound. The ratio is clipped above 1 + this; in the four objectives above it is a bound of
            another kind.
        dual_clip: c > 1: the loss of a token with A < 0 is at most ``c·|A|``; None: it has no such limit. In
            ``dppo_tv`` and ``dppo_kl`` c limits the ratio instead; None: 20.
        aggregation: how the per-token loss becomes one number: ``token-mean``, ``token-sum``, ``seq-mean-token-sum``,
            ``seq-mean-token-mean`` or ``seq-mean-token-sum-norm``.
        loss_scale_factor: the divisor of ``token-sum`` and ``seq-mean-token-sum-norm``; only these two need it.
        kl_coef: weight of the KL penalty to the reference policy, per token.
        kl_estimator: ``k1``, ``k2``, ``k3``, ``abs``, ``k1+``, ``k3+`` or ``abs+`` (see :func:`.kl_penalty`).
        entropy_coef: weight of the entropy bonus, per token.
        tau_pos: temperature of ``sapo`` for A > 0; None: 1.
        tau_neg: temperature of ``sapo`` for A ≤ 0; None: 1.05.
        kl_importance_weight: multiply each token's KL penalty by π_θ/π_rollout, so that its gradient is that of
            KL(π_θ ‖ π_ref) for tokens that the engine sampled (see :func:`.kl_penalty`). Only ``k1``, ``k3``, ``k1+``
            and ``k3+`` allow it.
        distillation_coef: weight of the divergence from a teacher that is added to the objective, per token. The
            importance weights multiply it too.
        distillation_kind: the kind of the divergence that the caller computes, for ``distillation_coef`` and for the
            objective ``distill``: ``reverse_kl``, ``forward_kl`` or ``jsd`` (see :func:`.vocab_parallel_divergence`).
        distillation_beta: β of ``jsd``; None: 0.5.

    Raises:
        ValueError: at construction, for a wrong value or one that the algorithm does not use.
    """

    algorithm: str | None = None
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    aggregation: str = "token-mean"
    loss_scale_factor: float | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    tau_pos: float | None = None
    tau_neg: float | None = None
    kl_importance_weight: bool = False
    distillation_coef: float = 0.0
    distillation_kind: str = "reverse_kl"
    distillation_beta: float | None = None

    def __post_init__(self) -> None:
        objective = None if self.algorithm is None else objective_of(self.algorithm)
        check_aggregation(self.aggregation, self.loss_scale_factor)
        _check_clips(objective, clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=self.dual_clip)
        _check_temperatures(objective, tau_pos=self.tau_pos, tau_neg=self.tau_neg)
        check_number("clip_low", self.clip_low, lambda x: x <= 1, "must lie in [0, 1]")
        check_number("kl_coef", self.kl_coef, lambda x: 0 <= x < torch.inf, _NOT_NEGATIVE)
        one_of("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        _check_kl_weight(self.kl_importance_weight, self.kl_estimator)
        check_number("entropy_coef", self.entropy_coef, lambda x: 0 <= x < torch.inf, _NOT_NEGATIVE)
        check_number("distillation_coef", self.distillation_coef, lambda x: 0 <= x < torch.inf, _NOT_NEGATIVE)
        check_kind_of_divergence(
            "distillation_kind", self.distillation_kind, "distillation_beta", self.distillation_beta
        )
        if self.distillation_coef and objective is not None and objective.uses_divergence:
            raise ValueError(
                f"distillation_coef={self.distillation_coef} with algorithm={objective.name!r}, which is the "
                "divergence itself: drop one of them"
            )

    @property
    def distils(self) -> bool:
        """Whether the loss needs the divergence from a teacher, for its objective or for ``distillation_coef``."""
        is_objective = self.algorithm is not None and objective_of(self.algorithm).uses_divergence
        return is_objective or self.distillation_coef > 0


@dataclass(frozen=True)
class PolicyLoss:
    """The losses of this rank's tokens, and numbers for metrics.

    Attributes:
        per_token: the loss of each token, of the shape of the log-probs; 0 outside the response mask. float32, or
            float64 if the log-probs are.
        statistics: sums and maxima over the tokens of the mask, which can be merged over micro-batches and ranks.
    """

    per_token: Tensor
    statistics: LossStatistics


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    algorithm: str = "ppo_clip",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    tau_pos: float | None = None,
    tau_neg: float | None = None,
    weights: Tensor | None = None,
    divergence: Tensor | None = None,
    layout: SequenceLayout | None = None,
    groups: ParallelGroups | None = None,
    sequence_log_ratio: Tensor | None = None,
) -> PolicyLoss:
    """The objective of every token, times its importance weight; r = π_θ / π_old, A the advantage.

    - ``ppo_clip``: max(-A r, -A clip(r, 1 - low, 1 + high)); with ``dual_clip`` c at most -A c if A < 0. Schulman et
      al. 2017, "Proximal Policy Optimization Algorithms"; Ye et al. 2020, "Mastering Complex Control in MOBA Games with
      Deep Reinforcement Learning".
    - ``gspo``: the same with the ratio of the whole sequence, log s_t = sg[mean of log r] + log π_θ - sg[log π_θ], the
      mean over the tokens of the response mask (sg: no gradient). Zheng et al. 2025, "Group Sequence Policy
      Optimization" (GSPO-token).
    - ``cispo``: -A sg[clip(r, 1 - low, 1 + high)] log π_θ. MiniMax 2025, "MiniMax-M1".
    - ``reinforce``: -A log π_θ; π_old is measured only. Williams 1992.
    - ``dppo_tv``: -A sg[min(r, c)] log π_θ, and 0 if π_θ - π_old > high with A > 0, or < -low with A ≤ 0. The bounds
      are on a difference of probabilities; c is ``dual_clip``. Qi et al. 2026, "Rethinking the Trust Region in LLM
      Reinforcement Learning".
    - ``dppo_kl``: the same, and 0 if D(π_old ‖ π_θ) > high with A > 0 and π_θ > π_old, or > low with A ≤ 0 and
      π_θ < π_old. D is the KL of two events, this token and any other (``megatron_rc.numerics.two_point_kl``), in nats.
    - ``cppo``: -A r, and 0 if A (r - 1) > 0 and Z_t > min(δ, δ + δ_b Σ_{j<t} w_j - Σ_{j<t} Z_j), with δ = high if
      A > 0 and low if A < 0. Z_t = w_t abs(π_θ - π_old), w_t = 1 - 0.2 (t - 1)/(T - 1) for the t-th of T tokens of the
      response mask, and δ_b is the 0.9 quantile of the response's abs(π_θ - π_old), clamped to [0.02, 0.04]. Mao et al.
      2026, "Beyond Uniform Token-Level Trust Region in LLM Reinforcement Learning", with its numbers.
    - ``sapo``: -A (4/τ) sigmoid(τ (r - 1)), τ = ``tau_pos`` if A > 0, else ``tau_neg``. Gao et al. 2025, "Soft Adaptive
      Policy Optimization", which averages as ``seq-mean-token-mean``.
    - ``gmpo``: -A exp(mean of the clipped log r over the tokens of the response mask): log r is at most high if A > 0,
      at least -low if A < 0, and as it is if A = 0. The gradient of a token is as if the exponential changed by itself
      times the token's own clipped log r, so that ``seq-mean-token-mean`` gives the objective of Zhao et al. 2025,
      "Geometric-Mean Policy Optimization".
    - ``distill``: D, the ``divergence`` from a teacher; A and π_old are measured only. With the weights of the whole
      sequence or of the prefix its mean is that over sequences of π_θ (docs/mathematics.md). Agarwal et al. 2024,
      "On-Policy Distillation of Language Models".

    Args:
        log_probs: log π_θ, of the layout's local shape, nats; differentiated.
        old_log_probs: log π_old, of the same shape.
        advantages: one for each sequence, [n], or for each token, like ``log_probs``. If a shape could be both, it is
            one for each sequence.
        response_mask: bool, like ``log_probs``, True for trained tokens. Values at other positions change no bit of the
            result or the gradient.
        algorithm: see above.
        clip_low: the ratio is clipped below 1 - this. A value of 1 or more clips nothing, such as the 10 in verl's
            CISPO examples. For objectives that do not clip the ratio it is the bound ``low`` above.
        clip_high: the ratio is clipped above 1 + this. For objectives that do not clip the ratio it is the bound
            ``high`` above.
        dual_clip: c, for ``ppo_clip``, ``gspo``, ``dppo_tv`` and ``dppo_kl`` only. None: no limit for the first two, 20
            for the last two.
        tau_pos: ``sapo`` only; None: 1.
        tau_neg: ``sapo`` only; None: 1.05.
        weights: importance weights, like ``log_probs``; detached here. Default: 1.
        divergence: D of ``distill``, like ``log_probs``, nats; differentiated.
        layout: which tokens these are. Default: padded, rows of ``log_probs``. If several sequences are packed into one
            row, pass it: without it ``gspo``, ``gmpo`` and ``cppo`` take the row for one sequence.
        groups: the other ranks of ``cp`` have the other slices of the sequences; only ``gspo``, ``gmpo`` and ``cppo``
            need them. If neither groups nor layout are passed, these three take a slice for a whole sequence, and
            cannot notice that it is not.
        sequence_log_ratio: [n], the mean of log r over each whole sequence, if the caller knows it already (``gspo``).

    Collectives: none, or one SUM over ``cp``: of [2, n] for ``gmpo``, and for ``gspo`` without ``sequence_log_ratio``;
    of [2, n, tokens of the longest sequence] for ``cppo``.

    Raises:
        ValueError: an unknown algorithm; settings that are out of range or that the algorithm does not use; shapes that
            do not fit; a layout of another rank of ``cp``; or, for ``gspo``, ``gmpo`` and ``cppo`` without a layout,
            rows whose length is not that of a zigzag slice.
    """
    objective = objective_of(algorithm)
    _check_clips(objective, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    _check_temperatures(objective, tau_pos=tau_pos, tau_neg=tau_neg)
    check_tensors(
        {"weights": weights, "sequence_log_ratio": sequence_log_ratio, "divergence": divergence},
        log_probs=log_probs,
        old_log_probs=old_log_probs,
        advantages=advantages,
        response_mask=response_mask,
    )
    check_alike("log_probs", log_probs, old_log_probs=old_log_probs, response_mask=response_mask, weights=weights)
    check_mask("response_mask", response_mask)
    if objective.uses_divergence and divergence is None:
        raise ValueError(f"algorithm={algorithm!r} needs the divergence from a teacher: pass divergence=")
    check_alike("log_probs", log_probs, divergence=divergence)

    # Only objectives with sums over whole sequences need the other slices, and so a layout that fits ``cp``. For the
    # others a row may be a slice of any length.
    needs_cp = objective.by_sequence or objective.whole_sequences
    compares_with_cp = needs_cp or (layout is not None and groups is not None)
    groups = ParallelGroups.given(groups)
    layout = SequenceLayout.given(layout, "log_probs", log_probs, groups if compares_with_cp else None)
    whole = WholeSequences(response_mask, layout, layout.cp(groups.cp))

    # In bfloat16 a ratio would have errors of percents, and in float16 one of exp(20) would overflow.
    log_probs = log_probs.to(arithmetic(log_probs.dtype))
    old_log_probs = old_log_probs.detach().to(arithmetic(old_log_probs.dtype))
    # Masked positions may hold anything, NaN too.
    log_probs = torch.where(response_mask, log_probs, 0)
    old_log_probs = torch.where(response_mask, old_log_probs, 0)
    advantages = torch.where(response_mask, _per_token(advantages, layout), 0)

    token_log_ratio = log_probs - old_log_probs
    log_ratio = token_log_ratio
    if objective.by_sequence:
        if sequence_log_ratio is None:
            mean = whole.mean(token_log_ratio)
        else:
            mean = layout.expand(sequence_log_ratio.to(token_log_ratio.dtype))
        # The value is the mean over the sequence; the gradient is that of this token's log-prob.
        log_ratio = mean + (log_probs - log_probs.detach())

    from_teacher = None
    if objective.uses_divergence and divergence is not None:
        from_teacher = _masked(divergence, response_mask)
    result = objective.loss(
        TokenTerms(
            log_probs=log_probs,
            old_log_probs=old_log_probs,
            log_ratio=log_ratio,
            advantages=advantages,
            whole=whole if objective.whole_sequences else None,
            clip_low=clip_low,
            clip_high=clip_high,
            dual_clip=objective.default_dual_clip if dual_clip is None else dual_clip,
            tau_pos=tau_pos,
            tau_neg=tau_neg,
            divergence=from_teacher,
        )
    )
    loss = result.loss
    if weights is not None:
        loss = loss * torch.where(response_mask, weights.detach(), 0)
    per_token = torch.where(response_mask, loss, 0)
    return PolicyLoss(per_token, _statistics(token_log_ratio.detach(), response_mask, result))


def token_loss(
    objective: PolicyLossConfig,
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    weights: Tensor | None,
    entropy: Tensor | None,
    ref_log_probs: Tensor | None,
    divergence: Tensor | None,
    layout: SequenceLayout,
    groups: ParallelGroups,
    sequence_log_ratio: Tensor | None,
) -> PolicyLoss:
    """The complete loss of every token.

        w · (policy objective + distillation_coef · D) - entropy_coef · entropy + kl_coef · KL

    Args:
        objective: the settings.
        log_probs: log π_θ, of the layout's local shape, nats; differentiated.
        old_log_probs: log π_old, like ``log_probs``.
        rollout_log_probs: log π_rollout, like ``log_probs``; used with ``kl_importance_weight`` alone.
        advantages: [n], one a sequence, or like ``log_probs``.
        response_mask: bool, like ``log_probs``; other positions change no bit of the result or the gradient.
        weights: w, like ``log_probs``, detached; None: 1. They multiply the objective and D, not the two other terms.
        entropy: entropy of π_θ at each token, like ``log_probs``; differentiated. None without an entropy bonus.
        ref_log_probs: log π_ref, like ``log_probs``; None without a KL penalty.
        divergence: D, the divergence from a teacher, like ``log_probs``; differentiated. None without distillation.
        layout: which tokens these are.
        groups: as for :func:`policy_loss`.
        sequence_log_ratio: [n], as for :func:`policy_loss`.

    Collectives: as :func:`policy_loss`.

    Raises:
        ValueError: a tensor that a coefficient needs is missing, or has another shape.
    """
    check_tensors({"entropy": entropy, "ref_log_probs": ref_log_probs, "divergence": divergence}, log_probs=log_probs)
    check_alike("log_probs", log_probs, ref_log_probs=ref_log_probs, entropy=entropy, divergence=divergence)
    if objective.entropy_coef and entropy is None:
        raise ValueError(f"entropy_coef={objective.entropy_coef} needs the entropy: pass entropy=")
    if objective.kl_coef and ref_log_probs is None:
        raise ValueError(f"kl_coef={objective.kl_coef} needs the reference policy: pass ref_log_probs=")
    if objective.distillation_coef and divergence is None:
        raise ValueError(
            f"distillation_coef={objective.distillation_coef} needs the divergence from a teacher: pass divergence="
        )

    # Converted here, for objective and penalty together, so that their gradients are added in float32 and then rounded
    # once to the dtype of the log-probs.
    log_probs = log_probs.to(arithmetic(log_probs.dtype))
    policy = policy_loss(
        log_probs,
        old_log_probs,
        advantages,
        response_mask,
        algorithm=objective.algorithm or "ppo_clip",
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        dual_clip=objective.dual_clip,
        tau_pos=objective.tau_pos,
        tau_neg=objective.tau_neg,
        weights=weights,
        divergence=divergence,
        layout=layout,
        groups=groups,
        sequence_log_ratio=sequence_log_ratio,
    )
    per_token = policy.per_token
    statistics = policy.statistics

    if divergence is not None:
        divergence = _masked(divergence, response_mask)
        statistics = statistics.plus(divergence=divergence.double().sum())
        if objective.distillation_coef:
            weighted = divergence if weights is None else divergence * _masked(weights.detach(), response_mask)
            per_token = per_token + objective.distillation_coef * weighted

    if entropy is not None:
        entropy = _masked(entropy, response_mask)
        per_token = per_token - objective.entropy_coef * entropy
        statistics = statistics.plus(entropy=entropy.double().sum())

    if objective.kl_coef and ref_log_probs is not None:
        # Log-probs outside the mask are replaced by 0, so that the penalty is 0 there.
        masked_rollout = torch.where(response_mask, rollout_log_probs, 0) if objective.kl_importance_weight else None
        penalty = kl_penalty(
            torch.where(response_mask, log_probs, 0),
            torch.where(response_mask, ref_log_probs, 0),
            objective.kl_estimator,
            rollout_log_probs=masked_rollout,
        )
        per_token = per_token + objective.kl_coef * penalty
        statistics = statistics.plus(reference_kl=penalty.double().sum())

    return PolicyLoss(per_token, statistics)


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    """The values in float32, or float64 if they are; 0 outside the mask, whatever they are there."""
    return torch.where(mask, values.to(arithmetic(values.dtype)), 0)


def _statistics(log_ratio: Tensor, mask: Tensor, result: TokenLoss) -> LossStatistics:
    """Return the sums and maxima for the metrics of an objective.

    Args:
        log_ratio: log π_θ/π_old of each token (not the mean over its sequence), detached; 0 outside the mask.
        mask: bool, the trained tokens.
        result: the objective's result: it says which tokens its bounds have clipped.
    """
    sums = {
        "tokens": mask.sum(),
        "log_ratio": log_ratio.double().sum(),
        "abs_log_ratio": log_ratio.abs().double().sum(),
    }
    for name, clipped in (
        ("clipped_low", result.low),
        ("clipped_high", result.high),
        ("dual_clipped", result.dual),
    ):
        if clipped is not None:
            sums[name] = (mask & clipped).sum()

    # Two maxima: of log_ratio and of -log_ratio. One column of -inf is added, because amax fails on an empty shard.
    signed_log_ratios = torch.stack([log_ratio, -log_ratio])
    signed_log_ratios = torch.where(mask, signed_log_ratios, -torch.inf).flatten(1)
    column = signed_log_ratios.new_full((2, 1), -torch.inf)
    maxima = torch.cat([signed_log_ratios, column], dim=1).amax(1)
    statistics = LossStatistics.nothing(mask.device).plus(**sums)
    return LossStatistics(statistics.sums, maxima=maxima.double())


def _per_token(advantages: Tensor, layout: SequenceLayout) -> Tensor:
    """Return the advantage of each token, of the layout's local shape, from one for each sequence or for each token."""
    # A shape that fits both is read as one for each sequence, as in the correction.
    if tuple(advantages.shape) == (layout.num_sequences,):
        return layout.expand(advantages)
    if tuple(advantages.shape) != layout.shape:
        raise ValueError(
            f"advantages have shape {tuple(advantages.shape)}: expected one for each of {layout.num_sequences} "
            f"sequences, or one a token {layout.shape}"
        )
    return advantages


def _check_clips(objective: Objective | None, *, clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    """Raise ValueError for bounds that are out of range, or that the objective does not use (None: not chosen yet)."""
    if dual_clip is not None and objective is not None and not objective.takes_dual_clip:
        raise ValueError(f"dual_clip={dual_clip!r} does nothing with algorithm={objective.name!r}: drop it")
    check_number("clip_low", clip_low, lambda x: 0 <= x < torch.inf, _NOT_NEGATIVE)
    check_number("clip_high", clip_high, lambda x: 0 <= x < torch.inf, _NOT_NEGATIVE)
    if dual_clip is not None:
        check_number("dual_clip", dual_clip, lambda x: 1 < x < torch.inf, "must be above 1; leave it out for no cap")


def _check_temperatures(objective: Objective | None, *, tau_pos: float | None, tau_neg: float | None) -> None:
    """Raise ValueError for temperatures out of range, or that the objective does not use (None: not chosen yet)."""
    for name, value in (("tau_pos", tau_pos), ("tau_neg", tau_neg)):
        if value is None:
            continue
        if objective is not None and not objective.takes_temperatures:
            raise ValueError(f"{name}={value!r} does nothing with algorithm={objective.name!r}: drop it")
        check_number(name, value, lambda x: 0 < x < torch.inf, "must be positive and finite")


def _check_kl_weight(kl_importance_weight: object, kl_estimator: str) -> None:
    """Raise ValueError unless ``kl_importance_weight`` is a bool that the estimator allows to be True."""
    if not isinstance(kl_importance_weight, bool):
        raise ValueError(f"kl_importance_weight={kl_importance_weight!r} must be True or False")
    if kl_importance_weight and kl_estimator not in WEIGHTED_KL_ESTIMATORS:
        raise ValueError(
            f"kl_importance_weight=True with kl_estimator={kl_estimator!r}: its mean is not the KL, so that no weight "
            f"makes its gradient the KL's: use one of {', '.join(WEIGHTED_KL_ESTIMATORS)}, or drop the weight"
        )
