"""The correction and the objective as command-line flags, in the shape of Megatron's ``extra_args_provider``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TypeVar

from megatron_rc.loss.aggregation import AGGREGATIONS
from megatron_rc.loss.objectives import OBJECTIVES
from megatron_rc.loss.policy import KL_ESTIMATORS, PolicyLossConfig
from megatron_rc.numerics import UNTRUNCATED
from megatron_rc.settings.config import RolloutCorrectionConfig, preset
from megatron_rc.settings.criteria import CRITERIA
from megatron_rc.settings.dialects import DIALECTS
from megatron_rc.settings.fields import FIELDS, SWITCHES
from megatron_rc.settings.overrides import overridden
from megatron_rc.settings.presets import PRESETS, RELEASES
from megatron_rc.settings.spelling import flag_of

_HELP = {
    "rollout_is": "level of the importance weights: token, sequence or geometric; none: no weights",
    "rollout_is_threshold": "bound on the weights: one number, or lo_hi",
    "rollout_is_mode": "truncate the weights, clamp them to the bounds, or mask them to 0 outside (IcePop)",
    "rollout_is_threshold_lower": "lower bound, where the threshold is one number and the mode is clamp or mask",
    "rollout_is_apply": "multiply the loss by the weights, or only measure them; default: yes",
    "rollout_is_batch_normalize": "divide the weights by their mean over the global batch",
    "rollout_is_batch_normalize_scope": "that mean runs over all valid tokens (all) or the accepted ones (accepted)",
    "rollout_rs": "comma list of rejection criteria, or none: {criteria}",
    "rollout_rs_threshold": "one bound, or a comma list with one for each criterion; lo_hi bounds the ratio of k1",
    "rollout_rs_threshold_lower": "lower bounds of the k1 criteria that were given one number",
    "rollout_token_veto_threshold": "reject a sequence with any token whose ratio is below this",
    "rollout_staleness_scale": "multiply the bounds, in nats, from a staleness on, for example 1:1.5,4:2",
    "rejection_denominator": "average the loss over accepted tokens (accepted) or over all (original)",
    "bad_log_probs": "a NaN, infinite or positive log-prob: error, reject_token or reject_sequence",
    "metric_prefix": "in front of every metric's name",
    "proximal_interpolation": "no forward-only pass: log π_old between the rollout's and the current one, by version",
    "bypass_mode": "take the rollout's log-probs for those of the old policy; no extra forward pass",
    "loss_type": "objective in bypass mode: {objectives}",
}
_PRESET, _FILE = "--rollout-correction-preset", "--rollout-correction-config"
_DIALECT = "--rollout-correction-dialect"
_MEGATRON_SWITCH, _MEGATRON_LIMIT = "--rl-inference-logprobs-is-correction", "--rl-importance-sampling-truncation-coef"
# Fields that the switch sets by itself, and which may therefore not be given beside it.
_OF_MEGATRONS_SWITCH = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_threshold_lower",
    "rollout_is_mode",
    "rollout_is_apply",
)
_BASES = (_PRESET, _FILE, _DIALECT, _MEGATRON_SWITCH, _MEGATRON_LIMIT)
# The flag of each field of the objective.
LOSS_FLAGS = {
    "algorithm": "policy_loss",
    "clip_low": "grpo_clamp_eps_lower",
    "clip_high": "grpo_clamp_eps_upper",
    "dual_clip": "ppo_dual_clip",
    "aggregation": "loss_aggregation",
    "loss_scale_factor": "loss_scale_factor",
    "kl_coef": "grpo_kl_beta",
    "kl_estimator": "kl_estimator",
    "entropy_coef": "grpo_entropy_term_weight",
}
_LOSS_OPTIONS: dict[str, dict[str, Any]] = {
    "policy_loss": {"metavar": f"{{{','.join(OBJECTIVES)}}}", "help": "objective; default: ppo_clip, or --loss-type"},
    "loss_aggregation": {"choices": AGGREGATIONS, "help": "from tokens to one loss; default: token-mean"},
    "loss_scale_factor": {
        "type": float,
        "help": "what token-sum and seq-mean-token-sum-norm divide by: they need it",
    },
    "grpo_clamp_eps_lower": {"type": float, "help": "PPO clips r below 1 - this; default: 0.2"},
    "grpo_clamp_eps_upper": {"type": float, "help": "PPO clips r above 1 + this; default: 0.2"},
    "ppo_dual_clip": {"type": float, "help": "cap of the loss at this · |A| for A < 0; default: none"},
    "grpo_kl_beta": {"type": float, "help": "weight of the KL to the reference policy; default: 0"},
    "kl_estimator": {"choices": KL_ESTIMATORS, "help": "estimator of that KL; docs/mathematics.md; default: k3"},
    "grpo_entropy_term_weight": {"type": float, "help": "weight of the entropy bonus; default: 0"},
}
T = TypeVar("T")


def add_rollout_correction_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add one long option for each field of the config, ``--rollout-correction-preset``, ``-config`` and ``-dialect``.

    Megatron-LM's two options for importance sampling are added too, and one option for each field of the objective, as
    Megatron-LM spells it where it has it. An option that the parser already has is left alone. Every default is None,
    "not given". Abbreviations are switched off, which would hide a misspelt flag. Returns the parser.
    """
    parser.allow_abbrev = False
    group = parser.add_argument_group("rollout correction")
    presets = f"{', '.join(PRESETS)}; NAME@{RELEASES[1]} for the numbers of that release; the fields below override it"
    _add(parser, group, _PRESET, metavar="NAME", help=f"one of {presets}")
    _add(parser, group, _FILE, metavar="FILE", help="YAML file of the fields below, which override it")
    text = f"whose fields the file has: {', '.join(DIALECTS)}; default: megatron_rc"
    _add(parser, group, _DIALECT, metavar="NAME", help=text)
    for field in FIELDS:
        if field in SWITCHES:
            _add(parser, group, flag_of(field), action=argparse.BooleanOptionalAction, help=_help(field))
        else:
            _add(parser, group, flag_of(field), help=_help(field))
    text = "weigh each token by its ratio, as Megatron-LM does; short for --rollout-is token"
    _add(parser, group, _MEGATRON_SWITCH, action=argparse.BooleanOptionalAction, help=text)
    _add(parser, group, _MEGATRON_LIMIT, type=float, help=f"truncate the weights of {_MEGATRON_SWITCH} at this")
    loss = _group(parser, "loss")
    for name in LOSS_FLAGS.values():
        _add(parser, loss, flag_of(name), **_LOSS_OPTIONS[name])
    return parser


