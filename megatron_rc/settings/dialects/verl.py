"""verl's three forms of the correction as this package's fields."""

from __future__ import annotations

from typing import Any

from megatron_rc.settings import presets
from megatron_rc.settings.bounds import read_bounds
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
    # No setting of verl's: the name of one of its presets, which were constructors.
    "preset": None,
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
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
    "binary_kl",
)
# verl's names of criteria that have another name here.
RENAMED = {"binary_kl": "token_kpop"}


def verl(settings: Settings) -> dict[str, Any]:
    """Return the fields of the newest form, in which bounds of k1 criteria apply to 1/ρ."""
    fields = _weights(settings, takes_pairs=True)
    fields |= _rejection(settings)
    loss = settings.choice("loss_type", ("ppo_clip", "reinforce"))
    fields |= _mode(settings, bypass=settings.boolean("bypass_mode"), reinforce=loss == "reinforce")
    if "bypass_mode" in fields and "rollout_rs" in fields:
        # verl counts the tokens of the global batch before its loss rejects any.
        fields["rejection_denominator"] = "original"
    return _without_unused_normalization(settings, fields)


def verl_2025_11(settings: Settings) -> dict[str, Any]:
    """Return the fields of the form of November and December 2025: bounds on ρ, a veto, two spellings of the mode."""
    if settings["preset"] is not None:
        return _preset_2025_11(settings)

    _refuse_null(settings, "rollout_is", "rollout_is_threshold")
    fields = _weights(settings, takes_pairs=False)
    bypass = _agreed(settings, "bypass_mode", "bypass_old_logprob_for_rollout")
    reinforce = _agreed(settings, "loss_type", "use_policy_gradient", "use_pure_rollout_correction")

    # loss_type came in December. Before, PPO in bypass mode rejected nothing, nor did REINFORCE without rollout_rs.
    is_of_november = bypass and settings["loss_type"] is None
    if is_of_november and (not reinforce or settings["rollout_rs"] is None):
        loss = "without rollout_rs the policy-gradient loss" if reinforce else "PPO in bypass mode"
        remedy = f"set loss_type: {'reinforce' if reinforce else 'ppo_clip'} as in 2025-12"
        settings.drop(*_REJECTING, because=f"{loss} rejected nothing in 2025-11; to reject, {remedy}")
    else:
        fields |= _rejection_2025_11(settings)

    fields |= _mode(settings, bypass=bypass, reinforce=reinforce)
    return _without_unused_normalization(settings, fields)


def verl_2025_10(settings: Settings) -> dict[str, Any]:
    """Return the fields of the flat form of October 2025.

    Rejection is a weight of 0 there, so that the denominators keep every token.
    """
    fields: dict[str, Any] = {"rollout_is": None, "metric_prefix": "mismatch/", "rejection_denominator": "original"}
    level = settings.choice("rollout_is_level", ("token", "sequence", "geometric"))
    mode = settings.choice("rollout_is_mode", ("truncate", "mask", "clip"))
    is_applied = settings.boolean("rollout_is")
    if settings["rollout_is_threshold"] is None:
        settings.drop(
            "rollout_is",
            "rollout_is_level",
            "rollout_is_mode",
            "rollout_is_threshold_lower",
            "rollout_is_veto_threshold",
            because="without a rollout_is_threshold verl switched everything off",
        )
        return fields

    fields["rollout_is"] = level
    fields["rollout_is_threshold"] = settings.positive("rollout_is_threshold")
    if mode == "truncate":
        settings.drop("rollout_is_threshold_lower", because="truncation has no lower bound; only metrics used it")
    else:
        fields["rollout_is_mode"] = "mask"
        if settings["rollout_is_threshold_lower"] is not None:
            bounds = settings.bounds("rollout_is_threshold_lower", "rollout_is_threshold")
            fields["rollout_is_threshold"] = pair(*bounds)

    fields |= settings.veto("rollout_is_veto_threshold")
    if not is_applied:
        fields["rollout_is_apply"] = False
    return fields


