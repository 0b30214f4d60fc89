"""Command-line flags of the correction and the objective, added as in Megatron's ``extra_args_provider``."""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_rc.loss.aggregation import AGGREGATIONS
from megatron_rc.loss.kl import KL_ESTIMATORS
from megatron_rc.loss.objectives import OBJECTIVES
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.numerics import UNTRUNCATED
from megatron_rc.parallel.divergence import DIVERGENCES
from megatron_rc.settings import presets
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.consistency import OF_WEIGHTS
from megatron_rc.settings.description import flag_of
from megatron_rc.settings.dialects import DIALECTS
from megatron_rc.settings.fields import FIELDS, SWITCHES, help_of, with_default
from megatron_rc.settings.overrides import overridden, value_of

_log = logging.getLogger("megatron_rc")
_PRESET = "--rollout-correction-preset"
_FILE = "--rollout-correction-config"
_DIALECT = "--rollout-correction-dialect"
_MEGATRON_SWITCH = "--rl-inference-logprobs-is-correction"
_MEGATRON_LIMIT = "--rl-importance-sampling-truncation-coef"
# Flags of the correction that are no fields, by the name of their attribute.
_NO_FIELDS = tuple(
    option[2:].replace("-", "_") for option in (_PRESET, _FILE, _DIALECT, _MEGATRON_SWITCH, _MEGATRON_LIMIT)
)
_OTHER_BOUNDS = (
    "in dppo_tv and cppo a bound on the difference of two probabilities, in dppo_kl on a KL in nats, in gmpo on the "
    "log of the ratio,"
)
# The flag, with underscores, of each field of the objective, and its help without the default.
_LOSS_OPTIONS = {
    "algorithm": ("policy_loss", "objective of the policy; default: ppo_clip, or --loss-type in bypass mode"),
    "clip_low": (
        "grpo_clamp_eps_lower",
        f"lower clip: the objective clips the ratio below 1 minus this; {_OTHER_BOUNDS} if A < 0",
    ),
    "clip_high": (
        "grpo_clamp_eps_upper",
        f"upper clip: the objective clips the ratio above 1 plus this; {_OTHER_BOUNDS} if A > 0",
    ),
    "dual_clip": (
        "ppo_dual_clip",
        "limit of the loss at this times |A| for A < 0, above 1; in dppo_tv and dppo_kl limit of the ratio; default: "
        "none, in dppo_tv and dppo_kl 20",
    ),
    "tau_pos": ("sapo_tau_pos", "temperature of the objective sapo for A > 0; default: 1"),
    "tau_neg": ("sapo_tau_neg", "temperature of the objective sapo for A <= 0; default: 1.05"),
    "aggregation": ("loss_aggregation", "way from the tokens' losses to one number"),
    "loss_scale_factor": (
        "loss_scale_factor",
        "divisor of the aggregations token-sum and seq-mean-token-sum-norm, which need it; no default",
    ),
    "kl_coef": ("grpo_kl_beta", "weight of the KL penalty to the reference policy"),
    "kl_estimator": ("kl_estimator", "estimator of --grpo-kl-beta's KL; see docs/mathematics.md"),
    "kl_importance_weight": (
        "kl_importance_weight",
        "weight each token's KL by its ratio π_θ/π_rollout, so that its expected gradient is that of the KL; with the "
        "estimators k1, k3, k1+ and k3+",
    ),
    "entropy_coef": ("grpo_entropy_term_weight", "weight of the entropy bonus"),
    "distillation_coef": (
        "distillation_coef",
        "weight of the divergence from the teacher, which is added to the objective; the objective distill is the "
        "divergence alone",
    ),
    "distillation_kind": (
        "distillation_kind",
        "divergence from the teacher: the KL of the student from the teacher (reverse_kl), of the teacher from the "
        "student (forward_kl), or the generalised Jensen-Shannon divergence (jsd)",
    ),
    "distillation_beta": (
        "distillation_beta",
        "share of the teacher in the mixture of --distillation-kind jsd, between 0 and 1; default: 0.5",
    ),
}
_LOSS_WORDS: dict[str, dict[str, Any]] = {  # the other fields of the objective are numbers
    "algorithm": {"metavar": f"{{{','.join(OBJECTIVES)}}}"},
    "aggregation": {"choices": AGGREGATIONS},
    "kl_estimator": {"choices": KL_ESTIMATORS},
    "distillation_kind": {"choices": DIVERGENCES},
    "kl_importance_weight": {"action": argparse.BooleanOptionalAction},
}
LOSS_FLAGS = {field: flag for field, (flag, _) in _LOSS_OPTIONS.items()}