def rollout_correction_config_from_args(
    args: argparse.Namespace, launch_file: argparse.Namespace | None = None
) -> RolloutCorrectionConfig:
    """The config that the flags describe: the preset or the file, overridden by every flag that was given.

    Settings of the preset or file that a flag makes meaningless are dropped: those of the weights after
    ``--rollout-is none``, the bounds of other criteria after ``--rollout-rs``, a lower bound beside a new pair, the
    objective after ``--no-bypass-mode``, normalisation where no weights are applied, bounds by staleness where
    nothing has bounds, the interpolation in bypass mode. A flag that would itself do nothing is an error. An attribute
    that the namespace lacks was not given.

    Args:
        args: the flags.
        launch_file: what a file of flags says, which the flags override in the same way. A preset or file of fields
            among the flags takes the place of all that it says of the correction.

    Raises:
        ValueError: flags that contradict each other, a file that cannot be read, or a field that is wrong; the flag is
            named.
    """
    flags, below = _given(args), {} if launch_file is None else _given(launch_file)
    if any(flags.get(_name(option)) for option in (_PRESET, _FILE, _MEGATRON_SWITCH)):
        below = {}
    base = _base({**below, **flags})
    fields = base.to_dict()
    for given in (below, flags):
        fields = overridden(fields, {name: value for name, value in given.items() if name in FIELDS})
    if fields == base.to_dict():
        return base
    return _named(lambda: RolloutCorrectionConfig(**fields, notes=base.notes), _flag_of_error)


def is_correction_flag(name: str) -> bool:
    """Whether a flag, with underscores, is one of the correction's."""
    return name in FIELDS or name in map(_name, _BASES)


