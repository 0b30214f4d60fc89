"""The correction as command-line flags, in the shape of Megatron's ``extra_args_provider``."""

from __future__ import annotations

import argparse
import dataclasses

from megatron_rc.config import PRESETS, RolloutCorrectionConfig, preset

_HELP = {
    "rollout_is": "level of the importance weights: token, sequence or geometric",
    "rollout_is_threshold": "truncate the weights at this ratio",
    "rollout_rs": "comma list of rejection criteria, for example token_k1,seq_mean_k3",
    "rollout_rs_threshold": "one bound, or a comma list with one for each criterion",
    "rejection_denominator": "average the loss over accepted tokens (accepted) or over all (original)",
}


def add_rollout_correction_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add one long option for each field of the config, ``--rollout-correction-preset`` and ``-config``.

    An option that the parser already has is left alone. Returns the parser.
    """
    group = parser.add_argument_group("rollout correction")
    known = {text for action in parser._actions for text in action.option_strings}
    options = {
        "--rollout-correction-preset": f"one of {', '.join(PRESETS)}; the fields below override it",
        "--rollout-correction-config": "YAML file of the fields below, which override it",
        **{f"--{field.replace('_', '-')}": text for field, text in _HELP.items()},
    }
    for option, text in options.items():
        if option not in known:
            kind = float if option == "--rollout-is-threshold" else str
            group.add_argument(option, type=kind, default=None, help=text)
    return parser


def rollout_correction_config_from_args(args: argparse.Namespace) -> RolloutCorrectionConfig:
    """The config that the flags describe: the preset or the file, overridden by every flag that was given.

    Raises:
        ValueError: both a preset and a file, a file that cannot be read, or a field that is wrong.
    """
    name, path = args.rollout_correction_preset, args.rollout_correction_config
    if name is not None and path is not None:
        raise ValueError(
            f"--rollout-correction-preset {name} and --rollout-correction-config {path} contradict: give one of them"
        )
    base = RolloutCorrectionConfig()
    if name is not None:
        base = preset(name)
    elif path is not None:
        try:
            base = RolloutCorrectionConfig.from_yaml(path)
        except OSError as error:
            raise ValueError(f"--rollout-correction-config {path} cannot be read: {error.strerror}") from error
    given = {field: getattr(args, field) for field in _HELP if getattr(args, field) is not None}
    return dataclasses.replace(base, **given)
