"""verl's three forms of the correction as this package's fields."""

from __future__ import annotations

from typing import Any

from megatron_rc.settings.bounds import ratio_bounds
from megatron_rc.settings.criteria import ALIASES, CRITERIA, criterion_names
from megatron_rc.settings.dialects.reader import Dialect, Settings, pair, rejection

_CORRECTION: dict[str, Any] = {
    "rollout_is": "sequence",
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "bypass_mode": False,
    "loss_type": "ppo_clip",
}
_CORRECTION_2025_11: dict[str, Any] = {
    **_CORRECTION,
    "rollout_rs_threshold_lower": None,
    "rollout_token_veto_threshold": None,
    "bypass_mode": None,
    "bypass_old_logprob_for_rollout": None,
    "loss_type": None,
    "use_policy_gradient": None,
    "use_pure_rollout_correction": None,
}
_CORRECTION_2025_10: dict[str, Any] = {
    "rollout_is": False,
    "rollout_is_level": "token",
    "rollout_is_mode": "truncate",
    "rollout_is_threshold": None,
    "rollout_is_threshold_lower": None,
    "rollout_is_veto_threshold": 1e-4,
}
_REJECTING = ("rollout_rs", "rollout_rs_threshold", "rollout_rs_threshold_lower", "rollout_token_veto_threshold")
_CRITERIA = (
    *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
    "binary_kl",
)
# verl's names of criteria that have another name here.
RENAMED = {"binary_kl": "token_kpop"}


def verl(settings: Settings) -> dict[str, Any]:
    """The newest form, in which bounds of k1 criteria apply to 1/ρ."""
    own = _weights(settings, pairs=True)
    own.update(_rejection(settings))
    loss = settings.choice("loss_type", ("ppo_clip", "reinforce"))
    own.update(_mode(settings, settings.boolean("bypass_mode"), loss == "reinforce"))
    if "bypass_mode" in own and "rollout_rs" in own:
        # verl counts the tokens of the global batch before its loss rejects any.
        own["rejection_denominator"] = "original"
    return _without_unused_normalization(settings, own)


def verl_2025_11(settings: Settings) -> dict[str, Any]:
    """The form of November and December 2025: bounds on ρ, a veto, and two spellings of the mode."""
    _refuse_null(settings, "rollout_is", "rollout_is_threshold")
    own = _weights(settings, pairs=False)
    bypass = _agreed(settings, "bypass_mode", "bypass_old_logprob_for_rollout")
    reinforce = _agreed(settings, "loss_type", "use_policy_gradient", "use_pure_rollout_correction")
    # loss_type came in December.
    if bypass and settings["loss_type"] is None and (not reinforce or settings["rollout_rs"] is None):
        loss = "without rollout_rs the policy-gradient loss" if reinforce else "PPO in bypass mode"
        like = f"loss_type: {'reinforce' if reinforce else 'ppo_clip'} as in 2025-12"
        settings.drop(*_REJECTING, because=f"{loss} rejected nothing in 2025-11; to reject, set {like}")
    else:
        own.update(_rejection_2025_11(settings))
    own.update(_mode(settings, bypass, reinforce))
    return _without_unused_normalization(settings, own)


def verl_2025_10(settings: Settings) -> dict[str, Any]:
    """The flat form of October 2025: rejection is a weight of 0, so that the denominators keep every token."""
    own: dict[str, Any] = {"rollout_is": None, "metric_prefix": "mismatch/", "rejection_denominator": "original"}
    level = settings.choice("rollout_is_level", ("token", "sequence", "geometric"))
    mode = settings.choice("rollout_is_mode", ("truncate", "mask", "clip"))
    rest = ("rollout_is_level", "rollout_is_mode", "rollout_is_threshold_lower", "rollout_is_veto_threshold")
    applied = settings.boolean("rollout_is")
    if settings["rollout_is_threshold"] is None:
        settings.drop("rollout_is", *rest, because="without a rollout_is_threshold verl switched everything off")
        return own
    upper = settings.positive("rollout_is_threshold")
    own |= {"rollout_is": level, **_bounds_2025_10(settings, upper, truncate=mode == "truncate")}
    own |= settings.veto("rollout_is_veto_threshold")
    return own if applied else own | {"rollout_is_apply": False}


def _bounds_2025_10(settings: Settings, upper: float, *, truncate: bool) -> dict[str, Any]:
    own: dict[str, Any] = {"rollout_is_threshold": upper}
    if truncate:
        settings.drop("rollout_is_threshold_lower", because="truncation has no lower bound; only metrics used it")
    else:
        own["rollout_is_mode"] = "mask"
        if settings["rollout_is_threshold_lower"] is not None:
            own["rollout_is_threshold"] = pair(*settings.bounds("rollout_is_threshold_lower", "rollout_is_threshold"))
    return own


def _weights(settings: Settings, *, pairs: bool) -> dict[str, Any]:
    level = settings.choice("rollout_is", (None, "token", "sequence"))
    normalize = settings.boolean("rollout_is_batch_normalize")
    if "rollout_is" not in settings.given:
        settings.notes.append("rollout_is is absent: 'sequence', verl's default in Python (its YAML file says null)")
    off = "there are no weights without rollout_is"
    if level is not None and settings["rollout_is_threshold"] is None:
        settings.notes.append(f"rollout_is={level!r} dropped: verl makes no weights without a rollout_is_threshold")
        level, off = None, "there are no weights without rollout_is_threshold"
    if level is None:
        settings.drop("rollout_is_threshold", "rollout_is_batch_normalize", because=off)
        return {"rollout_is": None}
    if not pairs:
        settings.positive("rollout_is_threshold")
    bounds = ratio_bounds("rollout_is_threshold", settings["rollout_is_threshold"])
    own = {"rollout_is": level, "rollout_is_threshold": pair(*bounds) if isinstance(bounds, tuple) else bounds}
    return {**own, "rollout_is_batch_normalize": True} if normalize else own


