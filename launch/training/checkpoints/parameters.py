"""Parameters of a checkpoint, whatever layout wrote it, read one at a time in a process without other ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from megatron_rc.launch.errors import one_line
from megatron_rc.launch.training.checkpoints.reader import CheckpointReader
from megatron_rc.launch.weights.named_weights import named_weights


class CheckpointParameters(Mapping[str, Tensor]):
    """A model's parameters by name; each look-up reads the files and keeps nothing.

    The model is whole in this process; its parameters need no memory (device ``meta``).

    Raises:
        ValueError: the files cannot be read, or hold another model.
    """

    def __init__(self, model: torch.nn.Module, folder: Path) -> None:
        self._folder = folder
        names = named_weights(model)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        state: dict[str, Any] = model.sharded_state_dict(metadata={"dp_cp_group": group})  # type: ignore[operator]
        self._stored = {name: state[name] for name in names}
        try:
            self._reader = CheckpointReader(folder)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error
        for name in names:
            for part in _parts(self._stored[name], names[name]):
                self._reader.stored(part)

    def __getitem__(self, name: str) -> Tensor:
        """Read one parameter; ValueError if the file is missing or broken."""
        stored = self._stored[name]
        tensor = torch.empty_like(stored.data, device="cpu")
        try:
            self._reader.read([(part, part.data) for part in _parts(stored, tensor)])
        except (OSError, ValueError) as error:
            raise ValueError(f"{self._folder}: {name} cannot be read ({one_line(error)})") from error
        return tensor

    def __iter__(self) -> Iterator[str]:
        """The names of all parameters."""
        return iter(self._stored)

    def __len__(self) -> int:
        """The number of parameters."""
        return len(self._stored)


def _parts(stored: ShardedTensor | ShardedTensorFactory, tensor: Tensor) -> list[ShardedTensor]:
    """Return the stored parts of a parameter as views of the tensor: the files keep gate and up apart."""
    whole = dataclasses.replace(stored, data=tensor)
    return list(whole.build()) if isinstance(whole, ShardedTensorFactory) else [whole]
