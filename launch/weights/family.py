"""What a model family is: one architecture of Hugging Face's, as a GPTModel and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from megatron_rc.launch.errors import ConfigurationError, require
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.megatron import ExpertSection
from megatron_rc.launch.weights.conversions import Conversion
from megatron_rc.launch.weights.entries import File, Flags, Only, Row

# A directory whose numbers are stored in another way (FP8 with scales, GPTQ, …) would be read as something else.
_OF_EVERY_FAMILY: tuple[Row, ...] = (Only("quantization_config", None),)


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter.

    Attributes:
        megatron: its names: that of the local modules first, then Transformer Engine's where they differ.
        hugging_face: the tensors that it holds.
        conversion: between the two.
        is_float32: it is so in whatever dtype the model computes.
        holds: whether a run's model has the parameter; None: every one does.
    """

    megatron: tuple[str, ...]
    hugging_face: tuple[str, ...]
    conversion: Conversion
    is_float32: bool = False
    holds: Callable[[RunConfig], bool] | None = None


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
        config_class: name of its config in ``transformers``.
        fields: the entries of its ``config.json`` that are settings of a run, for reading and for writing.
        embedding: rules of the first stage.
        layer: of every layer.
        dense_layer: besides, of one without experts.
        expert_layer: besides, of one with experts, without these.
        head: of the last stage.
        untied_head: of an output layer with weights of its own.
        expert: of every expert.
        expert_names: of every expert in files; goes with ``expert``.
        in_bridge: ``--weights-bridge`` converts it as it is built here.

    Raises:
        ValueError: experts without their names, or the names without experts.
    """

    name: str
    config_class: str
    fields: tuple[Row, ...]
    embedding: tuple[Rule, ...]
    layer: tuple[Rule, ...]
    head: tuple[Rule, ...]
    untied_head: tuple[Rule, ...]
    dense_layer: tuple[Rule, ...] = ()
    expert_layer: tuple[Rule, ...] = ()
    expert: tuple[Rule, ...] = ()
    expert_names: ExpertNames | None = None
    in_bridge: bool = False

    def __post_init__(self) -> None:
        if bool(self.expert) != (self.expert_names is not None):
            raise ValueError(f"family {self.name}: expert and expert_names go together, give both or neither")

    def read(self, file: File) -> Flags:
        """What a ``config.json`` says of the model, as flags.

        Raises:
            KeyError: an entry is missing.
            UnknownFeatureError: our GPTModel would compute something else.
        """
        flags: Flags = {"hf-model-type": self.name}
        for row in (*_OF_EVERY_FAMILY, *self.fields):
            flags |= row.read(file)
        return flags

    def matches(self, config: RunConfig) -> bool:
        """Whether a run's model is of this family, by its shape."""
        return all(row.fits(config) for row in self.fields)

    def hugging_face_config(self, config: RunConfig) -> Any:
        """The ``transformers`` config of such a model."""
        import transformers

        check_transformers()
        values: dict[str, Any] = {}
        for row in self.fields:
            values |= row.write(config)
        return getattr(transformers, self.config_class)(**values)


def check_transformers() -> None:
    """Configs of transformers 4 take the rotary base by another name, and would keep their own in its place.

    Raises:
        ConfigurationError: that is what is installed, as another package may have asked for it.
    """
    require("transformers", "the conversion of weights", "launch")
    installed = metadata.version("transformers")
    if int(installed.partition(".")[0]) < 5:
        raise ConfigurationError(
            f"transformers {installed} is installed, which takes rotary frequencies of these models for others: "
            "pip install 'transformers>=5'"
        )


def experts_of(config: RunConfig) -> ExpertSection:
    """The experts of a model that has some."""
    if config.experts is None:
        raise RuntimeError("a dense model has no experts")
    return config.experts
