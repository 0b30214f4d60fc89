"""slime's and NeMo-RL's corrections, in our fields."""

from __future__ import annotations

import math
from typing import Any

from megatron_rc.settings.criteria import ALIASES
from megatron_rc.settings.dialects.reader import Settings, pair, rejection

# The argument of exp is clamped at 20, so no weight lies above this: truncation here is no truncation.
UNTRUNCATED = math.exp(20)

_SLIME: dict[str, Any] = {
    "use_tis": False,
    "tis_mode": "truncate",
    "tis_level": "token",
    "tis_lower_bound": None,
    "tis_upper_bound": 2.0,
    "tis_batch_normalize": False,
    "use_rs": False,
    "rs_level": "token",
    "rs_lower_bound": None,
    "rs_upper_bound": None,
    "rs_veto_threshold": None,
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
}
_NEMO_RL: dict[str, Any] = {
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_type": None,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "sequence_level_importance_ratios": False,
}
DEFAULTS = {"slime": _SLIME, "nemo-rl": _NEMO_RL}
_BUILT_IN = ("tis_clip", "tis_clip_low")
_RATIO, _RATIO_MIN = "truncated_importance_sampling_ratio", "truncated_importance_sampling_ratio_min"


def slime(settings: Settings) -> dict[str, Any]:
    """The truncation that slime has built in (``tis_clip``), or the weights and rejection of its example ``mis.py``."""
    helper = [name for name in _SLIME if name not in ("use_tis", *_BUILT_IN)]
    if not settings.boolean("use_tis"):
        settings.drop(*helper, *_BUILT_IN, because="slime does nothing, not even use_rs, without use_tis")
        return {"rollout_is": None, "rejection_denominator": "original"}
    built_in = settings.given & set(_BUILT_IN)
    if built_in and settings.given & set(helper):
        other = min(settings.given & set(helper))
        raise ValueError(
            f"{min(built_in)} belongs to slime's built-in correction and {other} to its example's: keep one of the two"
        )
    own = {"rollout_is": "token", **_clamp(settings, "tis_clip_low", "tis_clip")} if built_in else _slime_mis(settings)
    return {**own, "rejection_denominator": "original"}


def _slime_mis(settings: Settings) -> dict[str, Any]:
    level = settings.choice("tis_level", tuple(ALIASES))
    mode = settings.choice("tis_mode", ("truncate", "clip", "mask"))
    own: dict[str, Any] = {"rollout_is": level, "rollout_is_threshold": settings.positive("tis_upper_bound")}
    criteria: dict[str, tuple[float, float]] = {}
    if mode == "clip":
        own["rollout_is_mode"] = "clamp"
        bounds = settings.bounds("tis_lower_bound", "tis_upper_bound")
        if settings["tis_lower_bound"] is not None:
            own["rollout_is_threshold"] = pair(*bounds)
    elif mode == "mask":
        own["rollout_is_threshold"] = UNTRUNCATED
        settings.notes.append("tis_mode='mask' leaves the weights as they are and rejects what lies out of bounds")
        criteria[ALIASES[str(level)]] = settings.bounds("tis_lower_bound", "tis_upper_bound")
    elif not settings.boolean("use_rs") or settings["rs_lower_bound"] is not None:
        settings.drop("tis_lower_bound", because="truncation has no lower bound")
    own.update(_slime_normalization(settings, level))
    return {**own, **_slime_rejection(settings, criteria)}


def _slime_normalization(settings: Settings, level: str | None) -> dict[str, Any]:
    if not settings.boolean("tis_batch_normalize"):
        return {}
    if level == "geometric":
        raise ValueError("tis_batch_normalize=True fails in slime with tis_level='geometric': drop one of them")
    settings.notes.append("tis_batch_normalize: slime's mean is over the micro-batch, here it is over the global batch")
    return {"rollout_is_batch_normalize": True}


def _slime_rejection(settings: Settings, criteria: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """The chain of what ``tis_mode: mask`` and ``use_rs`` reject, and the veto."""
    own: dict[str, Any] = {}
    if settings.boolean("use_rs"):
        name = ALIASES[str(settings.choice("rs_level", tuple(ALIASES)))]
        low, high = _slime_rs_bounds(settings)
        first = criteria.get(name, (0.0, math.inf))
        criteria[name] = max(low, first[0]), min(high, first[1])
        if not criteria[name][0] < criteria[name][1]:
            raise ValueError(
                f"tis_mode='mask' and use_rs together accept no ρ: {first} and {(low, high)} do not overlap"
            )
        if settings["rs_veto_threshold"] is not None:
            own["rollout_token_veto_threshold"] = settings.positive("rs_veto_threshold")
    else:
        unused = ("rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold")
        settings.drop(*unused, because="use_rs is off")
    return {**own, **rejection([(name, pair(*bounds)) for name, bounds in criteria.items()])}


def _slime_rs_bounds(settings: Settings) -> tuple[float, float]:
    """The bounds of the rejection; where one is absent, that of the weights."""
    top = settings.positive("tis_upper_bound")
    low, high = settings.number("rs_lower_bound"), settings["rs_upper_bound"]
    low = settings.number("tis_lower_bound") if low is None else low
    return settings.interval(
        1 / top if low is None else low,
        top if high is None else settings.positive("rs_upper_bound"),
        "rs_lower_bound",
        "rs_upper_bound",
    )


def nemo_rl(settings: Settings) -> dict[str, Any]:
    """The truncated, masked or plain weights of NeMo-RL's clipped loss."""
    kind = _nemo_rl_type(settings)
    level = "sequence" if settings.boolean("sequence_level_importance_ratios") else "token"
    if not settings.boolean("use_importance_sampling_correction"):
        settings.drop(_RATIO_MIN, because="there are no weights without use_importance_sampling_correction")
        return {"rollout_is": None}
    if kind is None:
        settings.drop(_RATIO_MIN, because="there is no truncated_importance_sampling_ratio")
        return {"rollout_is": level, "rollout_is_threshold": UNTRUNCATED}
    if kind == "tis":
        return {"rollout_is": level, **_clamp(settings, _RATIO_MIN, _RATIO)}
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


def _nemo_rl_type(settings: Settings) -> str | None:
    kind = settings.choice("truncated_importance_sampling_type", (None, "tis", "icepop", "seq-mask-tis"))
    if kind is None and settings[_RATIO] is not None:
        settings.notes.append(f"{_RATIO} without a type: 'tis', as before there were types")
        kind = "tis"
    if kind is not None and not settings.boolean("use_importance_sampling_correction"):
        raise ValueError(
            f"truncated_importance_sampling_type={kind!r} needs use_importance_sampling_correction=True: set it, or "
            "drop the type and its ratios"
        )
    return kind


def _clamp(settings: Settings, lower: str, upper: str) -> dict[str, Any]:
    """Weights clamped between two settings; a lower one of 0, or none, is truncation."""
    low = settings.number(lower)
    if low is None or low <= 0:
        return {"rollout_is_threshold": settings.positive(upper)}
    return {"rollout_is_threshold": pair(*settings.bounds(lower, upper)), "rollout_is_mode": "clamp"}
