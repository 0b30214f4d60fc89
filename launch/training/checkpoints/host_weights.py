"""Copies of the policy's weights in host memory, for checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron_rc.launch.training.checkpoints.state import load_model, model_state
from megatron_rc.launch.training.offload import exchanged


class HostWeights:
    """This rank's share of a copy that does not train; on the device it can replace the policy's weights.

    Args:
        name: prefix of the entries in a checkpoint.
        chunks: from ``host_copy``; empty if no copy is wanted.
        version: see below.

    Attributes:
        version: optimizer steps that made these weights; −1: not set yet.
    """

    def __init__(self, name: str, chunks: Sequence[torch.nn.Module], version: int) -> None:
        self.name, self.chunks, self.version = name, chunks, version

    @contextmanager
    def in_place_of(self, chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Give the policy these weights inside the block; afterwards it has its own, bit for bit."""
        with exchanged(chunks, self.chunks):
            yield

    def copy(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Copy the policy's present weights."""
        for own, chunk in zip(self.chunks, chunks, strict=True):
            own.load_state_dict(chunk.state_dict())

    def state(self) -> dict[str, Any]:
        """Return the state to save; empty before the first copy."""
        return self.wanted_state() | {f"{self.name}_version": self.version} if self.version >= 0 else {}

    def wanted_state(self) -> dict[str, Any]:
        """Return the sharded state to load."""
        return model_state(self.chunks, self.name)

    def load(self, loaded: dict[str, Any]) -> None:
        """Take the copy from a loaded state."""
        load_model(self.chunks, loaded, self.name)
        self.version = int(loaded[f"{self.name}_version"])
