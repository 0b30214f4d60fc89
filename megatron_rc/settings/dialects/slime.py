"""slime's correction as this package's fields.

slime has three spellings: its built-in truncation (``tis_clip``), the weights and rejection of its example ``mis.py``
(``tis_…``, ``rs_…``), and that example's earlier names (``mis_…``). Off-policy sequence masking (``use_opsm``) goes
with each of them.
"""

from __future__ import annotations

from typing import Any

from megatron_rc.numerics import UNTRUNCATED
from megatron_rc.settings.criteria import ALIASES
from megatron_rc.settings.dialects.reader import Dialect, Settings, clamped, noted, pair, rejection

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
_FUNCTION = "custom_tis_function_path"
_DEFAULTS: dict[str, Any] = {
    "use_tis": False,
    _FUNCTION: None,
    "use_rollout_logprobs": False,
    "use_opsm": False,
    "opsm_delta": 1e-4,
    **BUILT_IN,
    **_EXAMPLE,
    **_EARLIER,
}
# Bounds (lower, upper) on ρ, by the name of the criterion that they belong to.
_Bounds = dict[str, tuple[float, float]]


def slime(settings: Settings) -> dict[str, Any]:
    """Return the fields of the weights and the rejection of any spelling, and of off-policy sequence masking."""
    function = _function(settings)
    spelling = _spelling(settings)
    fields: dict[str, Any] = {"rollout_is": None}
    bounds: _Bounds = {}
    if not settings.boolean("use_tis") and not settings.boolean("use_mis"):
        settings.drop(*spelling, because="slime does nothing, not even use_rs, without use_tis")
    elif function == "icepop":
        bounds_of_weights = settings.interval(
            settings.not_negative("tis_clip_low"), settings.positive("tis_clip"), "tis_clip_low", "tis_clip"
        )
        fields = {
            "rollout_is": "token",
            "rollout_is_threshold": pair(*bounds_of_weights),
            "rollout_is_mode": "mask",
        }
    elif spelling is BUILT_IN:
        fields = {"rollout_is": "token", **clamped(settings, "tis_clip_low", "tis_clip")}
    elif spelling is _EARLIER:
        fields, bounds = _weights(settings, "mis", masks_weights="use_mis" in settings.given)
        fields |= settings.veto("mis_veto_threshold")
    else:
        fields, bounds = _weights(settings, "tis", masks_weights=False)
        fields |= _normalization(settings, level=fields["rollout_is"])
        veto, bounds = _rejection(settings, bounds)
        fields |= veto

    criteria = [(name, pair(lower, upper)) for name, (lower, upper) in bounds.items()]
    criteria += _off_policy_masking(settings)
    # slime divides by the tokens that trained before rejection.
    return {**fields, **_mode(settings), **rejection(criteria), "rejection_denominator": "original"}


def _function(settings: Settings) -> str | None:
    """Return "icepop" for slime's second built-in function; None for its first, its example's, and this package's.

    Raises:
        ValueError: another function, whose weights no setting tells.
    """
    path = settings[_FUNCTION]
    if path is None:
        return None
    name = str(path).rpartition(".")[2]
    if name == "icepop_function":
        return "icepop"
    if name in ("vanilla_tis_function", "compute_mis_weights_with_cp") or path == "megatron_rc.adaptors.slime.correct":
        return None
    raise ValueError(f"{_FUNCTION}={path!r} is not known: its weights are in its code, give this package's fields")


def _spelling(settings: Settings) -> dict[str, Any]:
    """Return the settings of the spelling that was used, or of the example if none was.

    Raises:
        ValueError: settings of two spellings.
    """
    used = {whose: settings.given & spelling.keys() for whose, spelling in _SPELLINGS.items()}
    used = {whose: names for whose, names in used.items() if names}
    if len(used) > 1:
        first, second, *_ = used
        raise ValueError(
            f"{min(used[first])} belongs to {first} and {min(used[second])} to {second}: keep one of the two"
        )
    return _SPELLINGS[next(iter(used))] if used else _EXAMPLE


def _weights(settings: Settings, prefix: str, *, masks_weights: bool) -> tuple[dict[str, Any], _Bounds]:
    """Return the fields of the weights, and the bounds of the criterion that the mode ``mask`` means.

    Args:
        settings: the user's settings.
        prefix: beginning of their names: ``tis`` or ``mis``.
        masks_weights: True: ``mask`` sets weights out of bounds to 0, as in October 2025, instead of rejecting.
    """
    lower_name = f"{prefix}_lower_bound"
    upper_name = f"{prefix}_upper_bound"
    level = str(settings.choice(f"{prefix}_level", tuple(ALIASES)))
    mode = settings.choice(f"{prefix}_mode", ("truncate", "clip", "mask"))

    if mode == "mask" and not masks_weights:
        settings.positive(upper_name)
        settings.notes.append(
            f"{prefix}_mode='mask' keeps the weights as they are and rejects tokens or sequences out of bounds"
        )
        fields = {"rollout_is": level, "rollout_is_threshold": UNTRUNCATED}
        return fields, {ALIASES[level]: settings.bounds(lower_name, upper_name)}

    fields = {"rollout_is": level, "rollout_is_threshold": settings.positive(upper_name)}
    if mode == "truncate":
        # With use_rs, an absent bound of the rejection is this one.
        is_bound_of_rejection = settings.boolean("use_rs") and settings["rs_lower_bound"] is None
        if not is_bound_of_rejection:
            settings.drop(lower_name, because="truncation has no lower bound")
        return fields, {}

    fields["rollout_is_mode"] = "clamp" if mode == "clip" else "mask"
    bounds = settings.bounds(lower_name, upper_name)
    if settings[lower_name] is not None:
        fields["rollout_is_threshold"] = pair(*bounds)
    return fields, {}


