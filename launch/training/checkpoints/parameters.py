"""The parameters of a checkpoint, whatever layout wrote it, read one at a time in a process without other ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_rc.launch.training.checkpoints.unpickling import read_index, safe_loading
from megatron_rc.launch.weights.named_weights import named_weights


class CheckpointParameters(Mapping[str, Tensor]):
    """A model's parameters by name; looking one up reads it from the files, and nothing here keeps it.

    Args:
        model: a GPTModel that is whole in this process; its parameters need no memory (device ``meta``).
        folder: of one checkpoint.

    Raises:
        ValueError: the files cannot be read, or hold another model.
    """

    def __init__(self, model: torch.nn.Module, folder: Path) -> None:
        self._folder = folder
        names = named_weights(model)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        state: dict[str, Any] = model.sharded_state_dict(metadata={"dp_cp_group": group})  # type: ignore[operator]
        self._stored = {name: state[name] for name in names}
        self._reader = FileSystemReader(folder)
        try:
            self._metadata = read_index(folder / ".metadata")
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        for name in names:
            for part in _parts(self._stored[name], names[name]):
                self._check(part)

    def __getitem__(self, name: str) -> Tensor:
        """Read one parameter.

        Raises:
            KeyError: the model has none of this name.
            ValueError: its file is missing or broken.
        """
        stored = self._stored[name]
        tensor = torch.empty_like(stored.data, device="cpu")
        try:
            with safe_loading():
                for part in _parts(stored, tensor):
                    self._read(part)
        except Exception as error:  # of the many kinds that broken files bring up
            raise ValueError(f"{self._folder}: {name} cannot be read ({_line(error)})") from error
        return tensor

    def __iter__(self) -> Iterator[str]:
        """The names of all parameters."""
        return iter(self._stored)

    def __len__(self) -> int:
        """The number of parameters."""
        return len(self._stored)

    def _check(self, part: ShardedTensor) -> TensorStorageMetadata:
        found = self._metadata.state_dict_metadata.get(part.key)
        if not isinstance(found, TensorStorageMetadata):
            raise ValueError(f"{self._folder} holds no tensor {part.key}: it is not a checkpoint of this model")
        if tuple(found.size) != tuple(part.global_shape):
            raise ValueError(
                f"{self._folder}: {part.key} is {tuple(found.size)}, and by its settings {tuple(part.global_shape)}"
            )
        return found

    def _read(self, part: ShardedTensor) -> None:
        """Fill the part's own memory from the pieces that the ranks of the run have written."""
        target = part.data.view((1,) * part.prepend_axis_num + tuple(part.local_shape))
        offsets = torch.Size(part.global_offset)
        region = ChunkStorageMetadata(offsets=offsets, sizes=target.shape)
        items = create_read_items_for_chunk_list(part.key, self._check(part), [region])
        self._reader.read_data(LoadPlan(items), _Into(target)).wait()


class _Into(LoadPlanner):
    """Lets a reader write the pieces of one region to where they belong in a tensor of its shape."""

    def __init__(self, target: Tensor) -> None:
        self.target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The view of the target that the piece fills."""
        view = self.target
        for dimension, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dimension, start, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """The reader has written to the view already."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """There are tensors alone."""
        raise TypeError(f"{read_item.storage_index} is no tensor")

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        """Nothing: the plan is made."""

    def create_local_plan(self) -> LoadPlan:
        """Nothing: the plan is made."""
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """As it is."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return central_plan


def _parts(stored: ShardedTensor | ShardedTensorFactory, tensor: Tensor) -> list[ShardedTensor]:
    """What the files hold of a parameter, each with its view of the tensor: gate and up lie apart there."""
    whole = dataclasses.replace(stored, data=tensor)
    return list(whole.build()) if isinstance(whole, ShardedTensorFactory) else [whole]


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
