"""NeMo-RL's correction as this package's fields."""

from __future__ import annotations

from typing import Any

from megatron_rc.numerics import UNTRUNCATED
from megatron_rc.settings.dialects.reader import Dialect, Settings, clamped, noted, pair, rejection

_SWITCH = "use_importance_sampling_correction"
_TYPE = "truncated_importance_sampling_type"
_RATIO = "truncated_importance_sampling_ratio"
_RATIO_MIN = "truncated_importance_sampling_ratio_min"
_BY_SEQUENCE = "sequence_level_importance_ratios"
_ERROR = "seq_logprob_error_threshold"
_KL_TYPE = "reference_policy_kl_type"
# The other settings of ClippedPGLossConfig.
_BESIDE = frozenset(
    {
        "token_level_loss",
        "ratio_clip_min",
        "ratio_clip_max",
        "ratio_clip_c",
        "reference_policy_kl_penalty",
        "kl_input_clamp_value",
        "kl_output_clamp_value",
        "use_kl_in_reward",
        "use_on_policy_kl_approximation",
        "use_cispo",
        "positive_example_nll_weight",
    }
)
_DEFAULTS: dict[str, Any] = {
    _SWITCH: False,
    _TYPE: None,
    _RATIO: None,
    _RATIO_MIN: None,
    _BY_SEQUENCE: False,
    _ERROR: None,
}


def nemo_rl(settings: Settings) -> dict[str, Any]:
    """Return the fields of the weights in the clipped loss, and of the rejection of sequences before it."""
    fields = _weights(settings)
    if settings.boolean(_BY_SEQUENCE):
        settings.notes.append(
            f"{_BY_SEQUENCE}=True also selects GSPO, which is no part of the correction: add --policy-loss gspo "
            "--loss-aggregation seq-mean-token-mean"
        )
    if settings[_ERROR] is None:
        return fields

    if "rollout_rs" in fields:
        raise ValueError(
            f"{_ERROR}={settings[_ERROR]!r} removes sequences from the denominators and 'seq-mask-tis' keeps them: use "
            "one of the two"
        )
    limit = settings.positive(_ERROR)
    if limit <= 1:
        raise ValueError(f"{_ERROR}={limit!r} must be above 1, the mean of exp|log ρ| of equal policies")
    settings.notes.append(f"{_ERROR}={limit!r} bounds the mean of exp|log ρ|; seq_mean_error is that mean minus 1")
    return {**fields, **rejection([("seq_mean_error", repr(limit - 1))])}


def _weights(settings: Settings) -> dict[str, Any]:
    """Return the fields of the truncated, masked or plain weights; ``seq-mask-tis`` rejects sequences, too."""
    kind = _type(settings)
    level = "sequence" if settings.boolean(_BY_SEQUENCE) else "token"
    if not settings.boolean(_SWITCH):
        settings.drop(_RATIO_MIN, because=f"there are no weights without {_SWITCH}")
        return {"rollout_is": None}

    if kind is None:
        settings.drop(_RATIO_MIN, because=f"there is no {_RATIO}")
        return {"rollout_is": level, "rollout_is_threshold": UNTRUNCATED}
    if kind == "tis":
        return {"rollout_is": level, **clamped(settings, _RATIO_MIN, _RATIO)}

    if settings[_RATIO_MIN] is None:
        raise ValueError(f"{_RATIO_MIN} is missing: {kind!r} needs both bounds")
    bounds = pair(*settings.bounds(_RATIO_MIN, _RATIO))
    if kind == "icepop":
        return {"rollout_is": level, "rollout_is_threshold": bounds}

    if level == "sequence":
        raise ValueError(f"'seq-mask-tis' has token weights: set {_BY_SEQUENCE}=False, or another type")
    return {
        "rollout_is": "token",
        "rollout_is_threshold": UNTRUNCATED,
        **rejection([("seq_mean_k1", bounds)]),
        "rejection_denominator": "original",
    }


def _type(settings: Settings) -> str | None:
    """Return the treatment of the weights; None for weights as they are.

    Raises:
        ValueError: an unknown type, or one without weights.
    """
    kind = settings.choice(_TYPE, (None, "tis", "icepop", "seq-mask-tis"))
    if kind is None and settings[_RATIO] is not None:
        settings.notes.append(f"{_RATIO} without a type: 'tis', as in releases before the type")
        kind = "tis"
    if kind is not None and not settings.boolean(_SWITCH):
        raise ValueError(f"{_TYPE}={kind!r} needs {_SWITCH}=True: set it, or drop the type and its ratios")
    return kind


NEMO_RL = Dialect(
    name="nemo-rl",
    defaults=_DEFAULTS,
    read=nemo_rl,
    sections=("loss_fn",),
    shares_section=True,
    elsewhere={"grpo": (_ERROR,), "ppo": (_ERROR,)},
    known_beside=_BESIDE,
    beside={
        _KL_TYPE: noted("NeMo-RL's KL has the gradient of the sampling, so its k3 is --kl-estimator k3+ here"),
        "disable_ppo_ratio": noted("the loss is --policy-loss reinforce here"),
        "force_on_policy_ratio": noted(
            "π_old is π_θ, so there is one optimizer step for a rollout batch: give --grpo-iterations 1, and the "
            "responses of the whole rollout batch as --global-batch-size"
        ),
    },
)
