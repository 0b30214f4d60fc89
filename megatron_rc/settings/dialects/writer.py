"""Write a correction's settings as the settings of another program, and name the ones that the program cannot express.

A *writer*, such as :func:`_nemo_rl`, writes what fits and ignores the rest. :func:`written` then reads the result back
with the program's reader: every field that differs is one that the program's settings cannot express.
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

_LEVEL_OF_CRITERION = {name: level for level, name in ALIASES.items()}
_VERL_NAME = {name: word for word, name in RENAMED.items()}
# Settings that are written even if they have the default of the program's code: its configuration file has another one.
_WRITTEN_ALWAYS = ("rollout_is", "rollout_is_threshold", "use_tis", "use_importance_sampling_correction")
_DIGITS = 12  # significant digits of a written bound, so that exp(log(1.001)) is written as 1.001


def written(config: CorrectionFields, dialect: str) -> tuple[dict[str, Any], list[str]]:
    """Return another program's settings for a config, and ``field=value`` of each field that they cannot express.

    Weights that are measured, not applied, are left out: other programs have no such switch. If the program's reader
    refuses the settings, they are {}, and the list has its message.

    Raises:
        ValueError: an unknown dialect, or one that is only read.
    """
    one_of("dialect", dialect, tuple(_WRITERS))
    program, write = _WRITERS[dialect]
    settings = {name: value for name, value in write(config).items() if name in program.defaults}
    try:
        read_again = type(config)(**program.read(Settings(settings, program.defaults)))
    except ValueError as problem:
        # For example a level or a bound that the program does not take.
        return {}, [str(problem)]

    lost = _differences(_meaning(config), _meaning(read_again))
    settings = {
        name: value for name, value in settings.items() if value != program.defaults[name] or name in _WRITTEN_ALWAYS
    }
    return settings, lost


def _meaning(config: CorrectionFields) -> dict[str, Any]:
    """Return the fields of a config that change the loss; fields without an effect are None, to compare as equal."""
    has_weights = _has_weights(config)
    rejects = bool(config.criteria) or config.rejecting_veto is not None
    bounds = config.weight_bounds
    # Truncated weights have an upper bound alone.
    thresholds = bounds.upper if bounds.mode == "truncate" else (bounds.lower, bounds.upper)
    return {
        "rollout_is": config.rollout_is if has_weights else None,
        "rollout_is_mode": bounds.mode if has_weights else None,
        "rollout_is_threshold": thresholds if has_weights else None,
        "rollout_is_batch_normalize": (
            config.rollout_is_batch_normalize_scope if has_weights and config.rollout_is_batch_normalize else None
        ),
        "rollout_rs": {criterion.name: (criterion.lower, criterion.upper) for criterion in config.criteria},
        "rollout_token_veto_threshold": config.rejecting_veto,
        "rollout_staleness_scale": config.rollout_staleness_scale,
        "rejection_denominator": config.rejection_denominator if rejects else None,
        "bad_log_probs": config.bad_log_probs,
        "proximal_interpolation": config.proximal_interpolation,
        "bypass_mode": config.bypass_mode,
        "loss_type": config.loss_type if config.bypass_mode else None,
    }


def _differences(wanted: Mapping[str, Any], read_again: Mapping[str, Any]) -> list[str]:
    """Return ``field=value`` of each field that differs in ``read_again``; criteria are named without their bounds."""
    lost = []
    for name, value in wanted.items():
        if _is_same(value, read_again[name]):
            continue
        # None says that nothing rejects in ``read_again``: the lost criteria are named, and there is no denominator.
        if name == "rejection_denominator" and read_again[name] is None:
            continue
        lost.append(f"{name}={','.join(value) if isinstance(value, dict) else repr(value)}")
    return lost


def _is_same(value: Any, other: Any) -> bool:
    """Return True if two values of a field are equal; bounds may differ by rounding."""
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_is_same(value[name], other[name]) for name in value)
    if isinstance(value, tuple) and isinstance(other, tuple):
        return len(value) == len(other) and all(map(_is_same, value, other))
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=1e-8, abs_tol=1e-11)
    return bool(value == other)


def _has_weights(config: CorrectionFields) -> bool:
    """Return True if the config has weights that are applied, not only measured."""
    return config.rollout_is is not None and config.rollout_is_apply


def _ratios(criterion: Criterion) -> tuple[float, float]:
    """Return the bounds of a k1 criterion, which are on log ρ, as bounds on ρ."""
    return _rounded(math.exp(criterion.lower)), _rounded(math.exp(criterion.upper))


def _rounded(value: float) -> float:
    """Return a bound without the rounding error of exp and log."""
    return float(f"{value:.{_DIGITS}g}")


def _verl(config: CorrectionFields) -> dict[str, Any]:
    """Return the settings of verl of 2026, ``algorithm.rollout_correction``."""
    settings: dict[str, Any] = {"rollout_is": None}
    if _has_weights(config):
        bounds = config.weight_bounds
        settings["rollout_is"] = config.rollout_is
        settings["rollout_is_threshold"] = (
            bounds.upper if bounds.mode == "truncate" else pair(bounds.lower, bounds.upper)
        )

    thresholds = []
    for criterion in config.criteria:
        if criterion.bounds.on_ratio:
            lower, upper = _ratios(criterion)
            # verl applies these bounds to 1/ρ, so that the lower one becomes 1/upper, and the upper one 1/lower.
            thresholds.append(pair(_rounded(1 / upper), _rounded(1 / lower)))
        else:
            thresholds.append(repr(_rounded(criterion.upper)))
    if config.criteria:
        names = [_VERL_NAME.get(criterion.name, criterion.name) for criterion in config.criteria]
        settings["rollout_rs"] = ",".join(names)
        settings["rollout_rs_threshold"] = ",".join(thresholds)

    settings["rollout_is_batch_normalize"] = config.rollout_is_batch_normalize
    settings["bypass_mode"] = config.bypass_mode
    settings["loss_type"] = config.loss_type
    return settings


def _verl_2025_11(config: CorrectionFields) -> dict[str, Any]:
    """Return the settings of verl of November 2025: those of 2026, with other ones for rejection, and a veto."""
    settings = {name: value for name, value in _verl(config).items() if not name.startswith("rollout_rs")}
    for criterion in config.criteria:
        lower, upper = _ratios(criterion)
        settings["rollout_rs"] = _LEVEL_OF_CRITERION.get(criterion.name, criterion.name)
        settings["rollout_rs_threshold"] = upper
        settings["rollout_rs_threshold_lower"] = lower
    if not config.bypass_mode:
        settings["loss_type"] = None
    settings["rollout_token_veto_threshold"] = config.rejecting_veto
    return settings


def _verl_2025_10(config: CorrectionFields) -> dict[str, Any]:
    """Return the settings of verl of October 2025."""
    if not _has_weights(config):
        return {"rollout_is": False, "rollout_is_threshold": None}
    bounds = config.weight_bounds
    return {
        "rollout_is": True,
        "rollout_is_level": config.rollout_is,
        "rollout_is_mode": bounds.mode,
        "rollout_is_threshold": bounds.upper,
        "rollout_is_threshold_lower": None if bounds.mode == "truncate" else bounds.lower,
        "rollout_is_veto_threshold": config.rejecting_veto,
    }


def _slime(config: CorrectionFields) -> dict[str, Any]:
    """Return slime's arguments: its built-in ones if they suffice, else the names of one of its examples."""
    settings: dict[str, Any] = {"use_rollout_logprobs": config.bypass_mode}
    for criterion in config.criteria:
        if criterion.name == "opsm":
            settings["use_opsm"] = True
            settings["opsm_delta"] = -criterion.lower
    if not _has_weights(config):
        settings["use_tis"] = False
        return settings

    bounds = config.weight_bounds
    if bounds.mode == "mask":
        # Only slime's example of October and November 2025 can set weights outside the bounds to 0.
        settings["use_mis"] = True
        settings["mis_mode"] = "mask"
        settings["mis_level"] = config.rollout_is
        settings["mis_lower_bound"] = bounds.lower
        settings["mis_upper_bound"] = bounds.upper
        settings["mis_veto_threshold"] = config.rejecting_veto
        return settings

    settings["use_tis"] = True
    criteria_with_level = [criterion for criterion in config.criteria if criterion.name in _LEVEL_OF_CRITERION]
    rejects_nothing = not criteria_with_level and config.rejecting_veto is None
    if config.rollout_is == "token" and rejects_nothing and not config.rollout_is_batch_normalize:
        # The built-in correction suffices.
        settings["tis_clip"] = bounds.upper
        settings["tis_clip_low"] = bounds.lower if bounds.mode == "clamp" else 0.0
        return settings

    settings["tis_level"] = config.rollout_is
    settings["tis_upper_bound"] = bounds.upper
    settings["tis_batch_normalize"] = config.rollout_is_batch_normalize
    settings["rs_veto_threshold"] = config.rejecting_veto
    if bounds.mode == "clamp":
        settings["tis_mode"] = "clip"
        settings["tis_lower_bound"] = bounds.lower
    for criterion in criteria_with_level:
        lower, upper = _ratios(criterion)
        settings["use_rs"] = True
        settings["rs_level"] = _LEVEL_OF_CRITERION[criterion.name]
        settings["rs_lower_bound"] = lower
        settings["rs_upper_bound"] = upper
    return settings