def _normalization(settings: Settings, *, level: str) -> dict[str, Any]:
    """Return the field of the weights' normalisation; none without it."""
    if not settings.boolean("tis_batch_normalize"):
        return {}
    if level == "geometric":
        raise ValueError("tis_batch_normalize=True fails in slime with tis_level='geometric': drop one of them")
    settings.notes.append("tis_batch_normalize: slime's mean is over the micro-batch, here it is over the global batch")
    return {"rollout_is_batch_normalize": True}


def _rejection(settings: Settings, mask_bounds: _Bounds) -> tuple[dict[str, Any], _Bounds]:
    """Return the field of the veto, and the bounds of all criteria.

    Args:
        settings: the user's settings.
        mask_bounds: bounds of the criterion that ``tis_mode: mask`` means. If ``use_rs`` has the same criterion, a
            ratio must lie in both intervals.

    Raises:
        ValueError: the two intervals do not overlap.
    """
    if not settings.boolean("use_rs"):
        settings.drop("rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold", because="use_rs is off")
        return {}, mask_bounds

    name = ALIASES[str(settings.choice("rs_level", tuple(ALIASES)))]
    lower, upper = _rs_bounds(settings)
    if name in mask_bounds:
        mask_lower, mask_upper = mask_bounds[name]
        if not max(lower, mask_lower) < min(upper, mask_upper):
            raise ValueError(
                f"tis_mode='mask' and use_rs together accept no ρ: {mask_bounds[name]} and {(lower, upper)} do not "
                "overlap"
            )
        lower = max(lower, mask_lower)
        upper = min(upper, mask_upper)
    return settings.veto("rs_veto_threshold"), {**mask_bounds, name: (lower, upper)}


def _rs_bounds(settings: Settings) -> tuple[float, float]:
    """Return the bounds of the rejection; an absent one is the weights' bound."""
    weights_upper = settings.positive("tis_upper_bound")
    lower = settings.number("rs_lower_bound")
    if lower is None:
        lower = settings.number("tis_lower_bound")
    if lower is None:
        lower = 1 / weights_upper
    upper = weights_upper if settings["rs_upper_bound"] is None else settings.positive("rs_upper_bound")
    return settings.interval(lower, upper, "rs_lower_bound", "rs_upper_bound")


def _off_policy_masking(settings: Settings) -> list[tuple[str, str]]:
    """Return [("opsm", the bound)], or [] without ``use_opsm``; add notes where slime differs.

    The criterion rejects sequences with A < 0 whose mean of -log ρ is above the bound.
    """
    if not settings.boolean("use_opsm"):
        settings.drop("opsm_delta", because="use_opsm is off")
        return []
    delta = settings.not_negative("opsm_delta")
    if not settings.boolean("use_rollout_logprobs"):
        settings.notes.append(
            "use_opsm: without use_rollout_logprobs slime compares π_θ with π_old; here opsm compares the training "
            "policy with the sampling policy"
        )
    return [("opsm", repr(delta))]


def _mode(settings: Settings) -> dict[str, Any]:
    """Return the field of bypass mode; none in decoupled mode."""
    if not settings.boolean("use_rollout_logprobs"):
        return {}
    for name in ("use_tis", "use_mis"):
        if settings.boolean(name):
            raise ValueError(f"{name}=True and use_rollout_logprobs=True contradict, also in slime: keep one of them")
    return {"bypass_mode": True}


def _trust_region(name: str, value: object) -> None:
    """Raise ValueError for a trust region of a variant of slime's example, unless it is off."""
    if value is not None:
        raise ValueError(
            f"{name}={value!r} is no setting of slime, but of a variant of its example, which rejects sequences by "
            "their largest or mean divergence: give this package's rollout_rs and rollout_rs_threshold"
        )


def _unused_without_trust_region(name: str, value: object) -> None:
    """Return no note: the bound of ``rs_trust_region`` does nothing without it."""


SLIME = Dialect(
    name="slime",
    defaults=_DEFAULTS,
    read=slime,
    spelled=lambda name: name.lstrip("-").replace("-", "_"),
    shares_section=True,
    reserved_prefixes=("tis_", "rs_", "mis_", "use_tis", "use_rs", "use_mis", "opsm_"),
    beside={
        "kl_loss_type": noted("slime's low_var_kl is --kl-estimator k3 here; its default is k1"),
        "use_unbiased_kl": noted("--kl-importance-weight, with π_θ/π_rollout in place of π_θ/π_old"),
        "custom_loss_function_path": noted("with --loss-type custom_loss this function is the whole loss"),
        "rs_trust_region": _trust_region,
        "rs_tr_threshold": _unused_without_trust_region,
    },
)
