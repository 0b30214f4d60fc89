"""Parser of all flags, with Megatron-LM's names and meanings if Megatron-LM has them.

Flags are declared as fields of the sections in ``run_config/``. This module adds ``--config``, the library's flags of
the loss and the correction, and Megatron-Core's own fields. A flag that is not given gets no value from the parser.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from megatron_rc.launch.engines.registry import ENGINES
from megatron_rc.launch.engines.rounding import DTYPES
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.unused import needs_in_words
from megatron_rc.launch.run_config import RunConfig, flag_options, passed_through, sections_of
from megatron_rc.launch.run_config.megatron_fields import MegatronField
from megatron_rc.launch.run_config.options import Option, options_of
from megatron_rc.launch.tasks.text import TOKENIZERS
from megatron_rc.loss.objectives import OBJECTIVES
from megatron_rc.settings.flags import add_rollout_correction_args

# Titles of sections in --help that are not the section's name.
_TITLES = {
    "parallel": "parallelism",
    "transformer": "layers",
    "latent": "multi-latent attention",
    "yarn": "YaRN",
    "experts": "mixture of experts",
    "routing": "routing replay",
    "compute": "precision and recomputation",
    "schedule": "learning rate",
    "guards": "steps that go wrong",
    "reference": "reference policy",
    "data": "prompts from files",
    "engine": "rollout engine",
}
# Choices that are the entries of a table elsewhere.
_CHOICES = {"rollout_engine": tuple(ENGINES), "rollout_dtype": DTYPES, "tokenizer_type": TOKENIZERS}
# Megatron-LM's bounds and weights of the loss; the library's are others, or none.
LOSS_DEFAULTS = {
    "grpo_clamp_eps_lower": 0.01,
    "grpo_clamp_eps_upper": 0.01,
    "grpo_kl_beta": 0.001,
    "grpo_entropy_term_weight": 0.0,
}
# Negative numbers. Python's argparse takes those with an exponent, such as -1e-3, for flags.
_NEGATIVE_NUMBER = re.compile(r"^-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")


class Parser(argparse.ArgumentParser):
    """Argument parser that raises its errors instead of printing them.

    Attributes:
        listing: flag that shows all flags.
    """

    listing = "--help-all"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = _NEGATIVE_NUMBER

    def error(self, message: str) -> NoReturn:
        """Raise the parser's message as a ConfigurationError."""
        raise ConfigurationError(f"{message[0].lower()}{message[1:]}; {self.listing} lists the flags")


