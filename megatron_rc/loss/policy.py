"""The policy loss of every token, the KL penalty, and their settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.loss.aggregation import check_aggregation
from megatron_rc.loss.metrics import LossStatistics
from megatron_rc.loss.objective import Objective, TokenLoss, TokenTerms
from megatron_rc.loss.objectives import objective_of
from megatron_rc.numerics import check_mask, k2, k3
from megatron_rc.parallel.arguments import check_alike, check_number, check_tensors, one_of
from megatron_rc.parallel.groups import ParallelGroups
from megatron_rc.parallel.layout import SequenceLayout
from megatron_rc.parallel.softmax import arithmetic
from megatron_rc.parallel.whole import WholeSequences

KL_ESTIMATORS = ("k1", "k2", "k3", "k1+", "k3+")
_NOT_NEGATIVE = "must be 0 or more, and finite"


@dataclass(frozen=True)
class PolicyLossConfig:
    """The objective that is trained on, and how its tokens become one loss.

    Attributes:
        algorithm: one of the objectives of :func:`policy_loss`; None: ``ppo_clip``, or in bypass mode the correction's
            ``loss_type``.
        clip_low: the lower bound. The ratio is clipped below 1 - this; in ``dppo_tv``, ``dppo_kl``, ``cppo`` and
            ``gmpo`` it is a bound of another kind (see :func:`policy_loss`).
        clip_high: the upper bound: above 1 + this, or of the other kind.
        dual_clip: c > 1: the loss of a token with A < 0 is at most ``c·|A|``; None: no such cap. In ``dppo_tv`` and
            ``dppo_kl`` the ratio is at most c; None: 20.
        aggregation: how the per-token loss becomes one number: ``token-mean``, ``token-sum``, ``seq-mean-token-sum``,
            ``seq-mean-token-mean`` or ``seq-mean-token-sum-norm``.
        loss_scale_factor: the divisor of ``token-sum`` and ``seq-mean-token-sum-norm``, which alone need it.
        kl_coef: weight of the KL penalty to the reference policy, per token.
        kl_estimator: ``k1``, ``k2``, ``k3``, ``k1+`` or ``k3+`` (see :func:`kl_penalty`).
        entropy_coef: weight of the entropy bonus, per token.
        tau_pos: temperature of ``sapo`` for A > 0; None: 1.
        tau_neg: temperature of ``sapo`` for A ≤ 0; None: 1.05.

    Raises:
        ValueError: at construction: names the field and the value.
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

    def __post_init__(self) -> None:
        objective = None if self.algorithm is None else objective_of(self.algorithm)
        check_aggregation(self.aggregation, self.loss_scale_factor)
        _check_clips(objective, self.clip_low, self.clip_high, self.dual_clip)
        _check_temperatures(objective, tau_pos=self.tau_pos, tau_neg=self.tau_neg)
        check_number("clip_low", self.clip_low, lambda x: x <= 1, "must lie in [0, 1]")
        check_number("kl_coef", self.kl_coef, lambda x: 0 <= x < torch.inf, _NOT_NEGATIVE)
        one_of("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        check_number("entropy_coef", self.entropy_coef, lambda x: 0 <= x < torch.inf, _NOT_NEGATIVE)


@dataclass(frozen=True)
class PolicyLoss:
    """``per_token`` is like the log-probs, 0 at masked positions; ``statistics`` merge over micro-batches and ranks.

    ``per_token`` is float32 or wider, whatever the dtype of the log-probs.
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
      π_θ < π_old. D is the KL of two events, this token and any other (:func:`.two_point_kl`), in nats.
    - ``cppo``: -A r, and 0 if A (r - 1) > 0 and Z_t > min(δ, δ + δ_b Σ_{j<t} w_j - Σ_{j<t} Z_j), with δ = high if
      A > 0 and low if A < 0. Z_t = w_t |π_θ - π_old|, w_t = 1 - 0.2 (t - 1)/(T - 1) for the t-th of T tokens of the
      response mask, and δ_b is the 0.9 quantile of the response's |π_θ - π_old|, clamped to [0.02, 0.04]. Mao et al.
      2026, "Beyond Uniform Token-Level Trust Region in LLM Reinforcement Learning", with its numbers.
    - ``sapo``: -A (4/τ) sigmoid(τ (r - 1)), τ = ``tau_pos`` if A > 0, else ``tau_neg``. Gao et al. 2025, "Soft Adaptive
      Policy Optimization", which averages as ``seq-mean-token-mean``.
    - ``gmpo``: -A exp(mean of the clipped log r over the tokens of the response mask): log r is at most high if A > 0,
      at least -low if A < 0, and as it is if A = 0. The gradient of a token is as if the exponential changed by itself
      times the token's own clipped log r, so that ``seq-mean-token-mean`` gives the objective of Zhao et al. 2025,
      "Geometric-Mean Policy Optimization".

    Args:
        log_probs: log π_θ, of the layout's local shape, nats; differentiated.
        old_log_probs: log π_old, of the same shape.
        advantages: [n], one a sequence, or like ``log_probs``; of a shape that is both, one a sequence.
        response_mask: bool, like ``log_probs``; other positions change no bit of the result or the gradient.
        algorithm: see above.
        clip_low: the ratio is clipped below 1 - this; 1 and more clip nothing, as the 10 of verl's CISPO examples. The
            bound ``low`` of the other objectives.
        clip_high: the ratio is clipped above 1 + this. The bound ``high`` of the other objectives.
        dual_clip: c, or None; ``ppo_clip``, ``gspo``, ``dppo_tv`` and ``dppo_kl`` only. None: no cap, in the last two
            20.
        tau_pos: ``sapo`` only; None: 1.
        tau_neg: ``sapo`` only; None: 1.05.
        weights: like ``log_probs``, detached; default 1.
        layout: which tokens these are. Default: padded, rows of ``log_probs``. Sequences that are packed into one row
            need it, or ``gspo``, ``gmpo`` and ``cppo`` take all of them for one sequence.
        groups: ``cp`` holds the other slices of the sequences; ``gspo``, ``gmpo`` and ``cppo`` alone need it. Without
            it, and without a layout, they take a slice for the whole sequence: nothing says that it is none.
        sequence_log_ratio: [n], the mean of log r over each whole sequence, if it is known already (``gspo``).

    Collectives: none, or one SUM over ``cp``: of [2, n] for ``gmpo``, and for ``gspo`` without ``sequence_log_ratio``;
    of [2, n, tokens of the longest sequence] for ``cppo``.

    Raises:
        ValueError: an unknown algorithm, settings that cannot be or that the algorithm does not use, shapes that do not
            fit, a layout of another rank of ``cp``, or for ``gspo``, ``gmpo`` and ``cppo`` rows that are no slices of
            as many ranks as ``cp`` has.
    """
    objective = objective_of(algorithm)
    _check_clips(objective, clip_low, clip_high, dual_clip)
    _check_temperatures(objective, tau_pos=tau_pos, tau_neg=tau_neg)
    like = {"old_log_probs": old_log_probs, "response_mask": response_mask}
    optional: dict[str, object] = {"weights": weights, "sequence_log_ratio": sequence_log_ratio}
    check_tensors(optional, log_probs=log_probs, advantages=advantages, **like)
    check_alike("log_probs", log_probs, **like, weights=weights)
    check_mask("response_mask", response_mask)
    given, groups = groups, ParallelGroups.given(groups)
    # Only sums over cp need its slices: the other objectives take a layout alone, and rows are slices of any length.
    compared = objective.by_sequence or objective.whole_sequences or (layout is not None and given is not None)
    layout = SequenceLayout.given(layout, "log_probs", log_probs, groups if compared else None)
    # A ratio in bfloat16 is wrong by percents, and one of exp(20) no number of float16.
    log_probs, old_log_probs = (each.to(arithmetic(each.dtype)) for each in (log_probs, old_log_probs.detach()))
    log_probs, old_log_probs = (torch.where(response_mask, each, 0) for each in (log_probs, old_log_probs))
    log_ratio = log_probs - old_log_probs
    measured, whole = log_ratio.detach(), WholeSequences(response_mask, layout, layout.cp(groups.cp))
    if objective.by_sequence:
        known = sequence_log_ratio
        mean = whole.mean(measured) if known is None else layout.expand(known.to(measured.dtype))
        log_ratio = mean + (log_probs - log_probs.detach())
    terms = TokenTerms(
        log_probs,
        old_log_probs,
        log_ratio,
        advantages=torch.where(response_mask, _per_token(advantages, layout), 0),
        whole=whole if objective.whole_sequences else None,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=objective.default_dual_clip if dual_clip is None else dual_clip,
        tau_pos=tau_pos,
        tau_neg=tau_neg,
    )
    found = objective.loss(terms)
    loss = found.loss if weights is None else found.loss * torch.where(response_mask, weights.detach(), 0)
    return PolicyLoss(torch.where(response_mask, loss, 0), _measure(measured, response_mask, found))


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, estimator: str = "k3") -> Tensor:
    """Estimate KL(π_θ ‖ π_ref) at each token; d = log π_θ - log π_ref. Schulman 2020, "Approximating KL Divergence".

    - ``k1``: d. Its gradient is ∇ log π_θ, which is 0 on average over tokens that π_θ sampled: it pulls nowhere.
    - ``k2``: d²/2. Its gradient d · ∇ log π_θ is on average the gradient of KL(π_θ ‖ π_ref).
    - ``k3``: exp(-d) - 1 + d. Its gradient is on average the one of the reverse, KL(π_ref ‖ π_θ). Below -20, d
      counts as -20, so that exp is finite; the gradient is 0 there.
    - ``k1+``, ``k3+``: the value of k1 or k3 with the gradient of k2, as verl's estimators of these names.

    The default is k3: the penalty of GRPO (Shao et al. 2024, "DeepSeekMath"), Megatron-LM and verl. To follow
    KL(π_θ ‖ π_ref) take ``k3+``, which reports the same values. docs/mathematics.md derives the gradients.

    Args:
        log_probs: log π_θ, any shape; differentiated.
        ref_log_probs: log π_ref, of the same shape, detached.
        estimator: see above.

    Raises:
        ValueError: another estimator, or shapes that differ.
    """
    check_tensors({}, log_probs=log_probs, ref_log_probs=ref_log_probs)
    check_alike("log_probs", log_probs, ref_log_probs=ref_log_probs)
    one_of("estimator", estimator, KL_ESTIMATORS)
    difference = log_probs.to(arithmetic(log_probs.dtype)) - ref_log_probs.detach()
    # k3 is clamped in both terms: the gradient of an unclamped second one would point away from the reference.
    values: dict[str, Callable[[Tensor], Tensor]] = {"k1": lambda d: d, "k2": k2, "k3": lambda d: k3(-d)}
    value = values[estimator.removesuffix("+")](difference)
    if not estimator.endswith("+"):
        return value
    gradient = k2(difference)
    return value.detach() + (gradient - gradient.detach())


