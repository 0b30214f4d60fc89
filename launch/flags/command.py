"""The command line of a run: the values that its words, its launch file and its model give, each read once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rc.launch.errors import ConfigurationError, flag
from megatron_rc.launch.flags.hints import unknown
from megatron_rc.launch.flags.launch_file import read_launch_file
from megatron_rc.launch.flags.own_objects import define_own_objects
from megatron_rc.launch.flags.parser import defaults, parser_for
from megatron_rc.launch.run_config.options import as_typed
from megatron_rc.launch.weights.architecture import read_architecture

# Flags that are None for a model whose config.json does not mention them.
NONE_IF_ABSENT = (
    "num_experts",
    "q_lora_rank",
    "moe_shared_expert_intermediate_size",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "no_rope_freq",
    "window_size",
    "window_attn_skip_freq",
    "activation_func_clamp_value",
    "rotary_seq_len_interpolation_factor",
    "rope_dynamic_factor",
    "yarn_mscale",
    "yarn_mscale_all_dim",
    "yarn_attention_factor",
)
# Typed flags that take the place of other flags in a launch file.
_REPLACED = {
    "load_hf": ("from_scratch",),
    "task": ("prompt_data", "eval_data", "eval_input_key", "eval_label_key"),
    "prompt_data": ("task",),
}


class Values(dict[str, Any]):
    """Values of a run's flags by name, read as attributes; functions return further values, and change none."""

    def __getattr__(self, name: str) -> Any:
        """Return the value of a flag; its name has underscores."""
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def also(self, more: Mapping[str, Any]) -> Values:
        """Return these values with further or other ones."""
        return Values({**self, **more})


@dataclass(frozen=True, kw_only=True)
class Command:
    """The given values of a run by flag, from each source that gives some."""

    typed: Mapping[str, Any]
    in_file: Mapping[str, Any]  # of the launch file
    given: Mapping[str, Any]  # both; a typed value overrides the launch file's
    specs: Mapping[str, str]  # ``python:`` texts by the names of the objects that they define
    values: Values  # of all flags: given, of the model in ``--load-hf``, or the default


def read_command(argv: Sequence[str]) -> Command:
    """Read the words of a command line, and the files that they name."""
    typed = _parsed(argv)
    in_file: dict[str, Any] = {}
    if "config" in typed:
        file_arguments = read_launch_file(typed["config"])
        try:
            in_file = _parsed(file_arguments)
        except ConfigurationError as error:
            raise ConfigurationError(f"--config {typed['config']}: {error}") from error
    for name, replaced in _REPLACED.items():
        if name in typed:
            in_file = {key: value for key, value in in_file.items() if key not in replaced}

    specs: dict[str, str] = {}
    typed = define_own_objects(typed, specs)
    in_file = define_own_objects(in_file, specs)

    given = {**in_file, **typed}
    of_model = _read_model(given["load_hf"], given) if "load_hf" in given else {}
    values = Values({**defaults(), **of_model, **given})
    return Command(typed=typed, in_file=in_file, given=given, specs=specs, values=values)


def _parsed(words: Sequence[str]) -> dict[str, Any]:
    """Return the values of flags that are among these words, by name."""
    names = [word.partition("=")[0] for word in words if word.startswith("--")]
    parser = parser_for(names)
    namespace, unread_words = parser.parse_known_args(words)
    if unread_words:
        unknown_flags = [word.partition("=")[0] for word in unread_words if word.startswith("--")]
        unread = unknown_flags or unread_words[:1]
        raise ConfigurationError("; ".join(unknown("flag", name) for name in dict.fromkeys(unread)))
    values = {name: value for name, value in vars(namespace).items() if value is not None}
    for name, value in values.items():
        # Of a shell variable that is not set; a folder or a name that is empty would turn its feature off in silence.
        if value == "" or (isinstance(value, list) and "" in value):
            raise ConfigurationError(f"{flag(name)} has an empty value: give another one, or drop the flag")
    # Sections are frozen, so their lists of values are tuples.
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def values_of_directory(folder: str, name: str) -> dict[str, Any]:
    """Return the values of flags that a Hugging Face directory describes; ``name`` is the flag that gave it."""
    return {key.replace("-", "_"): value for key, value in read_architecture(folder, name).items()}


def _read_model(folder: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of flags that a Hugging Face directory describes; given ones must not contradict them."""
    of_model = values_of_directory(folder, "--load-hf")
    for name in [*of_model, *NONE_IF_ABSENT]:
        described = of_model.get(name)
        value = given.get(name, described)
        if value != described:
            raise ConfigurationError(
                f"{as_typed(name, value)} contradicts --load-hf {folder}, whose model has {described}: drop the flag"
            )
    return of_model
