"""Conversion of a run's weights by our own tables or by mbridge, as ``--weights-bridge`` says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.weights.bridge import MBRIDGE, bridge_export, bridge_load
from megatron_rc.launch.weights.export import export_weights
from megatron_rc.launch.weights.load import load_weights
from megatron_rc.parallel.groups import ParallelGroups


def export_model(
    chunks: Sequence[torch.nn.Module], config: RunConfig, groups: ParallelGroups
) -> Iterator[tuple[str, Tensor]]:
    """Weights for the engine; every rank must exhaust the iterator. See :func:`export_weights`."""
    if config.checkpoints.weights_bridge == MBRIDGE:
        return bridge_export(chunks, config, groups)
    return export_weights(chunks, config, groups, parallel_state.get_expert_model_parallel_group())


def load_model(
    chunks: Sequence[torch.nn.Module], config: RunConfig, groups: ParallelGroups, folder: str | Path
) -> None:
    """Load this rank's weights from a Hugging Face directory. See :func:`load_weights`."""
    if config.checkpoints.weights_bridge == MBRIDGE:
        bridge_load(chunks, config, folder)
        return
    load_weights(chunks, config, groups, folder, parallel_state.get_expert_model_parallel_group())