def build_parser(*, with_megatron: bool = True) -> Parser:
    """Build the parser of every flag of a run; Megatron-Core's own flags import it."""
    parser = Parser(
        prog="python -m megatron_rc.launch",
        description="PPO with Rollout Correction on Megatron-Core. Flags are Megatron-LM's where it has them.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for name, section, _ in sections_of(RunConfig):
        options = options_of(section)
        if not options:
            continue
        group = parser.add_argument_group(_TITLES.get(name, name))
        if name == "launch":
            text = "launch file (YAML) or its name in configs/launch; flags override it"
            group.add_argument("--config", metavar="FILE", help=text)
        for option in options:
            _add_option(group, option)
    _add_loss_flags(parser)
    add_rollout_correction_args(parser)
    if with_megatron:
        _add_megatron_flags(parser)
    return parser


@functools.cache
def _whole_parser() -> Parser:
    return build_parser()


def parser_for(names: Iterable[str]) -> Parser:
    """Return a parser of flags with these names, which imports Megatron-Core only if one of them may be Megatron's.

    It is made once in a process: its help may be older than the objectives that a program has defined.
    """
    is_known = all(name in PARSER._option_string_actions for name in names)
    return PARSER if is_known else _whole_parser()


def long_options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return every option of a parser by its name without dashes."""
    return {
        text.removeprefix("--"): action
        for action in parser._actions
        for text in action.option_strings
        if text.startswith("--")
    }


@functools.cache
def defaults() -> dict[str, Any]:
    """Return the value of each flag that is not given, by name; None if it follows from others, or is none."""
    values: dict[str, Any] = dict.fromkeys(action.dest for action in PARSER._actions)
    values |= {option.flag: option.default for _, option in flag_options().values()}
    return values


def _add_option(group: argparse._ArgumentGroup, option: Option) -> None:
    """Add the flag of a field."""
    name = f"--{option.flag.replace('_', '-')}"
    text = option.help
    if option.required:
        text += "; required"
    text += needs_in_words(option.flag)
    if option.kind is bool:
        if option.default:
            text += "; default: on"
        # --no-<name> turns off a switch of the launch file.
        is_negative = option.inverted or name.startswith("--no-")
        switch: Any = "store_true" if is_negative else argparse.BooleanOptionalAction
        group.add_argument(name, action=switch, help=text)
        return
    if option.default is not None and "default:" not in text:
        text += f"; default: {option.default}"
    more: dict[str, Any] = {}
    if option.many:
        more = {"nargs": "+", "action": "extend"}
    metavar = option.metavar or ("N" if option.kind is int else None)
    choices = _CHOICES.get(option.field, option.choices) or None
    if choices and option.read:
        # The function checks the word, and takes others too: the choices are only shown.
        metavar = f"{{{','.join(choices)}}}"
        choices = None
    if metavar:
        more["metavar"] = metavar
    group.add_argument(name, type=_type_of(option.read or option.kind), choices=choices, help=text, **more)


def _type_of(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a function that makes a flag's value, with a ValueError's own words in the parser's message."""
    if isinstance(read, type):
        return read

    @functools.wraps(read)
    def value_of(word: str) -> Any:
        try:
            return read(word)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return value_of


def _add_loss_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of the objective with Megatron-LM's defaults, and one that also takes the user's own modules."""
    group = parser.add_argument_group("loss")
    # No choices, because a module of the user's may define another objective.
    objectives = ",".join(OBJECTIVES)
    text = "objective, or python:pkg.module:OBJECTIVE; default: ppo_clip, or --loss-type"
    group.add_argument("--policy-loss", metavar=f"{{{objectives}}}", help=text)
    text = "clip the ratio below 1 minus this number; default: 0.01"
    group.add_argument("--grpo-clamp-eps-lower", type=float, help=text)
    text = "clip the ratio above 1 plus this number; default: 0.01"
    group.add_argument("--grpo-clamp-eps-upper", type=float, help=text)
    text = "weight of the KL to the reference policy; default: 0.001"
    group.add_argument("--grpo-kl-beta", type=float, help=text)


def _add_megatron_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of Megatron-Core's own fields, by config."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in passed_through().values():
        if field.title not in groups:
            groups[field.title] = parser.add_argument_group(field.title)
        _add_megatron_field(groups[field.title], field)


def _add_megatron_field(group: argparse._ArgumentGroup, field: MegatronField) -> None:
    """Add the flag of one field: a switch with its names for on and for off, or an option with a value."""
    on = [f"--{name}" for name in field.on]
    off = [f"--{name}" for name in field.off]
    text = field.help.rstrip(".")
    if field.default not in (None, ""):
        text += f"; default: {field.default}"
    text = text.replace("%", "%%")
    if field.kind is bool:
        group.add_argument(*on, *off, dest=field.name, action=_Switch, off=off, help=text)
        return
    optional_arguments: dict[str, Any] = {}
    if field.many:
        optional_arguments["nargs"] = "+"
    if field.choices:
        optional_arguments["choices"] = field.choices
    else:
        last_word = field.on[0].rpartition("-")[2]
        optional_arguments["metavar"] = last_word.upper()
    group.add_argument(*on, dest=field.name, type=_type_of(field.kind), help=text, **optional_arguments)


class _Switch(argparse.Action):
    """Switch with names that turn it on, and the names ``off`` that turn it off."""

    def __init__(self, option_strings: Sequence[str], dest: str, off: Sequence[str], **how: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **how)
        self.off = off

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        """Set the switch."""
        setattr(namespace, self.dest, option_string not in self.off)


# Parser of all flags but Megatron-Core's own.
PARSER = build_parser(with_megatron=False)