def _rejection(settings: Settings) -> dict[str, Any]:
    text, given = settings["rollout_rs"], settings["rollout_rs_threshold"]
    words = [word for word in map(str.strip, str(text or "").split(",")) if word]
    names = criterion_names(",".join(RENAMED.get(word, word) for word in words) if isinstance(text, str) else text)
    if not names:
        if text is not None:
            raise ValueError(f"rollout_rs={text!r} names no criterion: name one, or set it to null")
        settings.drop("rollout_rs_threshold", because="there is no criterion in rollout_rs")
        return {}
    for word in words:
        if word not in _CRITERIA:
            raise ValueError(f"rollout_rs={word!r} is unknown to verl: use {', '.join(_CRITERIA)}")
    if given is None or isinstance(given, bool) or not isinstance(given, (int, float, str)):
        raise ValueError(
            f"rollout_rs_threshold={given!r}: rollout_rs={settings['rollout_rs']!r} needs a bound or several"
        )
    bounds = [bound.strip() for bound in str(given).split(",") if bound.strip()]
    if len(bounds) not in (1, len(names)):
        raise ValueError(
            f"rollout_rs_threshold={given!r} has {len(bounds)} bounds for {len(names)} criteria: give one each"
        )
    bounds = bounds if len(bounds) == len(names) else bounds * len(names)
    return rejection([(name, _on_rho(settings, name, bound)) for name, bound in zip(names, bounds, strict=True)])


def _on_rho(settings: Settings, name: str, bound: str) -> str:
    """The bound on ρ: verl tests log lo <= -log ρ <= log hi for a k1 criterion, which is 1/hi <= ρ <= 1/lo."""
    bounds = ratio_bounds("rollout_rs_threshold", bound)
    if not CRITERIA[name].bounds.on_ratio or not isinstance(bounds, tuple):
        return bound
    inverse = pair(1 / bounds[1], 1 / bounds[0])
    if inverse == pair(*bounds):
        return inverse
    settings.notes.append(f"{name}: verl's bounds {bound} apply to 1/ρ, so they are {inverse} on ρ")
    return inverse


def _rejection_2025_11(settings: Settings) -> dict[str, Any]:
    own: dict[str, Any] = {}
    level = settings.choice("rollout_rs", (None, *ALIASES))
    if level is None:
        settings.drop("rollout_rs_threshold", "rollout_rs_threshold_lower", because="there is no rollout_rs")
    else:
        _refuse_null(settings, "rollout_rs", "rollout_rs_threshold")
        low, high = settings.bounds("rollout_rs_threshold_lower", "rollout_rs_threshold", default=2.0)
        bounds = repr(high) if settings["rollout_rs_threshold_lower"] is None else pair(low, high)
        own = rejection([(ALIASES[level], bounds)])
    return own | settings.veto("rollout_token_veto_threshold")


def _refuse_null(settings: Settings, name: str, threshold: str) -> None:
    """Refuse a threshold that is given as null; an absent one has a default."""
    if settings[name] is not None and threshold in settings.given and settings[threshold] is None:
        raise ValueError(f"{threshold}=None: {name}={settings[name]!r} needs a number: set it, or set {name} to null")


def _mode(settings: Settings, bypass: bool, reinforce: bool) -> dict[str, Any]:
    if bypass:
        return {"bypass_mode": True, "loss_type": "reinforce" if reinforce else "ppo_clip"}
    if reinforce:
        settings.notes.append("the policy-gradient loss dropped: it is an objective of bypass mode, which is off")
    return {}


def _agreed(settings: Settings, *names: str) -> bool:
    """The one answer of settings that say the same in the words of several releases; False if none is given."""
    found: dict[str, bool] = {}
    for name in names:
        if settings[name] is not None:
            words = name == "loss_type" and settings.choice(name, ("ppo_clip", "reinforce")) == "reinforce"
            found[name] = words if name == "loss_type" else settings.boolean(name)
    if len(set(found.values())) > 1:
        raise ValueError(f"{' and '.join(f'{name}={settings[name]!r}' for name in found)} contradict: keep one of them")
    return any(found.values())


def _without_unused_normalization(settings: Settings, own: dict[str, Any]) -> dict[str, Any]:
    if own.get("bypass_mode") and own["loss_type"] == "ppo_clip" and own.pop("rollout_is_batch_normalize", False):
        settings.notes.append("rollout_is_batch_normalize=True dropped: PPO in bypass mode applies no weights")
    return own


_OFF = {"rollout_is": None}
VERL = Dialect("verl", _CORRECTION, verl, ("algorithm", "rollout_correction"), switched_off=_OFF)
VERL_2025_11 = Dialect(
    "verl-2025-11", _CORRECTION_2025_11, verl_2025_11, ("algorithm", "rollout_correction"), switched_off=_OFF
)
VERL_2025_10 = Dialect("verl-2025-10", _CORRECTION_2025_10, verl_2025_10, ("algorithm",), shares_section=True)