def add_rollout_correction_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add an option for each field of the config, ``--rollout-correction-preset``, ``-config`` and ``-dialect``.

    Also added: Megatron-LM's two options of importance sampling, and an option for each field of the objective, with
    Megatron-LM's name if it has one. Options that the parser has already stay. Every default is None, "not given".
    Abbreviations are switched off, because they would hide a misspelt flag. Returns the parser.
    """
    parser.allow_abbrev = False
    group = parser.add_argument_group("rollout correction")
    names = ", ".join(presets.NAMES)
    preset_help = f"preset of correction settings, which other flags override: {names}; default: none"
    _add(parser, group, _PRESET, metavar="NAME", help=preset_help)
    file_help = "YAML file of correction settings, which other flags override; default: none"
    _add(parser, group, _FILE, metavar="FILE", help=file_help)
    dialect_help = f"program whose settings {_FILE} has: {', '.join(DIALECTS)}; default: megatron_rc"
    _add(parser, group, _DIALECT, metavar="NAME", help=dialect_help)

    for field in FIELDS:
        action: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if field in SWITCHES else {}
        _add(parser, group, flag_of(field), help=help_of(field), **action)

    switch_help = (
        f"weight each token by its ratio, as Megatron-LM does, bounded by {_MEGATRON_LIMIT} alone; default: no"
    )
    _add(parser, group, _MEGATRON_SWITCH, action=argparse.BooleanOptionalAction, help=switch_help)
    limit_help = f"upper bound on the weights of {_MEGATRON_SWITCH}, a ratio; default: no bound"
    _add(parser, group, _MEGATRON_LIMIT, type=float, help=limit_help)

    loss_group = _group(parser, "loss")
    for field, (name, text) in _LOSS_OPTIONS.items():
        kind = _LOSS_WORDS.get(field, {"type": float})
        _add(parser, loss_group, flag_of(name), help=with_default(text, getattr(PolicyLossConfig, field)), **kind)
    return parser


def rollout_correction_config_from_args(
    args: argparse.Namespace, launch_file: argparse.Namespace | None = None
) -> RolloutCorrectionConfig:
    """Return the config that the flags describe: the preset or the file, overridden by every given flag.

    Settings of the preset or file that a flag makes meaningless are dropped: settings of weights with
    ``--rollout-is none``, bounds of other criteria with ``--rollout-rs``, a lower bound with a new pair, the objective
    with ``--no-bypass-mode``, normalisation without applied weights, bounds by staleness without bounds, interpolation
    in bypass mode. A flag of the correction that would do nothing is an error. An attribute that the namespace lacks
    was not given.

    Args:
        args: the flags.
        launch_file: the flags of a launch file, which ``args`` override in the same way. A preset or file of settings
            in ``args`` replaces all of its correction.

    Raises:
        ValueError: flags that contradict each other, a file that cannot be read, or a wrong field; the flag is named.
    """
    flags = _given(args)
    below = {} if launch_file is None else _given(launch_file)
    if any(flags.get(_attribute(option)) for option in (_PRESET, _FILE, _MEGATRON_SWITCH)):
        below = {}

    given = {**below, **flags}
    base = _base(given)
    if not base.rollout_is_apply:
        _warn_of_measured(given)
    fields = base.to_dict()
    for changes in (below, flags):
        fields = overridden(fields, {name: value for name, value in changes.items() if name in FIELDS})
    if fields == base.to_dict():
        return base
    with _naming(_flag_of_error):
        return RolloutCorrectionConfig(**fields, notes=base.notes)


def is_correction_flag(name: str) -> bool:
    """Return whether a flag, with underscores, is one of the correction's."""
    return name in FIELDS or name in _NO_FIELDS


def policy_loss_config_from_args(args: argparse.Namespace) -> PolicyLossConfig:
    """Return the objective that Megatron-LM's ``--grpo-*`` flags and this package's describe.

    Raises:
        ValueError: a value that the objective does not take; the flag is named.
    """
    values = {field: getattr(args, name, None) for field, name in LOSS_FLAGS.items()}
    with _naming(lambda message: flag_of(LOSS_FLAGS[message.partition("=")[0]])):
        return PolicyLossConfig(**{field: value for field, value in values.items() if value is not None})


def _group(parser: argparse.ArgumentParser, title: str) -> argparse._ArgumentGroup:
    """Return the parser's group of options with this title; a new one if there is none."""
    for group in parser._action_groups:
        if group.title == title:
            return group
    return parser.add_argument_group(title)