def _weights(settings: Settings, *, takes_pairs: bool) -> dict[str, Any]:
    """Return the fields of the weights of the forms since November 2025; ``takes_pairs``: "0.5_5.0" is a threshold."""
    level = settings.choice("rollout_is", (None, "token", "sequence"))
    normalize = settings.boolean("rollout_is_batch_normalize")
    if "rollout_is" not in settings.given:
        settings.notes.append("rollout_is is absent: 'sequence', verl's default in Python (its YAML file says null)")

    reason = "there are no weights without rollout_is"
    if level is not None and settings["rollout_is_threshold"] is None:
        settings.notes.append(f"rollout_is={level!r} dropped: verl makes no weights without a rollout_is_threshold")
        reason = "there are no weights without rollout_is_threshold"
        level = None
    if level is None:
        settings.drop("rollout_is_threshold", "rollout_is_batch_normalize", because=reason)
        return {"rollout_is": None}

    if not takes_pairs:
        settings.positive("rollout_is_threshold")
    lower, upper = read_bounds("rollout_is_threshold", settings["rollout_is_threshold"])
    fields = {"rollout_is": level, "rollout_is_threshold": upper if lower is None else pair(lower, upper)}
    if normalize:
        fields["rollout_is_batch_normalize"] = True
    return fields


def _rejection(settings: Settings) -> dict[str, Any]:
    """Return the fields of the newest form's criteria: a comma list, with one bound or one for each."""
    text = settings["rollout_rs"]
    if text is None:
        settings.drop("rollout_rs_threshold", because="there is no criterion in rollout_rs")
        return {}
    names = _criteria_of(text)

    threshold = settings["rollout_rs_threshold"]
    if threshold is None or isinstance(threshold, bool) or not isinstance(threshold, (int, float, str)):
        raise ValueError(f"rollout_rs_threshold={threshold!r}: rollout_rs={text!r} needs a bound or several")
    bounds = [bound.strip() for bound in str(threshold).split(",") if bound.strip()]
    if len(bounds) not in (1, len(names)):
        raise ValueError(
            f"rollout_rs_threshold={threshold!r} has {len(bounds)} bounds for {len(names)} criteria: give one each"
        )
    if len(bounds) == 1:
        bounds = bounds * len(names)
    return rejection([(name, _on_rho(settings, name, bound)) for name, bound in zip(names, bounds, strict=True)])


def _criteria_of(text: object) -> list[str]:
    """Return this package's names of the criteria in verl's comma list; ValueError for one that verl does not have."""
    if not isinstance(text, str):
        raise ValueError(f"rollout_rs={text!r} must be a comma list of criteria, for example 'token_k1,seq_mean_k3'")
    verl_names = [part.strip() for part in text.split(",") if part.strip()]
    if not verl_names:
        raise ValueError(f"rollout_rs={text!r} names no criterion: name one, or set it to null")
    for name in verl_names:
        if name not in _CRITERIA:
            raise ValueError(f"rollout_rs={name!r} is unknown to verl: use {', '.join(_CRITERIA)}")
    return criterion_names(",".join(RENAMED.get(name, name) for name in verl_names))


def _on_rho(settings: Settings, name: str, bound: str) -> str:
    """Return the bound on ρ: verl tests log lo <= -log ρ <= log hi for a k1 criterion, which is 1/hi <= ρ <= 1/lo."""
    lower, upper = read_bounds("rollout_rs_threshold", bound)
    if not CRITERIA[name].bounds.on_ratio or lower is None:
        return bound
    inverse = pair(1 / upper, 1 / lower)
    if inverse != pair(lower, upper):
        settings.notes.append(f"{name}: verl's bounds {bound} apply to 1/ρ, so they are {inverse} on ρ")
    return inverse


def _rejection_2025_11(settings: Settings) -> dict[str, Any]:
    """Return the fields of the one criterion of November 2025, a level, and of the veto."""
    fields: dict[str, Any] = {}
    level = settings.choice("rollout_rs", (None, *ALIASES))
    if level is None:
        settings.drop("rollout_rs_threshold", "rollout_rs_threshold_lower", because="there is no rollout_rs")
    else:
        _refuse_null(settings, "rollout_rs", "rollout_rs_threshold")
        settings.default("rollout_rs_threshold", 2.0)
        lower, upper = settings.bounds("rollout_rs_threshold_lower", "rollout_rs_threshold")
        bound = repr(upper) if settings["rollout_rs_threshold_lower"] is None else pair(lower, upper)
        fields = rejection([(ALIASES[level], bound)])
    return fields | settings.veto("rollout_token_veto_threshold")


