"""TRL's correction of vLLM's log-probs, as this package's fields.

The settings are those of ``GRPOConfig`` in TRL 1.16 (``trl/trainer/grpo_config.py``); the meaning is that of
``grpo_trainer.py``: a weight multiplies the loss of its tokens, and all completion tokens count in the denominators.
"""

from __future__ import annotations

from typing import Any

from megatron_rc.numerics import UNTRUNCATED
from megatron_rc.settings.dialects.reader import (
    NO_LOWER_BOUND,
    NO_UPPER_BOUND,
    Dialect,
    Settings,
    clamped,
    pair,
    rejection,
)

_PREFIX = "vllm_importance_sampling_"
_CORRECTION = f"{_PREFIX}correction"
_MODE = f"{_PREFIX}mode"
_MAX = f"{_PREFIX}clip_max"
_MIN = f"{_PREFIX}clip_min"
_CAP = f"{_PREFIX}cap"
_MASKING = "off_policy_mask_threshold"
_DEFAULTS: dict[str, Any] = {
    "use_vllm": False,
    _CORRECTION: True,
    _MODE: "sequence_mask",
    _MAX: 3.0,
    _MIN: None,
    _CAP: None,
    _MASKING: None,
}


def trl(settings: Settings) -> dict[str, Any]:
    """Return the fields of the weights, and of the masking of off-policy sequences."""
    fields = _weights(settings)
    if settings[_MASKING] is not None:
        settings.notes.append(
            f"{_MASKING}: TRL compares π_θ with the sampling policy in every update; here opsm compares the policy at "
            "the start of the step"
        )
        fields |= rejection([("opsm", repr(settings.not_negative(_MASKING)))])
        # TRL multiplies the loss by the mask, and divides by the tokens of all sequences.
        fields["rejection_denominator"] = "original"
    return fields


def _weights(settings: Settings) -> dict[str, Any]:
    """Return the fields of the weights of one of the four modes."""
    modes = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    mode = str(settings.choice(_MODE, modes))
    reason = _reason_for_no_weights(settings)
    if reason is not None:
        settings.drop(_MODE, _MAX, _MIN, _CAP, because=reason)
        return {"rollout_is": None}
    if _MODE not in settings.given:
        settings.notes.append(f"{_MODE} is absent: {mode!r}, TRL's default since 0.26 (before: 'token_truncate')")

    upper_name = _MAX
    if settings[_CAP] is not None:
        settings.drop(_MAX, because=f"{_CAP} takes its place")
        upper_name = _CAP
    level, _, treatment = mode.partition("_")
    lower = settings.number(_MIN)
    upper = settings.number(upper_name)
    if lower is not None and upper is not None and lower >= upper:
        raise ValueError(f"{_MIN}={lower:g} must be less than {upper_name}={upper:g}")

    if lower is None and upper is None:
        if treatment == "truncate":
            raise ValueError(f"{_MODE}={mode!r} needs a bound: set {_MAX} or {_MIN}")
        return {"rollout_is": level, "rollout_is_threshold": UNTRUNCATED}
    if treatment == "truncate" and upper is not None:
        return {"rollout_is": level, **clamped(settings, _MIN, upper_name)}

    # In TRL an absent bound is no bound; here a lone bound u with these modes would mean [1/u, u].
    lower, upper = settings.interval(
        NO_LOWER_BOUND if lower is None else lower,
        NO_UPPER_BOUND if upper is None else settings.positive(upper_name),
        _MIN,
        upper_name,
    )
    return {
        "rollout_is": level,
        "rollout_is_threshold": pair(lower, upper),
        "rollout_is_mode": "mask" if treatment == "mask" else "clamp",
    }


def _reason_for_no_weights(settings: Settings) -> str | None:
    """Return why TRL makes no weights; None if it makes them.

    Without vLLM it makes none. Settings that do not say ``use_vllm`` at all are a part of a file, and read as with it.
    """
    if not settings.boolean(_CORRECTION):
        return f"there are no weights with {_CORRECTION}=False"
    if settings.boolean("use_vllm"):
        return None
    if "use_vllm" in settings.given:
        return "there are no weights with use_vllm=False"
    settings.notes.append("use_vllm is absent: read as true, since without vLLM there is nothing to correct")
    return None


def _loss_type(name: str, value: object) -> None:
    """Raise ValueError for the loss that does not multiply by the weights."""
    if value == "vespo":
        raise ValueError(f"{name}={value!r} puts the weights inside its φ, which is not here: use another loss_type")


TRL = Dialect(
    name="trl",
    defaults=_DEFAULTS,
    read=trl,
    shares_section=True,
    reserved_prefixes=(_PREFIX, "off_policy_mask"),
    beside={"loss_type": _loss_type},
    common_names=frozenset({"use_vllm"}),
)