def _check_clips(objective: Objective | None, clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    if dual_clip is not None and objective is not None and not objective.takes_dual_clip:
        raise ValueError(f"dual_clip={dual_clip!r} does nothing with algorithm={objective.name!r}: drop it")
    check_number("clip_low", clip_low, lambda x: 0 <= x < torch.inf, _NOT_NEGATIVE)
    check_number("clip_high", clip_high, lambda x: 0 <= x < torch.inf, _NOT_NEGATIVE)
    if dual_clip is not None:
        check_number("dual_clip", dual_clip, lambda x: 1 < x < torch.inf, "must be above 1; leave it out for no cap")


def _check_temperatures(objective: Objective | None, **given: float | None) -> None:
    for name, value in given.items():
        if value is None:
            continue
        if objective is not None and not objective.takes_temperatures:
            raise ValueError(f"{name}={value!r} does nothing with algorithm={objective.name!r}: drop it")
        check_number(name, value, lambda x: 0 < x < torch.inf, "must be positive and finite")


def _measure(log_ratio: Tensor, mask: Tensor, found: TokenLoss) -> LossStatistics:
    sums = {
        "tokens": mask.sum(),
        "log_ratio": log_ratio.double().sum(),
        "abs_log_ratio": log_ratio.abs().double().sum(),
    }
    flags = {"clipped_low": found.low, "clipped_high": found.high, "dual_clipped": found.dual}
    sums |= {name: (mask & flag).sum() for name, flag in flags.items() if flag is not None}
    both = torch.where(mask, torch.stack([log_ratio, -log_ratio]), -torch.inf).flatten(1)
    # A shard may be empty, and amax has no value for that.
    maxima = torch.cat([both, both.new_full((2, 1), -torch.inf)], dim=1).amax(1).double()
    return LossStatistics(LossStatistics.nothing(mask.device).plus(**sums).sums, maxima)


def _per_token(advantages: Tensor, layout: SequenceLayout) -> Tensor:
    # If both shapes are the same, they are one a sequence, as in the correction.
    if tuple(advantages.shape) == (layout.num_sequences,):
        return layout.expand(advantages)
    if tuple(advantages.shape) != layout.shape:
        raise ValueError(
            f"advantages have shape {tuple(advantages.shape)}: expected one for each of {layout.num_sequences} "
            f"sequences, or one a token {layout.shape}"
        )
    return advantages
