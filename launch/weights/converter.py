"""Conversion of a run's weights by our own tables, mbridge or Megatron-Bridge, as ``--weights-bridge`` says.

mbridge knows Transformer Engine's layers only. Megatron-Bridge makes the layers too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.weights.checkpoint_names import checkpoint_tensors, empty_model
from megatron_rc.launch.weights.export import export_weights
from megatron_rc.launch.weights.families import family_of
from megatron_rc.launch.weights.load import load_weights, open_weights
from megatron_rc.launch.weights.megatron_bridge import (
    described_by_directory,
    export_bridged,
    is_bridged,
    load_bridged,
)
from megatron_rc.launch.weights.units import ExpertGroups, names_of, units_of
from megatron_rc.parallel.groups import ParallelGroups

MBRIDGE = "mbridge"


def described_model(config: RunConfig) -> Any:
    """The ``transformers`` config of a run's model."""
    if is_bridged(config):
        return described_by_directory(config)
    return family_of(config).hugging_face_config(config)


def export_model(
    chunks: Sequence[torch.nn.Module], config: RunConfig, groups: ParallelGroups
) -> Iterator[tuple[str, Tensor]]:
    """Weights for the engine; every rank must exhaust the iterator. See :func:`export_weights`."""
    if is_bridged(config):
        return export_bridged(chunks, config, groups)
    if config.checkpoints.weights_bridge == MBRIDGE:
        return bridge_export(chunks, config, groups)
    return export_weights(chunks, config, groups, ExpertGroups.of_megatron())


def load_model(
    chunks: Sequence[torch.nn.Module], config: RunConfig, groups: ParallelGroups, folder: str | Path
) -> None:
    """Load this rank's weights from a Hugging Face directory. See :func:`load_weights`."""
    if is_bridged(config):
        load_bridged(chunks, config, groups, folder)
        return
    if config.checkpoints.weights_bridge == MBRIDGE:
        bridge_load(chunks, config, folder)
        return
    load_weights(chunks, config, groups, folder, ExpertGroups.of_megatron())


def bridge_export(
    chunks: Sequence[torch.nn.Module], config: RunConfig, groups: ParallelGroups
) -> Iterator[tuple[str, Tensor]]:
    """Export weights as :func:`export_weights` does; mbridge gives every tensor to every rank."""
    bridge = _make_bridge(config)  # not inside the generator, so that every rank raises its errors now
    is_first = groups.is_first_of_replica
    return _stream(bridge.export_weights(list(chunks)), names_of(units_of(config)), is_first)


def _stream(tensors: Iterable[tuple[str, Tensor]], missing: set[str], is_first: bool) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        # mbridge repeats tied embeddings from the last stage.
        if is_first and name in missing:
            missing.discard(name)
            yield name, tensor.detach().clone(memory_format=torch.contiguous_format)


def bridge_load(chunks: Sequence[torch.nn.Module], config: RunConfig, folder: str | Path) -> None:
    """Load weights as :func:`load_weights` does; checks all shapes before mbridge's first collective."""
    bridge = _make_bridge(config)
    shapes = checkpoint_tensors(empty_model(family_of(config).hugging_face_config(config)))
    with open_weights(folder) as files:
        for name in sorted(names_of(units_of(config))):
            files.check(name, tuple(shapes[name].shape))
    bridge.load_weights(list(chunks), str(folder))


def _make_bridge(config: RunConfig) -> Any:
    from mbridge import AutoBridge

    multiple = config.model.make_vocab_size_divisible_by * config.parallel.tensor_model_parallel_size
    described = family_of(config).hugging_face_config(config)
    bridge = AutoBridge.from_config(described, dtype=config.dtype, make_vocab_size_divisible_by=multiple)
    # mbridge sets these only for models that it builds itself.
    bridge.vocab_size = config.model.vocab_size
    bridge.padded_vocab_size = config.model.padded_vocab_size
    return bridge
