"""This package's settings in the words of other programs, and the settings that these words lack.

The program's own reader reads the written settings back: a field that then differs is one that the words lack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from megatron_rc.numerics import UNTRUNCATED
from megatron_rc.parallel.arguments import one_of
from megatron_rc.settings.criteria import ALIASES
from megatron_rc.settings.criterion import Criterion
from megatron_rc.settings.dialects.nemo_rl import NEMO_RL
from megatron_rc.settings.dialects.reader import Dialect, Settings, pair
from megatron_rc.settings.dialects.slime import SLIME
from megatron_rc.settings.dialects.verl import RENAMED, VERL, VERL_2025_10, VERL_2025_11
from megatron_rc.settings.fields import CorrectionFields

_LEVELS = {name: level for level, name in ALIASES.items()}
_VERLS = {name: word for word, name in RENAMED.items()}
_DIGITS = 12  # of a bound: the precision of exp(log(1.001))


def written(config: CorrectionFields, dialect: str) -> tuple[dict[str, Any], list[str]]:
    """A program's settings for a config, and in words the fields that they lack; ValueError for an unknown dialect.

    Weights that are measured, not applied, are left out: other programs have no such switch.
    """
    one_of("dialect", dialect, tuple(_WRITERS))
    program, write = _WRITERS[dialect]
    given = {name: value for name, value in write(config).items() if name in program.defaults}
    try:
        again = _meaning(type(config)(**program.read(Settings(given, program.defaults))))
    except ValueError as problem:  # a level or a bound that the program does not take
        return {}, [str(problem)]
    meant = _meaning(config)
    # Criteria by their names, without their bounds.
    words = {name: ",".join(value) if isinstance(value, dict) else repr(value) for name, value in meant.items()}
    lost = [f"{name}={words[name]}" for name in meant if not _is_same(meant[name], again[name])]
    if again["rejection_denominator"] is None:  # the lost criteria are named already
        lost = [one for one in lost if not one.startswith("rejection_denominator")]
    return {name: value for name, value in given.items() if value != program.defaults[name] or name in _ALWAYS}, lost


# Settings whose default in Python and in the program's own file differ.
_ALWAYS = ("rollout_is", "rollout_is_threshold", "use_tis", "use_importance_sampling_correction")


def _meaning(config: CorrectionFields) -> dict[str, Any]:
    """The parts of a config that change the loss, by field."""
    weighs = _weighs(config)
    rejects = bool(config.criteria) or config.rejecting_veto is not None
    low, high = config.is_bounds
    return {
        "rollout_is": config.rollout_is if weighs else None,
        "rollout_is_mode": config.is_mode if weighs else None,
        "rollout_is_threshold": ((high,) if config.is_mode == "truncate" else (low, high)) if weighs else (),
        "rollout_is_batch_normalize": (
            config.rollout_is_batch_normalize_scope if config.rollout_is_batch_normalize and weighs else None
        ),
        "rollout_rs": {one.name: (one.lower, one.upper) for one in config.criteria},
        "rollout_token_veto_threshold": config.rejecting_veto,
        "rollout_staleness_scale": config.rollout_staleness_scale,
        "rejection_denominator": config.rejection_denominator if rejects else None,
        "bad_log_probs": config.bad_log_probs,
        "proximal_interpolation": config.proximal_interpolation,
        "bypass_mode": config.bypass_mode,
        "loss_type": config.loss_type if config.bypass_mode else None,
    }


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in one)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-8, abs_tol=1e-11)
    return bool(one == other)


def _ratios(criterion: Criterion) -> tuple[float, float]:
    """Bounds on ρ of a k1 criterion."""
    return _rounded(math.exp(criterion.lower)), _rounded(math.exp(criterion.upper))


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _weighs(config: CorrectionFields) -> bool:
    return config.rollout_is is not None and config.rollout_is_apply


def _verl(config: CorrectionFields) -> dict[str, Any]:
    if not _weighs(config):
        own: dict[str, Any] = {"rollout_is": None}
    else:
        low, high = config.is_bounds
        bounds: float | str = high if config.is_mode == "truncate" else pair(low, high)
        own = {"rollout_is": config.rollout_is, "rollout_is_threshold": bounds}
    thresholds = []
    for one in config.criteria:
        low, high = _ratios(one) if one.bounds.on_ratio else (0.0, _rounded(one.upper))
        # verl's code applies the bounds of k1 to 1/ρ.
        thresholds.append(pair(_rounded(1 / high), _rounded(1 / low)) if one.bounds.on_ratio else repr(high))
    if config.criteria:
        own |= {
            "rollout_rs": ",".join(_VERLS.get(one.name, one.name) for one in config.criteria),
            "rollout_rs_threshold": ",".join(thresholds),
        }
    return {
        **own,
        "rollout_is_batch_normalize": config.rollout_is_batch_normalize,
        "bypass_mode": config.bypass_mode,
        "loss_type": config.loss_type,
    }


def _verl_2025_11(config: CorrectionFields) -> dict[str, Any]:
    own = {name: value for name, value in _verl(config).items() if not name.startswith("rollout_rs")}
    for one in config.criteria:
        low, high = _ratios(one)
        own |= {
            "rollout_rs": _LEVELS.get(one.name, one.name),
            "rollout_rs_threshold": high,
            "rollout_rs_threshold_lower": low,
        }
    if not config.bypass_mode:
        own["loss_type"] = None
    return {**own, "rollout_token_veto_threshold": config.rejecting_veto}


def _verl_2025_10(config: CorrectionFields) -> dict[str, Any]:
    if not _weighs(config):
        return {"rollout_is": False, "rollout_is_threshold": None}
    low, high = config.is_bounds
    return {
        "rollout_is": True,
        "rollout_is_level": config.rollout_is,
        "rollout_is_mode": config.is_mode,
        "rollout_is_threshold": high,
        "rollout_is_threshold_lower": None if config.is_mode == "truncate" else low,
        "rollout_is_veto_threshold": config.rejecting_veto,
    }


def _slime(config: CorrectionFields) -> dict[str, Any]:
    own: dict[str, Any] = {"use_rollout_logprobs": config.bypass_mode}
    low, high = config.is_bounds
    rejecting = [one for one in config.criteria if one.name in _LEVELS]
    for one in config.criteria:
        if one.name == "opsm":
            own |= {"use_opsm": True, "opsm_delta": _rounded(one.upper)}
    if not _weighs(config):
        return {**own, "use_tis": False}
    if config.is_mode == "mask":  # only the earlier example has such weights
        bounds = {"mis_mode": "mask", "mis_lower_bound": low, "mis_upper_bound": high}
        veto = {"mis_veto_threshold": config.rejecting_veto}
        return {**own, "use_mis": True, "mis_level": config.rollout_is, **bounds, **veto}
    is_clamped = config.is_mode == "clamp"
    plain = not rejecting and config.rejecting_veto is None and not config.rollout_is_batch_normalize
    if config.rollout_is == "token" and plain:
        return {**own, "use_tis": True, "tis_clip": high, "tis_clip_low": low if is_clamped else 0.0}
    own |= {"use_tis": True, "tis_level": config.rollout_is, "tis_upper_bound": high}
    own |= {"tis_mode": "clip", "tis_lower_bound": low} if is_clamped else {"tis_mode": "truncate"}
    own |= {"tis_batch_normalize": config.rollout_is_batch_normalize}
    for one in rejecting:
        lower, upper = _ratios(one)
        own |= {"use_rs": True, "rs_level": _LEVELS[one.name], "rs_lower_bound": lower, "rs_upper_bound": upper}
    return {**own, "rs_veto_threshold": config.rejecting_veto}


def _nemo_rl(config: CorrectionFields) -> dict[str, Any]:
    own: dict[str, Any] = {"use_importance_sampling_correction": _weighs(config)}
    kind, least, most = "truncated_importance_sampling_type", "_ratio_min", "_ratio"
    least, most = (f"truncated_importance_sampling{end}" for end in (least, most))
    low, high = config.is_bounds
    if _weighs(config):
        own["sequence_level_importance_ratios"] = config.rollout_is == "sequence"
        if config.is_mode == "mask":
            own |= {kind: "icepop", least: low, most: high}
        elif high < UNTRUNCATED:
            own |= {kind: "tis", least: low if config.is_mode == "clamp" else None, most: high}
    for one in config.criteria:
        if one.name == "seq_mean_error":
            own["seq_logprob_error_threshold"] = _rounded(one.upper + 1)
        elif one.name == "seq_mean_k1" and _weighs(config) and high >= UNTRUNCATED:
            lower, upper = _ratios(one)
            own |= {kind: "seq-mask-tis", least: lower, most: upper}
    return own


_WRITERS: Mapping[str, tuple[Dialect, Callable[[CorrectionFields], dict[str, Any]]]] = {
    VERL.name: (VERL, _verl),
    VERL_2025_11.name: (VERL_2025_11, _verl_2025_11),
    VERL_2025_10.name: (VERL_2025_10, _verl_2025_10),
    SLIME.name: (SLIME, _slime),
    NEMO_RL.name: (NEMO_RL, _nemo_rl),
}
