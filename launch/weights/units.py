"""Which rules apply where: the parameters of every layer, stage and model chunk."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_rc.launch.weights.families import Rule, find_family


@dataclass(frozen=True)
class Unit:
    """Rules whose parameters lie on one stage, in one model chunk.

    Attributes:
        stage: pipeline rank of the owner.
        chunk: its model chunk.
        prefix: of the Megatron names.
        layer: global layer number, for the Hugging Face names.
        rules: what to convert.
    """

    stage: int
    chunk: int
    prefix: str
    layer: int
    rules: tuple[Rule, ...]


def units_of(args: argparse.Namespace) -> list[Unit]:
    """Where each parameter of the model lies, in the order of the layers."""
    family = find_family(args)
    if family is None:
        raise RuntimeError("weights have Hugging Face names only after validate_args()")
    stages = args.pipeline_model_parallel_size
    chunks = args.virtual_pipeline_model_parallel_size or 1
    layers = args.num_layers // (stages * chunks)
    units = [Unit(0, 0, "", 0, family.embedding)]
    for layer in range(args.num_layers):
        chunk, stage = divmod(layer // layers, stages)
        units.append(Unit(stage, chunk, f"decoder.layers.{layer % layers}.", layer, family.layer))
    head = family.head + (family.untied_head if args.untie_embeddings_and_output_weights else ())
    return [*units, Unit(stages - 1, chunks - 1, "", 0, head)]


def check_complete(parameters: Sequence[dict[str, Tensor]], units: Sequence[Unit]) -> None:
    """Raise RuntimeError for a parameter of this rank, by chunk and name, that no rule names."""
    covered = {(unit.chunk, unit.prefix + name) for unit in units for rule in unit.rules for name in rule.megatron}
    # With tied embeddings the last stage holds a copy of the first stage's, kept equal by Megatron.
    covered |= {(chunk, "output_layer.weight") for chunk in range(len(parameters))}
    left = [name for chunk, named in enumerate(parameters) for name in named if (chunk, name) not in covered]
    if left:
        raise RuntimeError(f"the model's parameter {left[0]} has no Hugging Face name: add a rule to its family")


def find_parameter(parameters: dict[str, Tensor], prefix: str, rule: Rule) -> Tensor:
    """The parameter of a rule, under any of its names."""
    for name in rule.megatron:
        if prefix + name in parameters:
            return parameters[prefix + name]
    raise RuntimeError(f"the model has no parameter {prefix + rule.megatron[0]}")
