"""What a model family is: one architecture of Hugging Face's, as a GPTModel and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.megatron import ExpertSection
from megatron_rc.launch.weights.conversions import Conversion

# Names without dashes, and values as they would be typed; ``true`` and ``false`` for switches.
Flags = dict[str, str]


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter.

    Attributes:
        megatron: its names: that of the local modules first, then Transformer Engine's where they differ.
        hugging_face: the tensors that it holds.
        conversion: between the two.
    """

    megatron: tuple[str, ...]
    hugging_face: tuple[str, ...]
    conversion: Conversion


@dataclass(frozen=True)
class ExpertNames:
    """What files call the block of experts in a layer, and the projections of one of them."""

    block: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture. Names of its parameters are relative to a layer, or to an expert.

    ``{layer}`` and ``{expert}`` in a Hugging Face name are the global numbers from 0. These names are those of files,
    which engines read; the modules of transformers may hold several of them in one parameter.

    Attributes:
        name: ``model_type`` in its ``config.json``.
        read: what that file says of the model, as flags.
        matches: whether a run's model is of this family.
        hugging_face_config: the ``transformers`` config of such a model.
        embedding: rules of the first stage.
        layer: of every layer, without its experts.
        head: of the last stage.
        untied_head: of an output layer with weights of its own.
        expert: of every expert.
        expert_names: of every expert in files; goes with ``expert``.
        in_bridge: ``--weights-bridge`` converts it as it is built here.

    Raises:
        ValueError: experts without their names, or the names without experts.
    """

    name: str
    read: Callable[[Mapping[str, Any]], Flags]
    matches: Callable[[RunConfig], bool]
    hugging_face_config: Callable[[RunConfig], Any]
    embedding: tuple[Rule, ...]
    layer: tuple[Rule, ...]
    head: tuple[Rule, ...]
    untied_head: tuple[Rule, ...]
    expert: tuple[Rule, ...] = ()
    expert_names: ExpertNames | None = None
    in_bridge: bool = False

    def __post_init__(self) -> None:
        if bool(self.expert) != (self.expert_names is not None):
            raise ValueError(f"family {self.name}: expert and expert_names go together, give both or neither")


class UnknownFeatureError(Exception):
    """A setting in a ``config.json`` under which our GPTModel would be another function."""


def must_be(config: Mapping[str, Any], name: str, value: Any, default: Any = None) -> None:
    """Raise UnknownFeatureError unless a ``config.json`` has this value."""
    found = config.get(name, default)
    if found != value:
        raise UnknownFeatureError(f"{name} is {found!r}, not {value!r}")


def experts_of(config: RunConfig) -> ExpertSection:
    """The experts of a model that has some."""
    if config.experts is None:
        raise RuntimeError("a dense model has no experts")
    return config.experts