def policy_loss_config_from_args(args: argparse.Namespace) -> PolicyLossConfig:
    """The objective that Megatron-LM's ``--grpo-*`` flags and ours beside them describe; absent ones: the default.

    Raises:
        ValueError: a value that the objective cannot have; the flag is named.
    """
    given = {field: getattr(args, name, None) for field, name in LOSS_FLAGS.items()}
    return _named(
        lambda: PolicyLossConfig(**{field: value for field, value in given.items() if value is not None}),
        lambda message: flag_of(LOSS_FLAGS[message.partition("=")[0]]),
    )


def _add(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup, option: str, **how: Any) -> None:
    known = {text for action in parser._actions for text in action.option_strings}
    if not known & {option, f"--no-{option[2:]}"}:
        group.add_argument(option, default=None, **how)


def _group(parser: argparse.ArgumentParser, title: str) -> argparse._ArgumentGroup:
    """The group of this title, a new one where there is none."""
    known = (group for group in parser._action_groups if group.title == title)
    return next(known, None) or parser.add_argument_group(title)


def _help(field: str) -> str:
    return _HELP[field].format(criteria=", ".join(CRITERIA), objectives=", ".join(OBJECTIVES))


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """What was given of the correction, by attribute; fields as they were typed: ``none`` is None."""
    names = (*FIELDS, *(_name(option) for option in _BASES))
    found = {name: getattr(args, name, None) for name in names}
    return {name: _parsed(name, value) for name, value in found.items() if value is not None}


def _parsed(name: str, value: Any) -> Any:
    """``none`` is None, and what reads as one number is one."""
    if not isinstance(value, str) or name == "metric_prefix" or name not in FIELDS:
        return value
    if value.lower() in ("none", "null"):
        return None
    try:
        # float() would take 0.5_2 for 0.52.
        return value if "_" in value else float(value)
    except ValueError:
        return value


def _base(given: dict[str, Any]) -> RolloutCorrectionConfig:
    """What the fields override: the preset, the file, Megatron-LM's options, or the defaults."""
    name, path = given.get(_name(_PRESET)), given.get(_name(_FILE))
    if name is not None and path is not None:
        raise ValueError(f"{_PRESET} {name} and {_FILE} {path} contradict: give one of them")
    weights = _megatron_weights(given)
    if weights is not None:
        others = [_PRESET] * (name is not None) + [_FILE] * (path is not None)
        others += [flag_of(field) for field in _OF_MEGATRONS_SWITCH if field in given]
        if others:
            raise ValueError(f"{_MEGATRON_SWITCH} and {others[0]} contradict: give one of them")
        return weights
    dialect = given.get(_name(_DIALECT))
    if dialect is not None and path is None:
        raise ValueError(f"{_DIALECT} {dialect} does nothing without {_FILE}: give both, or neither")
    if name is not None:
        parts = name.split("@", 1)
        return _named(lambda: preset(*parts), lambda _: f"{_PRESET} {name}")
    if path is None:
        return RolloutCorrectionConfig()
    return _from_file(path, dialect)


def _from_file(path: str, dialect: str | None) -> RolloutCorrectionConfig:
    own = RolloutCorrectionConfig.from_yaml
    try:
        return _named(lambda: own(path, dialect), lambda _: f"{_FILE} {path}")
    except ValueError as error:
        if "with dialect=" in str(error) or (dialect is None and "unknown field" in str(error)):
            raise ValueError(f"{error}; a file of another program needs {_DIALECT}") from error
        raise


def _megatron_weights(given: dict[str, Any]) -> RolloutCorrectionConfig | None:
    limit = given.get(_name(_MEGATRON_LIMIT))
    if not given.get(_name(_MEGATRON_SWITCH)):
        if limit is not None:
            raise ValueError(
                f"{_MEGATRON_LIMIT} {limit} does nothing without {_MEGATRON_SWITCH}: give both, or neither"
            )
        return None
    bound = UNTRUNCATED if limit is None else limit
    make = RolloutCorrectionConfig.decoupled_token_is
    return _named(lambda: make(bound), lambda _: f"{_MEGATRON_LIMIT} {limit}")


def _name(option: str) -> str:
    return option[2:].replace("-", "_")


def _named(make: Callable[[], T], flag: Callable[[str], str]) -> T:
    """The config, or its error with the flag in front that it is about."""
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{flag(str(error))}: {error}") from error


def _flag_of_error(message: str) -> str:
    """The flag of the field that a message begins with."""
    return next((flag_of(field) for field in FIELDS if message.startswith(f"{field}=")), "rollout correction")
