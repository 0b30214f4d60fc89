"""Parameters of a checkpoint, whatever layout wrote it, read one at a time in a process without other ranks."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rc.launch.training.checkpoints.state import sharding_options
from megatron_rc.launch.training.checkpoints.strategy import reason_of
from megatron_rc.launch.training.checkpoints.unpickling import check_pickles
from megatron_rc.launch.weights.named_weights import named_weights


class CheckpointParameters(Mapping[str, Tensor]):
    """A model's parameters by name; each look-up reads the files and keeps nothing.

    The model is whole in this process; its parameters need no memory (device ``meta``).

    Raises:
        ValueError: a pickle of the folder names code, or the files hold another model.
    """

    def __init__(self, model: torch.nn.Module, folder: Path) -> None:
        self._folder = folder
        state: dict[str, Any] = model.sharded_state_dict(metadata=sharding_options())  # type: ignore[operator]
        self._sharded = {name: state[name] for name in named_weights(model)}
        try:
            names = check_pickles(folder).state_dict_metadata
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error
        missing = [part.key for part in self._sharded.values() if part.key not in names]
        if missing:
            raise ValueError(f"{folder} holds no tensor {missing[0]}: it is not a checkpoint of this model")

    def __getitem__(self, name: str) -> Tensor:
        """Read one parameter; ValueError if the file is missing or broken."""
        sharded = self._sharded[name]
        tensor = torch.empty_like(sharded.data, device="cpu")
        parts = {str(number): _as_region(part) for number, part in enumerate(_parts(sharded, tensor))}
        try:
            with warnings.catch_warnings():
                # Newer versions of Megatron-Core and PyTorch say that this process is alone, which is meant.
                warnings.simplefilter("ignore", UserWarning)
                dist_checkpointing.load(parts, str(self._folder), validate_access_integrity=False)
        except (Exception, CheckpointException) as error:  # errors of many kinds; CheckpointException is no Exception
            raise ValueError(f"{self._folder}: {name} cannot be read ({reason_of(error)})") from error
        return tensor

    def __iter__(self) -> Iterator[str]:
        """The names of all parameters."""
        return iter(self._sharded)

    def __len__(self) -> int:
        """The number of parameters."""
        return len(self._sharded)


def _parts(sharded: ShardedTensor | ShardedTensorFactory, tensor: Tensor) -> list[ShardedTensor]:
    """Return the stored parts of a parameter as views of the tensor: the files keep gate and up apart."""
    whole = dataclasses.replace(sharded, data=tensor)
    return list(whole.build()) if isinstance(whole, ShardedTensorFactory) else [whole]


def _as_region(part: ShardedTensor) -> ShardedTensor:
    """Return one layer's part of a tensor of all layers as a region, which Megatron reads without the other layers."""
    shape = (1,) * part.prepend_axis_num + tuple(part.local_shape)
    return dataclasses.replace(part, data=part.data.view(shape), local_shape=shape, prepend_axis_num=0)
