"""mbridge in the place of our tables, for models of Transformer Engine's layers, whose names are all that it knows."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rc.launch.errors import ConfigurationError, require
from megatron_rc.launch.weights.checkpoint_names import checkpoint_tensors, empty_model
from megatron_rc.launch.weights.families import find_family
from megatron_rc.launch.weights.load import open_weights
from megatron_rc.launch.weights.units import units_of
from megatron_rc.parallel.groups import ParallelGroups, group_rank

FAMILIES = ("llama", "qwen2", "qwen3")


def check_bridge(args: argparse.Namespace, engine: bool) -> None:
    """Whether ``--weights-bridge`` can convert this model's weights, and has any to convert."""
    if args.weights_bridge is None:
        return
    user = f"--weights-bridge {args.weights_bridge}"
    if args.transformer_impl != "transformer_engine":
        raise ConfigurationError(
            f"{user} knows the layers of --transformer-impl transformer_engine alone, got {args.transformer_impl}: use "
            "them (pip install 'megatron-rc[gpu]'), or drop it"
        )
    require("mbridge", user, "bridge")
    if not (engine or args.load_hf):
        raise ConfigurationError(f"{user} does nothing without an engine or --load-hf: drop it")
    if args.model_family not in FAMILIES:
        raise ConfigurationError(
            f"{user} converts {', '.join(FAMILIES)} as they are built here, not {args.model_family}: drop it"
        )
    tied = not args.untie_embeddings_and_output_weights
    if args.model_family == "llama" and tied and args.pipeline_model_parallel_size > 1:
        raise ConfigurationError(
            f"{user} wants an output layer of a tied Llama's last stage: use --pipeline-model-parallel-size 1, or drop"
            " it"
        )


def bridge_export(
    chunks: Sequence[torch.nn.Module], args: argparse.Namespace, groups: ParallelGroups
) -> Iterator[tuple[str, Tensor]]:
    """As :func:`export_weights`; the library gives every tensor to every rank."""
    bridge = _make_bridge(args)  # at once, so that what it raises is raised on every rank alike
    is_first = group_rank(groups.tp) == group_rank(groups.cp) == group_rank(groups.pp) == 0
    return _stream(bridge.export_weights(list(chunks)), _names(args), is_first)


def _stream(tensors: Iterable[tuple[str, Tensor]], missing: set[str], is_first: bool) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        # Tied embeddings come once more from the last stage.
        if is_first and name in missing:
            missing.discard(name)
            yield name, tensor.detach().clone(memory_format=torch.contiguous_format)


def bridge_load(chunks: Sequence[torch.nn.Module], args: argparse.Namespace, folder: str | Path) -> None:
    """As :func:`load_weights`; what does not fit is found before the first TP ranks read for the others."""
    bridge = _make_bridge(args)
    family = find_family(args)
    shapes = checkpoint_tensors(empty_model(family.hugging_face_config(args))) if family else {}
    with open_weights(folder) as files:
        for name in sorted(_names(args)):
            files.check(name, tuple(shapes[name].shape))
    bridge.load_weights(list(chunks), str(folder))


def _names(args: argparse.Namespace) -> set[str]:
    return {name for unit in units_of(args) for rule in unit.rules for name in unit.names(rule)}


def _make_bridge(args: argparse.Namespace) -> Any:
    from mbridge import AutoBridge

    family, dtype = find_family(args), torch.bfloat16 if args.bf16 else torch.float32
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    config = family.hugging_face_config(args) if family else None
    bridge = AutoBridge.from_config(config, dtype=dtype, make_vocab_size_divisible_by=multiple)
    # It counts them only for models that it builds itself.
    bridge.vocab_size, bridge.padded_vocab_size = args.vocab_size, args.padded_vocab_size
    return bridge
