"""The KL penalty of a token: how far the policy has moved from a reference policy."""

from __future__ import annotations

from torch import Tensor

from megatron_rc.numerics import exp_ratio, k2, k3
from megatron_rc.parallel.arguments import check_alike, check_tensors, one_of
from megatron_rc.parallel.softmax import arithmetic

KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+")
# Those whose mean over tokens of π_θ is the KL, so that an importance weight can make their gradient the KL's.
WEIGHTED_KL_ESTIMATORS = ("k1", "k3", "k1+", "k3+")


def kl_penalty(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    estimator: str = "k3",
    *,
    rollout_log_probs: Tensor | None = None,
) -> Tensor:
    """Estimate KL(π_θ ‖ π_ref) at each token; d = log π_θ - log π_ref. Schulman 2020, "Approximating KL Divergence".

    - ``k1``: d. Its gradient is ∇ log π_θ, which is 0 on average over tokens that π_θ sampled: it pulls nowhere.
    - ``k2``: d²/2. Its gradient d · ∇ log π_θ is on average the gradient of KL(π_θ ‖ π_ref).
    - ``k3``: exp(-d) - 1 + d. Its gradient is on average the one of the reverse, KL(π_ref ‖ π_θ). Below -20, d
      counts as -20, so that exp is finite; the gradient is 0 there.
    - ``abs``: ``|d|``. Its gradient, sign(d) · ∇ log π_θ, is on average the one of Σ ``|π_θ - π_ref|`` over the
      vocabulary.
    - ``k1+``, ``k3+``, ``abs+``: the value of k1, k3 or abs with the gradient of k2, as verl's estimators of these
      names.

    The default is k3: the penalty of GRPO (Shao et al. 2024, "DeepSeekMath"), Megatron-LM and verl. To follow
    KL(π_θ ‖ π_ref) take ``k3+``, which reports the same values. docs/mathematics.md derives the gradients.

    "On average" is over tokens of π_θ. With ``rollout_log_probs`` it is over tokens of the policy that sampled: each
    token's penalty has the importance weight r = π_θ/π_rollout, and its gradient is that of the weighted mean. Since
    ∇r = r ∇ log π_θ, and k3 + d k3/dd = exp(-d) - 1 + d + 1 - exp(-d) = d,

        E_rollout[r k3] = KL(π_θ ‖ π_ref),   ∇ E_rollout[r k3] = E_rollout[r d ∇ log π_θ] = ∇ KL(π_θ ‖ π_ref).

    So the value is r times the estimator's, and the gradient r · d · ∇ log π_θ, for all of ``k1``, ``k3``, ``k1+`` and
    ``k3+``. (Differentiating r k1 would add r ∇ log π_θ, whose mean is 0.) log r is clamped to ±20, as that of every
    ratio; no other bound is put on r. DeepSeek-AI 2025, "DeepSeek-V3.2", has this penalty with π_old in the place of
    π_rollout.

    Args:
        log_probs: log π_θ, any shape; differentiated.
        ref_log_probs: log π_ref, of the same shape, detached.
        estimator: see above.
        rollout_log_probs: log π_rollout of the tokens, of the same shape, detached. Default: no importance weight.

    Returns:
        Like ``log_probs``, float32 or wider.

    Raises:
        ValueError: another estimator, shapes that differ, or ``rollout_log_probs`` with an estimator whose mean is not
            the KL: ``k2``, ``abs`` or ``abs+``.
    """
    check_tensors({"rollout_log_probs": rollout_log_probs}, log_probs=log_probs, ref_log_probs=ref_log_probs)
    check_alike("log_probs", log_probs, ref_log_probs=ref_log_probs, rollout_log_probs=rollout_log_probs)
    one_of("estimator", estimator, KL_ESTIMATORS)
    if rollout_log_probs is not None and estimator not in WEIGHTED_KL_ESTIMATORS:
        raise ValueError(
            f"estimator={estimator!r} with rollout_log_probs: its mean is not the KL, so that no weight makes its "
            f"gradient the KL's: use one of {', '.join(WEIGHTED_KL_ESTIMATORS)}"
        )

    log_probs = log_probs.to(arithmetic(log_probs.dtype))
    difference = log_probs - ref_log_probs.detach()
    value = _value(difference, estimator.removesuffix("+"))
    if estimator.endswith("+") or rollout_log_probs is not None:
        gradient_of_k2 = k2(difference)
        value = value.detach() + (gradient_of_k2 - gradient_of_k2.detach())
    if rollout_log_probs is None:
        return value
    return exp_ratio(log_probs.detach() - rollout_log_probs.detach()) * value


def _value(difference: Tensor, estimator: str) -> Tensor:
    """The value of k1, k2, k3 or abs for d = log π_θ - log π_ref, in the graph of d."""
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return k2(difference)
    if estimator == "k3":
        # Clamped in both terms: the gradient of an unclamped second one would point away from the reference.
        return k3(-difference)
    return difference.abs()
