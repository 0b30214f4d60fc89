"""NeMo-RL's correction as this package's fields."""

from __future__ import annotations

from typing import Any

from megatron_rc.numerics import UNTRUNCATED
from megatron_rc.settings.dialects.reader import Dialect, Settings, clamped, pair, rejection

_DEFAULTS: dict[str, Any] = {
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_type": None,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "sequence_level_importance_ratios": False,
    "seq_logprob_error_threshold": None,
}
_RATIO, _RATIO_MIN = "truncated_importance_sampling_ratio", "truncated_importance_sampling_ratio_min"
_ERROR = "seq_logprob_error_threshold"


def nemo_rl(settings: Settings) -> dict[str, Any]:
    """The weights of the clipped loss, and the rejection of sequences before it."""
    own = _weights(settings)
    if settings[_ERROR] is None:
        return own
    if "rollout_rs" in own:
        raise ValueError(
            f"{_ERROR}={settings[_ERROR]!r} removes sequences from the denominators and 'seq-mask-tis' keeps them: use "
            "one of the two"
        )
    limit = settings.positive(_ERROR)
    if limit <= 1:
        raise ValueError(f"{_ERROR}={limit!r} must be above 1, the mean of exp|log ρ| of equal policies")
    settings.notes.append(f"{_ERROR}={limit!r} bounds the mean of exp|log ρ|; seq_mean_error is that mean minus 1")
    return {**own, **rejection([("seq_mean_error", repr(limit - 1))])}


def _weights(settings: Settings) -> dict[str, Any]:
    """The truncated, masked or plain weights of NeMo-RL's clipped loss."""
    kind = _type(settings)
    level = "sequence" if settings.boolean("sequence_level_importance_ratios") else "token"
    if not settings.boolean("use_importance_sampling_correction"):
        settings.drop(_RATIO_MIN, because="there are no weights without use_importance_sampling_correction")
        return {"rollout_is": None}
    if kind is None:
        settings.drop(_RATIO_MIN, because="there is no truncated_importance_sampling_ratio")
        return {"rollout_is": level, "rollout_is_threshold": UNTRUNCATED}
    if kind == "tis":
        return {"rollout_is": level, **clamped(settings, _RATIO_MIN, _RATIO)}
    if settings[_RATIO_MIN] is None:
        raise ValueError(f"{_RATIO_MIN} is missing: {kind!r} needs both bounds")
    bounds = pair(*settings.bounds(_RATIO_MIN, _RATIO))
    if kind == "icepop":
        return {"rollout_is": level, "rollout_is_threshold": bounds}
    if level == "sequence":
        raise ValueError(
            "'seq-mask-tis' has token weights: set sequence_level_importance_ratios=False, or another type"
        )
    return {
        "rollout_is": "token",
        "rollout_is_threshold": UNTRUNCATED,
        **rejection([("seq_mean_k1", bounds)]),
        "rejection_denominator": "original",
    }


def _type(settings: Settings) -> str | None:
    kind = settings.choice("truncated_importance_sampling_type", (None, "tis", "icepop", "seq-mask-tis"))
    if kind is None and settings[_RATIO] is not None:
        settings.notes.append(f"{_RATIO} without a type: 'tis', as in releases before the type")
        kind = "tis"
    if kind is not None and not settings.boolean("use_importance_sampling_correction"):
        raise ValueError(
            f"truncated_importance_sampling_type={kind!r} needs use_importance_sampling_correction=True: set it, or "
            "drop the type and its ratios"
        )
    return kind


NEMO_RL = Dialect(
    "nemo-rl",
    _DEFAULTS,
    nemo_rl,
    sections=("loss_fn",),
    shares_section=True,
    elsewhere={"grpo": (_ERROR,), "ppo": (_ERROR,)},
)
