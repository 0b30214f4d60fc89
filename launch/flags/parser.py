"""Parser of all flags, with Megatron-LM's names and meanings if Megatron-LM has them.

Most flags are declared as fields of the sections in ``run_config/``. This module adds flags from which such fields
follow, and the library's flags of the loss and the correction.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megatron_rc.launch.engines.registry import ENGINES
from megatron_rc.launch.engines.rounding import DTYPES
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.run_config import RunConfig, passed_through, sections_of
from megatron_rc.launch.run_config.megatron_fields import MegatronField
from megatron_rc.launch.run_config.options import Option, in_words, options_of
from megatron_rc.launch.tasks.text import TOKENIZERS
from megatron_rc.loss.objectives import OBJECTIVES
from megatron_rc.settings.flags import add_rollout_correction_args

# Titles of sections in --help that are not the section's name.
_TITLES = {
    "parallel": "parallelism",
    "transformer": "layers",
    "latent": "multi-latent attention",
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

# Megatron-LM's weights of the penalties, filled in by resolve.py: some corrections exclude penalties.
PENALTIES = {"grpo_kl_beta": 0.001, "grpo_entropy_term_weight": 0.0}


class Parser(argparse.ArgumentParser):
    """Argument parser that raises its errors instead of printing them.

    Attributes:
        listing: flag that shows all flags.
    """

    listing = "--help"

    def error(self, message: str) -> NoReturn:
        """Raise the parser's message as a ConfigurationError."""
        raise ConfigurationError(f"{message[0].lower()}{message[1:]}; {self.listing} lists the flags")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default of each flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of every flag of a run."""
    parser = Parser(
        prog="python -m megatron_rc.launch",
        description="PPO with Rollout Correction on Megatron-Core. Flags are Megatron-LM's where it has them.",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.listing = "--help-all"
    sections = [section for section in sections_of(RunConfig) if options_of(section[1])]
    groups = {name: parser.add_argument_group(_TITLES.get(name, name)) for name, *_ in sections}
    _add_sources(groups)
    for name, section, is_optional in sections:
        for option in options_of(section):
            _add(groups[name], option, is_optional)
    _add_loss_args(parser)
    add_rollout_correction_args(parser)
    added: dict[str, argparse._ArgumentGroup] = {}
    for field in passed_through().values():
        if field.title not in added:
            added[field.title] = parser.add_argument_group(field.title)
        _add_megatron_field(added[field.title], field)
    return parser


def long_options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Every option of a parser by its name without dashes."""
    return {text[2:]: action for action in parser._actions for text in action.option_strings}


def needs_of(option: Option) -> tuple[str, ...]:
    """Conditions of a flag's effect, with the engines that take it."""
    engines = [name for name, engine in ENGINES.items() if option.field in engine.settings]
    return (*option.needs, *[f"rollout_engine={'|'.join(engines)}"] * bool(engines))


def _type_of(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Function that makes a flag's value, with a ValueError's own words in the parser's message."""
    if isinstance(read, type):
        return read

    @functools.wraps(read)
    def value_of(word: str) -> Any:
        try:
            return read(word)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return value_of


def _add(group: argparse._ArgumentGroup, option: Option, is_optional: bool) -> None:
    """Add the flag of a field; ``resolve.py`` fills in the defaults of a section that may be absent."""
    name = f"--{option.flag.replace('_', '-')}"
    default, help = option.default, option.help + "; required" * option.required + in_words(needs_of(option))
    if is_optional and default is not None:
        default, help = None, f"{help}; default: {default}"
    if option.kind is not bool:
        choices = _CHOICES.get(option.field, option.choices) or None
        metavar = option.metavar or ("N" if option.kind is int else None)
        if choices and option.read:
            # The function checks the word itself, and takes others too: the choices are shown alone.
            metavar, choices = f"{{{','.join(choices)}}}", None
        kind: dict[str, Any] = {"metavar": metavar} if metavar else {}
        kind |= {"nargs": "+"} if option.many else {}
        group.add_argument(
            name, type=_type_of(option.read or option.kind), choices=choices, default=default, help=help, **kind
        )
    elif option.inverted or name.startswith("--no-"):
        group.add_argument(name, action="store_true", help=help)
    else:
        # --no-<name> turns off a switch of the launch file.
        group.add_argument(name, action=argparse.BooleanOptionalAction, default=default, help=help)


class _Switch(argparse.Action):
    """Switch with names that turn it on and names that turn it off."""

    def __init__(self, option_strings: Sequence[str], dest: str, off: Sequence[str], **how: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **how)
        self.off = off

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        """Set the switch."""
        setattr(namespace, self.dest, option_string not in self.off)


def _add_megatron_field(group: argparse._ArgumentGroup, field: MegatronField) -> None:
    """Add the flag of a Megatron field; its value is None if it is not given."""
    on, off = [f"--{name}" for name in field.on], [f"--{name}" for name in field.off]
    shown = "" if field.default in (None, "") else f"; default: {field.default}"
    help = (field.help.rstrip(".") + shown).replace("%", "%%")
    if field.kind is bool:
        group.add_argument(*on, *off, dest=field.name, action=_Switch, off=off, help=help)
        return
    more: dict[str, Any] = {"nargs": "+"} if field.many else {}
    more |= {"choices": field.choices} if field.choices else {"metavar": field.on[0].rpartition("-")[2].upper()}
    group.add_argument(*on, dest=field.name, type=_type_of(field.kind), help=help, **more)


def _add_sources(groups: dict[str, argparse._ArgumentGroup]) -> None:
    """Add flags that are no fields, but from which fields follow."""
    launch, parallel, layers = groups["launch"], groups["parallel"], groups["transformer"]
    switch = argparse.BooleanOptionalAction
    launch.add_argument(
        "--config", metavar="FILE", help="launch file (YAML) or its name in configs/launch; flags override it"
    )
    text = "train on the CPU with gloo even if there is a GPU"
    launch.add_argument("--cpu", action=switch, default=False, help=text)
    chunk = "layers of a virtual pipeline stage; default: one stage on each rank; needs --pipeline-model-parallel-size"
    parallel.add_argument("--num-layers-per-virtual-pipeline-stage", type=int, help=chunk)
    text = "share keys and values between query heads, in --num-query-groups groups"
    layers.add_argument("--group-query-attention", action=switch, default=False, help=text)


def _add_loss_args(parser: argparse.ArgumentParser) -> None:
    """Add flags of the objective with Megatron-LM's defaults, and one that also takes the user's own modules."""
    group = parser.add_argument_group("loss")
    # No choices, because a module of the user's may define another objective.
    known, text = ",".join(OBJECTIVES), "objective, or python:pkg.module:OBJECTIVE; default: ppo_clip, or --loss-type"
    group.add_argument("--policy-loss", metavar=f"{{{known}}}", help=text)
    group.add_argument(
        "--grpo-clamp-eps-lower", type=float, default=0.01, help="clip the ratio below 1 minus this number"
    )
    group.add_argument(
        "--grpo-clamp-eps-upper", type=float, default=0.01, help="clip the ratio above 1 plus this number"
    )
    # No default here: resolve.py sets 0 if batch normalisation in the loss excludes penalties.
    group.add_argument("--grpo-kl-beta", type=float, help="weight of the KL to the reference policy; default: 0.001")
