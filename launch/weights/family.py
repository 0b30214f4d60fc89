"""Model families: the table of one Hugging Face architecture for conversion to GPTModel and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from megatron_rc.launch.errors import ConfigurationError, require
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.megatron import ExpertSection
from megatron_rc.launch.weights.conversions import COLUMNS, GATE_AND_UP, Conversion
from megatron_rc.launch.weights.entries import File, Flags, Row, only

# Quantized weights (FP8 with scales, GPTQ, …) would be misread.
_NOT_QUANTIZED = only("quantization_config", None)


@dataclass(frozen=True)
class Rule:
    """Rule for one Megatron parameter."""

    megatron: tuple[str, ...]  # its names: in the local modules, and in Transformer Engine's modules if that differs
    hugging_face: tuple[str, ...]  # names of the Hugging Face tensors that it holds
    conversion: Conversion  # conversion between the parameter and these tensors
    is_float32: bool = False  # whether it is float32 whatever the model's dtype
    holds: Callable[[RunConfig], bool] | None = None  # tells whether a run's model has the parameter; None: always


@dataclass(frozen=True)
class ExpertNames:
    """Names in files of a layer's block of experts, and of an expert's projections."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def gated_mlp(megatron: str, hugging_face: str, names: ExpertNames = ExpertNames()) -> tuple[Rule, ...]:
    """Rules of a gated MLP: two Megatron parameters, three Hugging Face tensors."""
    gate, up, down = (f"{hugging_face}{name}.weight" for name in (names.gate, names.up, names.down))
    return (
        Rule((f"{megatron}linear_fc1.weight",), (gate, up), GATE_AND_UP),
        Rule((f"{megatron}linear_fc2.weight",), (down,), COLUMNS),
    )


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture. Megatron names in its rules are relative to a layer or an expert.

    Hugging Face names are the names in files, which engines read; ``{layer}`` and ``{expert}`` in them are global
    numbers from 0. Modules of transformers may hold several of these tensors in one parameter.
    """

    name: str  # ``model_type`` in ``config.json``
    config_class: str  # name of the config class in ``transformers``
    fields: tuple[Row, ...]  # rows for the entries of ``config.json``
    embedding: tuple[Rule, ...]  # rules of the first stage
    layer: tuple[Rule, ...]  # rules of every layer
    head: tuple[Rule, ...]  # rules of the last stage
    untied_head: tuple[Rule, ...]  # rules of an output layer that does not share the embedding's weights
    dense_layer: tuple[Rule, ...] = ()  # further rules of a layer without experts
    expert_layer: tuple[Rule, ...] = ()  # further rules of a layer with experts, the experts excepted
    # Names of the experts in files, which have separate tensors; None: there are no experts, or they are stacked.
    expert_names: ExpertNames | None = None
    # Rules of an expert whose tensors are entries of stacked ones (``stacked_tensors``).
    stacked_expert: tuple[Rule, ...] = ()
    quantization: Row = _NOT_QUANTIZED  # row of the files' quantization
    in_bridge: bool = False  # whether ``--weights-bridge`` can convert this family

    @property
    def expert(self) -> tuple[Rule, ...]:
        """Rules of every expert; ``{local}`` in Megatron's names is its number among the experts of a rank.

        Transformer Engine's grouped products keep a parameter for each expert in one module.
        """
        names = self.expert_names
        if names is None:
            return self.stacked_expert
        alone = gated_mlp("local_experts.{local}.", f"model.layers.{{layer}}.{names.block}.experts.{{expert}}.", names)
        grouped = ("linear_fc1.weight{local}", "linear_fc2.weight{local}")
        return tuple(
            replace(rule, megatron=(*rule.megatron, other)) for rule, other in zip(alone, grouped, strict=True)
        )

    def read(self, file: File) -> Flags:
        """Flags of the model that a ``config.json`` describes; errors as in :meth:`Row.read`."""
        flags: Flags = {"hf-model-type": self.name}
        for row in (self.quantization, *self.fields):
            flags |= row.read(file)
        return flags

    def matches(self, config: RunConfig) -> bool:
        """Whether a run's settings describe a model of this family."""
        return all(row.fits(config) for row in self.fields)

    def hugging_face_config(self, config: RunConfig) -> Any:
        """Config in ``transformers`` of a run's model."""
        import transformers

        check_transformers()
        # The classes' own padding tokens may lie outside of the vocabulary; the caller sets the tokens of the run.
        values: dict[str, Any] = {"pad_token_id": None}
        for row in self.fields:
            values |= row.write(config)
        return getattr(transformers, self.config_class)(**values)


def check_transformers() -> None:
    """Refuse transformers 4, whose configs would silently keep their own rotary base."""
    require("transformers", "the conversion of weights", "launch")
    installed = metadata.version("transformers")
    if int(installed.partition(".")[0]) < 5:
        raise ConfigurationError(
            f"transformers {installed} is installed, which misreads the rotary frequencies of these models: "
            "pip install 'transformers>=5'"
        )


def experts_of(config: RunConfig) -> ExpertSection:
    """The run's expert settings; raises RuntimeError for a dense model."""
    if config.experts is None:
        raise RuntimeError("a dense model has no experts")
    return config.experts
