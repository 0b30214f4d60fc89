"""Command-line flags of the correction and the objective, added as in Megatron's ``extra_args_provider``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TypeVar

from megatron_rc.loss.aggregation import AGGREGATIONS
from megatron_rc.loss.kl import KL_ESTIMATORS
from megatron_rc.loss.objectives import OBJECTIVES
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.numerics import UNTRUNCATED
from megatron_rc.settings.bounds import DEFAULT_WEIGHT_THRESHOLD
from megatron_rc.settings.config import RolloutCorrectionConfig, preset
from megatron_rc.settings.consistency import OF_WEIGHTS
from megatron_rc.settings.criteria import CRITERIA
from megatron_rc.settings.description import flag_of
from megatron_rc.settings.dialects import DIALECTS
from megatron_rc.settings.fields import DEFAULTS, FIELDS, SWITCHES
from megatron_rc.settings.overrides import overridden, value_of
from megatron_rc.settings.presets import PRESETS, RELEASES

# Help texts without the default, except of fields whose default is None.
_HELP = {
    "rollout_is": "level of the importance weights: token; sequence (product of its ratios) or geometric (their mean); "
    "turn or turn_geometric, the same over a run of trained tokens; prefix (product up to the token); min_prefix "
    "(MinPRO); or none",
    "rollout_is_threshold": "bound on the importance weights: one ratio, or a pair lo_hi; "
    f"default: {DEFAULT_WEIGHT_THRESHOLD}",
    "rollout_is_mode": "treatment of weights out of bounds: truncate at the upper bound, clamp to both, or mask, which "
    "makes them 0 (IcePop); default: mask for a pair of bounds, else truncate",
    "rollout_is_threshold_lower": "lower bound on the importance weights, a ratio, for the modes clamp and mask with "
    "one number u as --rollout-is-threshold; default: 1/u",
    "rollout_is_apply": "multiply the loss by the importance weights; --no-rollout-is-apply only measures them and "
    "the veto",
    "rollout_is_batch_normalize": "divide the importance weights by their mean over the global batch",
    "rollout_is_batch_normalize_scope": "tokens of the mean of --rollout-is-batch-normalize: all valid ones (all) or "
    "the accepted ones (accepted)",
    "rollout_rs": "comma list of rejection criteria, or none: {criteria}; default: none",
    "rollout_rs_threshold": "bound for all criteria of --rollout-rs, or a comma list with one for each: for k1 a ratio "
    "u, which means [1/u, u], or a pair lo_hi; for the others an upper bound, in nats except for seq_mean_error; "
    "no default",
    "rollout_rs_threshold_lower": "lower bound for all k1 criteria of --rollout-rs whose bound is one number u, or a "
    "comma list with one for each, as ratios; default: 1/u",
    "rollout_token_veto_threshold": "reject sequences with a token whose ratio is below this; default: no veto",
    "rollout_staleness_scale": "factors of all bounds in nats by staleness in weight versions: 1:1.5,4:2 is 1.5 from a "
    "staleness of 1 on, 2 from 4 on; default: no factors",
    "rejection_denominator": "average the loss over the accepted tokens (accepted) or over all trained ones (original)",
    "bad_log_probs": "effect of a NaN, infinite or positive log-prob: error, or the rejection of its token "
    "(reject_token) or of its sequence (reject_sequence)",
    "metric_prefix": "prefix of the names of all correction metrics",
    "proximal_interpolation": "interpolate log π_old between the rollout's and the current log-probs, by weight "
    "version, instead of an extra forward pass",
    "bypass_mode": "use the rollout's log-probs as the old policy's, without an extra forward pass",
    "loss_type": "objective in bypass mode: {objectives}",
}
_PRESET, _FILE = "--rollout-correction-preset", "--rollout-correction-config"
_DIALECT = "--rollout-correction-dialect"
_MEGATRON_SWITCH, _MEGATRON_LIMIT = "--rl-inference-logprobs-is-correction", "--rl-importance-sampling-truncation-coef"
_OF_MEGATRONS_SWITCH = ("rollout_is", *OF_WEIGHTS)  # fields that the switch sets, so that no flag may set them too
_BASES = (_PRESET, _FILE, _DIALECT, _MEGATRON_SWITCH, _MEGATRON_LIMIT)
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
}
_LOSS_WORDS: dict[str, dict[str, Any]] = {  # the other fields of the objective are numbers
    "algorithm": {"metavar": f"{{{','.join(OBJECTIVES)}}}"},
    "aggregation": {"choices": AGGREGATIONS},
    "kl_estimator": {"choices": KL_ESTIMATORS},
    "kl_importance_weight": {"action": argparse.BooleanOptionalAction},
}
LOSS_FLAGS = {field: flag for field, (flag, _) in _LOSS_OPTIONS.items()}
T = TypeVar("T")


def add_rollout_correction_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add an option for each field of the config, ``--rollout-correction-preset``, ``-config`` and ``-dialect``.

    Also added: Megatron-LM's two options of importance sampling, and an option for each field of the objective, with
    Megatron-LM's name if it has one. Options that the parser has already stay. Every default is None, "not given".
    Abbreviations are switched off, because they would hide a misspelt flag. Returns the parser.
    """
    parser.allow_abbrev = False
    group = parser.add_argument_group("rollout correction")
    names = f"{', '.join(PRESETS)}; NAME@{RELEASES[1]} for the numbers of that release"
    text = f"preset of correction settings, which other flags override: {names}; default: none"
    _add(parser, group, _PRESET, metavar="NAME", help=text)
    text = "YAML file of correction settings, which other flags override; default: none"
    _add(parser, group, _FILE, metavar="FILE", help=text)
    text = f"program whose settings {_FILE} has: {', '.join(DIALECTS)}; default: megatron_rc"
    _add(parser, group, _DIALECT, metavar="NAME", help=text)
    for field in FIELDS:
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if field in SWITCHES else {}
        words = _HELP[field].format(criteria=", ".join(CRITERIA), objectives=", ".join(OBJECTIVES))
        _add(parser, group, flag_of(field), help=_with_default(words, DEFAULTS[field]), **how)
    text = f"weight each token by its ratio, as Megatron-LM does, bounded by {_MEGATRON_LIMIT} alone; default: no"
    _add(parser, group, _MEGATRON_SWITCH, action=argparse.BooleanOptionalAction, help=text)
    text = f"upper bound on the weights of {_MEGATRON_SWITCH}, a ratio; default: no bound"
    _add(parser, group, _MEGATRON_LIMIT, type=float, help=text)
    known = (group for group in parser._action_groups if group.title == "loss")
    loss = next(known, None) or parser.add_argument_group("loss")
    for field, (name, words) in _LOSS_OPTIONS.items():
        how = _LOSS_WORDS.get(field, {"type": float})
        _add(parser, loss, flag_of(name), help=_with_default(words, getattr(PolicyLossConfig, field)), **how)
    return parser