def _preset_2025_11(settings: Settings) -> dict[str, Any]:
    """Return the fields of a preset with the numbers of November and December 2025, where they were others.

    Raises:
        ValueError: an unknown preset, or another setting beside it.
    """
    name = settings["preset"]
    fields = presets.fields_of(name)
    for setting in sorted(settings.given - {"preset"}):
        raise ValueError(f"{setting}={settings[setting]!r} contradicts preset={name!r}: give the preset alone")

    if name == "seq_mis":
        # Long sequences that are unlikely under the trainer were accepted.
        return fields | {"rollout_rs_threshold": "1e-300_2.0"}
    preset = presets.ALIASES.get(name, name)
    if preset == "bypass_ppo_clip":
        # It measured weights, and applied none.
        return fields | {"rollout_is": "token", "rollout_is_threshold": 2.0}
    if preset in _GEOMETRIC_2025_11:
        bound = fields["rollout_rs_threshold"] if name == "geo_mis" else 1.001
        return fields | {"rollout_rs_threshold": bound, "rollout_token_veto_threshold": 1e-4}
    return fields


# Presets that rejected unless the geometric mean of ρ was in [1/1.001, 1.001], with a veto.
_GEOMETRIC_2025_11 = (
    "decoupled_geo_rs",
    "decoupled_geo_rs_seq_tis",
    "bypass_ppo_clip_geo_rs",
    "bypass_pg_geo_rs",
    "bypass_pg_geo_rs_seq_tis",
)


def _refuse_null(settings: Settings, name: str, threshold: str) -> None:
    """Raise ValueError for a threshold that is given as null; an absent one has a default."""
    if settings[name] is not None and threshold in settings.given and settings[threshold] is None:
        raise ValueError(f"{threshold}=None: {name}={settings[name]!r} needs a number: set it, or set {name} to null")


def _mode(settings: Settings, *, bypass: bool, reinforce: bool) -> dict[str, Any]:
    """Return the fields of bypass mode and its objective; none in decoupled mode."""
    if bypass:
        return {"bypass_mode": True, "loss_type": "reinforce" if reinforce else "ppo_clip"}
    if reinforce:
        settings.notes.append("the policy-gradient loss dropped: it is an objective of bypass mode, which is off")
    return {}


def _agreed(settings: Settings, *names: str) -> bool:
    """Return the one answer of settings that say the same in the words of several releases; False if none is given.

    ``loss_type`` says yes with ``reinforce``.

    Raises:
        ValueError: two settings contradict each other.
    """
    answers: dict[str, bool] = {}
    for name in names:
        if settings[name] is None:
            continue
        if name == "loss_type":
            answers[name] = settings.choice(name, ("ppo_clip", "reinforce")) == "reinforce"
        else:
            answers[name] = settings.boolean(name)
    if len(set(answers.values())) > 1:
        contradiction = " and ".join(f"{name}={settings[name]!r}" for name in answers)
        raise ValueError(f"{contradiction} contradict: keep one of them")
    return any(answers.values())


def _without_unused_normalization(settings: Settings, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields without the normalisation of weights that PPO in bypass mode does not apply."""
    is_bypass_ppo = fields.get("bypass_mode") and fields["loss_type"] == "ppo_clip"
    if not is_bypass_ppo or "rollout_is_batch_normalize" not in fields:
        return fields
    settings.notes.append("rollout_is_batch_normalize=True dropped: PPO in bypass mode applies no weights")
    return {name: value for name, value in fields.items() if name != "rollout_is_batch_normalize"}


def _truncation_of_2025_08(name: str, value: object) -> None:
    """Raise ValueError for the cap on token weights of August and September 2025, unless it is off (-1)."""
    if value is None or (isinstance(value, (int, float)) and value <= 0):
        return
    raise ValueError(
        f"{name}={value!r} truncates token weights: give rollout_is: token, rollout_is_threshold: {value!r} "
        f"(--rollout-is token --rollout-is-threshold {value!r})"
    )


_OFF = {"rollout_is": None}
# verl removed this setting of its actor in the commit that added ``rollout_is``: no release has both.
_BESIDE = {"tis_imp_ratio_cap": _truncation_of_2025_08}
VERL = Dialect(
    name="verl",
    defaults=_CORRECTION,
    read=verl,
    sections=("algorithm", "rollout_correction"),
    switched_off=_OFF,
    needed=frozenset({"rollout_is"}),
    beside=_BESIDE,
    common_names=frozenset({"loss_type"}),
)
VERL_2025_11 = Dialect(
    name="verl-2025-11",
    defaults=_CORRECTION_2025_11,
    read=verl_2025_11,
    sections=("algorithm", "rollout_correction"),
    switched_off=_OFF,
    needed=frozenset({"rollout_is"}),
    beside=_BESIDE,
    common_names=frozenset({"loss_type", "preset"}),
)
VERL_2025_10 = Dialect(
    name="verl-2025-10",
    defaults=_CORRECTION_2025_10,
    read=verl_2025_10,
    sections=("algorithm",),
    shares_section=True,
    beside=_BESIDE,
)
