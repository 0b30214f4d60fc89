"""Parameters of a transformers model by their names in files.

Engines and files have separate matrices for each expert; transformers 5 stacks a layer's experts in two parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_rc.launch.weights.families import FAMILIES
from megatron_rc.launch.weights.family import ExpertNames
from megatron_rc.launch.weights.named_weights import named_weights


def checkpoint_tensors(model: Any) -> dict[str, Tensor]:
    """Weights of a transformers model by name in files; tied ones once. Writing to a tensor writes to the model."""
    family = FAMILIES.get(model.config.model_type)
    names = None if family is None else family.expert_names
    tensors: dict[str, Tensor] = {}
    for name, parameter in named_weights(model).items():
        tensors.update({name: parameter} if names is None else _of_experts(name, parameter, names))
    return tensors


def empty_model(config: Any) -> Any:
    """Transformers model of a config on the meta device, for names and shapes."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def checked(weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Pass weights on; ValueError if one is unknown, comes twice, has another shape, or is missing at the end."""
    missing = set(shapes)
    for name, tensor in weights:
        if name not in shapes:
            raise ValueError(f"the rollout model has no weight {name}")
        if name not in missing:
            raise ValueError(f"the rollout model's weight {name} came twice")
        if shapes[name].shape != tensor.shape:
            wanted = tuple(shapes[name].shape)
            given = tuple(tensor.shape)
            raise ValueError(f"the rollout model's weight {name} is {wanted}, got {given}")
        missing.discard(name)
        yield name, tensor
    if missing:
        raise ValueError(f"the rollout model's weight {min(missing)} never came")


def is_expert(name: str) -> bool:
    """Whether a name in a file belongs to an expert."""
    return ".experts." in name


def _of_experts(name: str, parameter: Tensor, names: ExpertNames) -> Iterator[tuple[str, Tensor]]:
    name = name.replace(".mlp.", f".{names.block}.")
    path, _, last = name.rpartition(".")
    if last == "gate_up_proj":
        for expert, both in enumerate(parameter):
            for part, half in zip((names.gate, names.up), both.chunk(2), strict=True):
                yield f"{path}.{expert}.{part}.weight", half
    elif last == "down_proj":
        for expert, one in enumerate(parameter):
            yield f"{path}.{expert}.{names.down}.weight", one
    else:
        yield name, parameter