def _add(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup, option: str, **arguments: Any) -> None:
    """Add an option to the group, unless the parser has it already."""
    options = {text for action in parser._actions for text in action.option_strings}
    if option not in options and f"--no-{option[2:]}" not in options:
        group.add_argument(option, default=None, **arguments)


def _attribute(option: str) -> str:
    """Return the name of the attribute of an option: ``rollout_is`` for ``--rollout-is``."""
    return option[2:].replace("-", "_")


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given flags of the correction, by attribute; the text ``none`` becomes None."""
    values = {}
    for name in (*FIELDS, *_NO_FIELDS):
        value = getattr(args, name, None)
        if value is None:
            continue
        # A prefix is a text, whatever it looks like.
        if name in FIELDS and name != "metric_prefix" and isinstance(value, str):
            value = value_of(value)
        values[name] = value
    return values


def _base(given: dict[str, Any]) -> RolloutCorrectionConfig:
    """Return the config that the fields override: the preset, the file, Megatron-LM's options, or the defaults."""
    name = given.get(_attribute(_PRESET))
    path = given.get(_attribute(_FILE))
    dialect = given.get(_attribute(_DIALECT))
    if name is not None and path is not None:
        raise ValueError(f"{_PRESET} {name} and {_FILE} {path} contradict: give one of them")

    if given.get(_attribute(_MEGATRON_SWITCH)):
        return _megatron_weights(given)
    limit = given.get(_attribute(_MEGATRON_LIMIT))
    if limit is not None:
        raise ValueError(f"{_MEGATRON_LIMIT} {limit} does nothing without {_MEGATRON_SWITCH}: give both, or neither")

    if dialect is not None and path is None:
        raise ValueError(f"{_DIALECT} {dialect} does nothing without {_FILE}: give both, or neither")
    if name is not None:
        with _naming(lambda message: f"{_PRESET} {name}"):
            return RolloutCorrectionConfig.preset(name)
    if path is not None:
        return _from_file(Path(path), dialect)
    return RolloutCorrectionConfig()


def _warn_of_measured(given: dict[str, Any]) -> None:
    """Warn of given flags of weights and veto over a preset or a file that only measures both."""
    if "rollout_is_apply" in given:
        return
    names = [*OF_WEIGHTS, "rollout_is", "rollout_token_veto_threshold"]
    flags = [f"{flag_of(name)} {given[name]}" for name in FIELDS if name in names and given.get(name) is not None]
    if not flags:
        return
    name = given.get(_attribute(_PRESET))
    source = f"the file {given.get(_attribute(_FILE))}" if name is None else f"the preset {name}"
    _log.warning(
        "%s: only measured, because %s has --no-rollout-is-apply; add --rollout-is-apply", ", ".join(flags), source
    )


def _from_file(path: Path, dialect: str | None) -> RolloutCorrectionConfig:
    """Return the config of a file of settings; errors name the flag, and the dialect's flag if that may help."""
    if not path.exists() and path.stem in presets.NAMES:
        raise ValueError(f"{_FILE} {path} does not exist: give {_PRESET} {path.stem}")
    with _naming(lambda message: f"{_FILE} {path}"):
        try:
            config = RolloutCorrectionConfig.from_yaml(path, dialect)
        except ValueError as error:
            if "with dialect=" in str(error) or (dialect is None and "unknown field" in str(error)):
                raise ValueError(f"{error}; a file of another program needs {_DIALECT}") from error
            raise
    for note in config.notes:
        _log.warning("%s", note)
    return config


def _megatron_weights(given: dict[str, Any]) -> RolloutCorrectionConfig:
    """Return the config of Megatron-LM's switch: token weights, with its limit or without a bound.

    Raises:
        ValueError: a preset, a file, or a flag of a field that the switch sets, beside it.
    """
    for option in (_PRESET, _FILE, *(flag_of(field) for field in ("rollout_is", *OF_WEIGHTS))):
        if _attribute(option) in given:
            raise ValueError(f"{_MEGATRON_SWITCH} and {option} contradict: give one of them")
    limit = given.get(_attribute(_MEGATRON_LIMIT))
    with _naming(lambda message: f"{_MEGATRON_LIMIT} {limit}"):
        return RolloutCorrectionConfig.decoupled_token_is(UNTRUNCATED if limit is None else limit)


def _flag_of_error(message: str) -> str:
    """Return the flag of the field that an error of the config begins with."""
    field = message.partition("=")[0]
    return flag_of(field) if field in FIELDS else "rollout correction"


@contextlib.contextmanager
def _naming(flag: Callable[[str], str]) -> Iterator[None]:
    """Put the name of a flag in front of an error; ``flag`` finds it from the error's text."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{flag(str(error))}: {error}") from error