def rollout_correction_config_from_args(
    args: argparse.Namespace, launch_file: argparse.Namespace | None = None
) -> RolloutCorrectionConfig:
    """The config that the flags describe: the preset or the file, overridden by every given flag.

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
    flags, below = _given(args), {} if launch_file is None else _given(launch_file)
    if any(flags.get(_name(option)) for option in (_PRESET, _FILE, _MEGATRON_SWITCH)):
        below = {}
    base = _base({**below, **flags})
    fields = base.to_dict()
    for given in (below, flags):
        fields = overridden(fields, {name: value for name, value in given.items() if name in FIELDS})
    if fields == base.to_dict():
        return base
    begins = {f"{field}=": flag_of(field) for field in FIELDS}
    return _named(
        lambda: RolloutCorrectionConfig(**fields, notes=base.notes),
        lambda message: next((flag for word, flag in begins.items() if message.startswith(word)), "rollout correction"),
    )


def is_correction_flag(name: str) -> bool:
    """Whether a flag, with underscores, is one of the correction's."""
    return name in FIELDS or name in map(_name, _BASES)


def policy_loss_config_from_args(args: argparse.Namespace) -> PolicyLossConfig:
    """The objective that Megatron-LM's ``--grpo-*`` flags and this package's describe.

    Raises:
        ValueError: a value that the objective does not take; the flag is named.
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


def _with_default(words: str, default: object) -> str:
    """The help text with its default; a default of None is in the words already."""
    if default is None:
        return words
    return f"{words}; default: {default if not isinstance(default, bool) else 'yes' if default else 'no'}"


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The given flags of the correction, by attribute; ``none`` is None."""
    names = (*FIELDS, *(_name(option) for option in _BASES))
    found = {name: getattr(args, name, None) for name in names}
    fields = set(FIELDS) - {"metric_prefix"}
    read = {name: value_of(value) for name, value in found.items() if name in fields and isinstance(value, str)}
    return {name: read.get(name, value) for name, value in found.items() if value is not None}


def _base(given: dict[str, Any]) -> RolloutCorrectionConfig:
    """The config that the fields override: the preset, the file, Megatron-LM's options, or the defaults."""
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
    """The config; an error gets the name of its flag in front."""
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{flag(str(error))}: {error}") from error
