"""slime's correction as this package's fields.

slime has three spellings: its built-in truncation (``tis_clip``), the weights and rejection of its example ``mis.py``
(``tis_…``, ``rs_…``), and that example's earlier names (``mis_…``). Off-policy sequence masking (``use_opsm``) goes
with each of them.
"""

from __future__ import annotations

import math
from typing import Any

from megatron_rc.numerics import UNTRUNCATED
from megatron_rc.settings.criteria import ALIASES
from megatron_rc.settings.dialects.reader import Dialect, Settings, clamped, pair, rejection

BUILT_IN: dict[str, Any] = {"tis_clip": 2.0, "tis_clip_low": 0.0}
_EXAMPLE: dict[str, Any] = {
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
}
_EARLIER: dict[str, Any] = {
    "use_mis": False,
    "mis_mode": "truncate",
    "mis_level": "token",
    "mis_lower_bound": None,
    "mis_upper_bound": 2.0,
    "mis_veto_threshold": None,
}
OF_EXAMPLES = (*_EXAMPLE, *_EARLIER)
_SPELLINGS = {
    "slime's built-in correction": BUILT_IN,
    "its example's": _EXAMPLE,
    "its example's of October and November 2025": _EARLIER,
}
_DEFAULTS: dict[str, Any] = {
    "use_tis": False,
    "use_rollout_logprobs": False,
    "use_opsm": False,
    "opsm_delta": 1e-4,
    **BUILT_IN,
    **_EXAMPLE,
    **_EARLIER,
}


def slime(settings: Settings) -> dict[str, Any]:
    """The weights and rejection of any spelling, and off-policy sequence masking."""
    used = _spelling(settings)
    own: dict[str, Any] = {"rollout_is": None}
    criteria: dict[str, tuple[float, float]] = {}
    if not settings.boolean("use_tis") and not settings.boolean("use_mis"):
        settings.drop(*used, because="slime does nothing, not even use_rs, without use_tis")
    elif used is BUILT_IN:
        own = {"rollout_is": "token", **clamped(settings, "tis_clip_low", "tis_clip")}
    elif used is _EARLIER:
        own, criteria = _weights(settings, "mis", masks_weights="use_mis" in settings.given)
        own |= settings.veto("mis_veto_threshold")
    else:
        own, criteria = _weights(settings, "tis")
        own |= _normalization(settings, own["rollout_is"])
        own |= _rejection(settings, criteria)
    chain = [(name, pair(*bounds)) for name, bounds in criteria.items()] + _opsm(settings)
    return {**own, **_mode(settings), **rejection(chain), "rejection_denominator": "original"}


def _spelling(settings: Settings) -> dict[str, Any]:
    """The settings of the spelling that was used, or else of the example; ValueError for settings of two."""
    used = {
        whose: min(settings.given & set(names)) for whose, names in _SPELLINGS.items() if settings.given & set(names)
    }
    if len(used) > 1:
        (first, one), (second, other), *_ = used.items()
        raise ValueError(f"{one} belongs to {first} and {other} to {second}: keep one of the two")
    return _SPELLINGS[next(iter(used), "its example's")]


def _weights(
    settings: Settings, prefix: str, *, masks_weights: bool = False
) -> tuple[dict[str, Any], dict[str, tuple[float, float]]]:
    """(fields of the weights, bounds of the criterion that ``mask`` means), from settings with a prefix.

    With ``masks_weights``, ``mask`` sets weights out of bounds to 0, as in October 2025, instead of rejecting.
    """
    lower, upper = f"{prefix}_lower_bound", f"{prefix}_upper_bound"
    level = settings.choice(f"{prefix}_level", tuple(ALIASES))
    mode = settings.choice(f"{prefix}_mode", ("truncate", "clip", "mask"))
    own: dict[str, Any] = {"rollout_is": level, "rollout_is_threshold": settings.positive(upper)}
    if mode == "clip" or (mode == "mask" and masks_weights):
        own["rollout_is_mode"] = "clamp" if mode == "clip" else "mask"
        bounds = settings.bounds(lower, upper)
        if settings[lower] is not None:
            own["rollout_is_threshold"] = pair(*bounds)
    elif mode == "mask":
        own["rollout_is_threshold"] = UNTRUNCATED
        settings.notes.append(
            f"{prefix}_mode='mask' keeps the weights as they are and rejects tokens or sequences out of bounds"
        )
        return own, {ALIASES[str(level)]: settings.bounds(lower, upper)}
    elif not settings.boolean("use_rs") or settings["rs_lower_bound"] is not None:
        settings.drop(lower, because="truncation has no lower bound")
    return own, {}


def _normalization(settings: Settings, level: str | None) -> dict[str, Any]:
    if not settings.boolean("tis_batch_normalize"):
        return {}
    if level == "geometric":
        raise ValueError("tis_batch_normalize=True fails in slime with tis_level='geometric': drop one of them")
    settings.notes.append("tis_batch_normalize: slime's mean is over the micro-batch, here it is over the global batch")
    return {"rollout_is_batch_normalize": True}


def _rejection(settings: Settings, criteria: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """The veto; adds to ``criteria`` the rejection by ``use_rs``, together with the one by ``tis_mode: mask``."""
    if not settings.boolean("use_rs"):
        unused = ("rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold")
        settings.drop(*unused, because="use_rs is off")
        return {}
    name = ALIASES[str(settings.choice("rs_level", tuple(ALIASES)))]
    low, high = _rs_bounds(settings)
    first = criteria.get(name, (0.0, math.inf))
    criteria[name] = max(low, first[0]), min(high, first[1])
    if not criteria[name][0] < criteria[name][1]:
        raise ValueError(f"tis_mode='mask' and use_rs together accept no ρ: {first} and {(low, high)} do not overlap")
    return settings.veto("rs_veto_threshold")


def _rs_bounds(settings: Settings) -> tuple[float, float]:
    """The bounds of the rejection; an absent one is the weights' bound."""
    top = settings.positive("tis_upper_bound")
    low, high = settings.number("rs_lower_bound"), settings["rs_upper_bound"]
    low = settings.number("tis_lower_bound") if low is None else low
    return settings.interval(
        1 / top if low is None else low,
        top if high is None else settings.positive("rs_upper_bound"),
        "rs_lower_bound",
        "rs_upper_bound",
    )


def _opsm(settings: Settings) -> list[tuple[str, str]]:
    """Off-policy sequence masking, for sequences with A < 0."""
    if not settings.boolean("use_opsm"):
        settings.drop("opsm_delta", because="use_opsm is off")
        return []
    delta = settings.number("opsm_delta")
    if delta is None or delta < 0:
        raise ValueError(f"opsm_delta={delta!r} must be a number, 0 or more")
    if not settings.boolean("use_rollout_logprobs"):
        settings.notes.append(
            "use_opsm: without use_rollout_logprobs slime compares π_θ with π_old; here opsm compares the training "
            "policy with the sampling policy"
        )
    return [("opsm", repr(delta))]


def _mode(settings: Settings) -> dict[str, Any]:
    if not settings.boolean("use_rollout_logprobs"):
        return {}
    for name in ("use_tis", "use_mis"):
        if settings.boolean(name):
            raise ValueError(f"{name}=True and use_rollout_logprobs=True contradict, also in slime: keep one of them")
    return {"bypass_mode": True}


SLIME = Dialect("slime", _DEFAULTS, slime, spelled=lambda name: name.lstrip("-").replace("-", "_"))