def _nemo_rl(config: CorrectionFields) -> dict[str, Any]:
    """Return the settings of NeMo-RL's ``loss_fn``.

    ``truncated_importance_sampling_type`` says what is done beyond the two bounds ``…_ratio_min`` and ``…_ratio``:
    ``tis`` truncates or clamps the weights, ``icepop`` sets them to 0, and ``seq-mask-tis`` rejects the sequence and
    leaves the weights as they are.
    """
    has_weights = _has_weights(config)
    bounds = config.weight_bounds
    is_truncated = bounds.upper < UNTRUNCATED

    settings: dict[str, Any] = {"use_importance_sampling_correction": has_weights}
    if has_weights:
        settings["sequence_level_importance_ratios"] = config.rollout_is == "sequence"
        if bounds.mode == "mask":
            settings["truncated_importance_sampling_type"] = "icepop"
            settings["truncated_importance_sampling_ratio_min"] = bounds.lower
            settings["truncated_importance_sampling_ratio"] = bounds.upper
        elif is_truncated:
            settings["truncated_importance_sampling_type"] = "tis"
            settings["truncated_importance_sampling_ratio_min"] = bounds.lower if bounds.mode == "clamp" else None
            settings["truncated_importance_sampling_ratio"] = bounds.upper

    for criterion in config.criteria:
        if criterion.name == "seq_mean_error":
            # The criterion bounds the mean of exp|log ρ| - 1, NeMo-RL the mean of exp|log ρ|.
            settings["seq_logprob_error_threshold"] = _rounded(criterion.upper + 1)
        elif criterion.name == "seq_mean_k1" and has_weights and not is_truncated:
            # There is one type, and truncated weights take it: only without them can it be the rejection's.
            lower, upper = _ratios(criterion)
            settings["truncated_importance_sampling_type"] = "seq-mask-tis"
            settings["truncated_importance_sampling_ratio_min"] = lower
            settings["truncated_importance_sampling_ratio"] = upper
    return settings


# By the name of the dialect: the description of the program's settings, and their writer.
_WRITERS: Mapping[str, tuple[Dialect, Callable[[CorrectionFields], dict[str, Any]]]] = {
    VERL.name: (VERL, _verl),
    VERL_2025_11.name: (VERL_2025_11, _verl_2025_11),
    VERL_2025_10.name: (VERL_2025_10, _verl_2025_10),
    SLIME.name: (SLIME, _slime),
    NEMO_RL.name: (NEMO_RL, _nemo_rl),
}
