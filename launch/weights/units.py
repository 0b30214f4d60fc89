"""Units: the conversion rules of each layer and expert, with the stage and model chunk that own it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.weights.families import family_of
from megatron_rc.launch.weights.family import Family, Rule, experts_of
from megatron_rc.launch.weights.named_weights import named_weights
from megatron_rc.launch.weights.stacked_tensors import name_and_entry
from megatron_rc.parallel.groups import Group, ParallelGroups, group_rank

_PART_OF_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class ExpertGroups:
    """Process groups of the experts of a stage; None: one rank."""

    ep: Group | None = None  # ranks with the other experts of the same layers
    tp: Group | None = None  # ranks with the other shards of the same experts

    @classmethod
    def of_megatron(cls) -> ExpertGroups:
        """Megatron's groups of this rank."""
        from megatron.core import parallel_state

        return cls(parallel_state.get_expert_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group())


@dataclass(frozen=True)
class Unit:
    """Rules whose parameters lie on one stage, in one model chunk: a layer without its experts, or one expert."""

    stage: int  # pipeline rank of the owner
    chunk: int  # model chunk on that rank
    prefix: str  # prefix of the Megatron names; ``{local}`` in a rule's names is ``local``
    layer: int  # global layer number, for the Hugging Face names
    rules: tuple[Rule, ...]  # rules of the parameters
    expert: int = 0  # global number of the expert, for the Hugging Face names; 0 if there is none
    expert_rank: int | None = None  # expert-parallel rank of the owner; None: every rank holds a copy
    local: int = 0  # number of the expert on its owner

    def names(self, rule: Rule) -> list[str]:
        """Hugging Face names of a rule, for experts in a stack with the number of the entry."""
        return [name.format(layer=self.layer, expert=self.expert) for name in rule.hugging_face]

    def parameters(self, rule: Rule) -> list[str]:
        """Megatron names of a rule, one of which its parameter has."""
        return [self.prefix + name.format(local=self.local) for name in rule.megatron]

    def is_here(self, groups: ParallelGroups, experts: ExpertGroups) -> bool:
        """Whether this rank holds the unit's parameters."""
        return self.stage == group_rank(groups.pp) and self.expert_rank in (None, group_rank(experts.ep))

    def tp_group(self, groups: ParallelGroups, experts: ExpertGroups) -> Group | None:
        """Ranks with the shards of the unit's parameters."""
        return groups.tp if self.expert_rank is None else experts.tp


def units_of(config: RunConfig) -> list[Unit]:
    """Units of the whole model, in the order of the layers."""
    family = family_of(config)
    stages = config.parallel.pipeline_model_parallel_size
    chunks = config.parallel.chunks_of_a_stage
    units = [Unit(0, 0, "", 0, family.embedding)]
    layer = 0
    for number, layers in enumerate(config.layers_of_chunks):
        chunk, stage = divmod(number, stages)
        for local in range(layers):
            units += _layer_units(Unit(stage, chunk, f"decoder.layers.{local}.", layer, family.layer), family, config)
            layer += 1
    head = family.head + (family.untied_head if config.model.untie_embeddings_and_output_weights else ())
    units.append(Unit(stages - 1, chunks - 1, "", 0, head))
    return [_hybrid(unit) for unit in units] if config.model.is_hybrid else units


def names_of(units: Iterable[Unit]) -> set[str]:
    """Names in files of the weights of units; a stack has one name for all its entries."""
    return {name_and_entry(name)[0] for unit in units for rule in unit.rules for name in unit.names(rule)}


def _hybrid(unit: Unit) -> Unit:
    """The unit with HybridModel's names of the parameters."""
    rules = [
        replace(rule, megatron=tuple(_hybrid_name(unit.prefix + name) for name in rule.megatron)) for rule in unit.rules
    ]
    return replace(unit, prefix="", rules=tuple(rules))


def _hybrid_name(name: str) -> str:
    """HybridModel's name of a GPTModel's parameter: a layer's attention and its MLP are two layers."""
    found = _PART_OF_LAYER.fullmatch(name)
    if found is None:
        return name.replace("decoder.final_layernorm.", "decoder.final_norm.")
    half = 2 * int(found[1]) + found[2].startswith(("mlp.", "pre_mlp_layernorm."))
    return f"decoder.layers.{half}.{found[2]}"


def _layer_units(layer: Unit, family: Family, config: RunConfig) -> Iterator[Unit]:
    """Units of a layer: itself, then its experts."""
    has_experts = config.layers_with_experts[layer.layer]
    rules = (*family.layer, *(family.expert_layer if has_experts else family.dense_layer))
    yield replace(layer, rules=tuple(rule for rule in rules if rule.holds is None or rule.holds(config)))
    if not has_experts:
        return
    # Each expert-parallel rank owns a contiguous range of experts.
    number = experts_of(config).num_moe_experts
    share = number // config.parallel.expert_model_parallel_size
    rules = family.expert
    for expert in range(number):
        owner, local = divmod(expert, share)
        yield Unit(layer.stage, layer.chunk, f"{layer.prefix}mlp.experts.", layer.layer, rules, expert, owner, local)


def own_weights(chunks: Sequence[torch.nn.Module], units: Sequence[Unit]) -> list[dict[str, Tensor]]:
    """Weights of this rank's model chunks by name; ``units`` are the units that lie on this rank.

    Raises RuntimeError if no rule names a parameter.
    """
    parameters = [named_weights(chunk) for chunk in chunks]
    check_complete(parameters, units)
    return parameters


def check_complete(parameters: Sequence[Mapping[str, Tensor]], units: Sequence[Unit]) -> None:
    """Raise RuntimeError if no rule names a parameter of this rank."""
    covered = {(unit.chunk, name) for unit in units for rule in unit.rules for name in unit.parameters(rule)}
    # With tied embeddings the last stage holds a copy of the embeddings, which Megatron keeps equal.
    covered |= {(chunk, "output_layer.weight") for chunk in range(len(parameters))}
    left = [name for chunk, named in enumerate(parameters) for name in named if (chunk, name) not in covered]
    if left:
        raise RuntimeError(f"the model's parameter {left[0]} has no Hugging Face name: add a rule to its family")


def find_parameter(parameters: Mapping[str, Tensor], unit: Unit, rule: Rule) -> Tensor:
    """Find the parameter of a rule under any of its names; RuntimeError if it is missing."""
    names = unit.parameters(rule)
    for name in names:
        if name in parameters:
            return parameters[name]
    raise RuntimeError(f"the model has no parameter {names[0]}")
