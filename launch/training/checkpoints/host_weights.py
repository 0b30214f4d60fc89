"""A copy of the policy's weights in host memory, which checkpoints keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron_rc.launch.training.checkpoints.state import load_model, model_state
from megatron_rc.launch.training.offload import exchanged


class HostWeights:
    """This rank's share of such a copy, which does not train; on the device it takes the place of the policy's.

    Args:
        name: of its entries in a checkpoint.
        chunks: as ``host_copy`` makes them; none where no copy is wanted.
        version: see below.

    Attributes:
        version: optimizer steps of this run that lie behind these weights; −1: they are nobody's yet.
    """

    def __init__(self, name: str, chunks: Sequence[torch.nn.Module], version: int) -> None:
        self.name, self.chunks, self.version = name, chunks, version

    @contextmanager
    def in_place_of(self, chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Inside, the policy has these weights; afterwards its own, to the last bit."""
        with exchanged(chunks, self.chunks):
            yield

    def copy(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Take the weights that the policy has now."""
        for own, chunk in zip(self.chunks, chunks, strict=True):
            own.load_state_dict(chunk.state_dict())

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return self.wanted_state() | {f"{self.name}_version": self.version} if self.version >= 0 else {}

    def wanted_state(self) -> dict[str, Any]:
        """What is asked of a checkpoint that has one."""
        return model_state(self.chunks, self.name)

    def load(self, loaded: dict[str, Any]) -> None:
        """Take it from what was read."""
        load_model(self.chunks, loaded, self.name)
        self.version = int(loaded[f"{self.name}_version"])
