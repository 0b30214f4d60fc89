"""Reading of one checkpoint: PyTorch's files into Megatron's sharded state, whatever layout wrote them.

Each rank reads the pieces that it needs. Nothing here is a collective.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import dict_utils
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base, force_all_tensors_to_non_fp8
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_rc.launch.training.checkpoints.unpickling import (
    ENTRY,
    UnsafeFileError,
    load_entry,
    load_plain,
    read_index,
    refusal,
)

COMMON_FILE, COMMON_ENTRY = "common.pt", "common_state"


class CheckpointReader:
    """Reader of one checkpoint that runs no code of its files; ``index`` is PyTorch's.

    Raises:
        UnsafeFileError: the index cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.index = folder, read_index(folder / ".metadata")
        self._files = FileSystemReader(folder)
        self._files.set_up_storage_reader(self.index, is_coordinator=True)

    def common(self) -> dict[str, Any]:
        """Read the values that all ranks share: a file, or an entry since megatron-core 0.19."""
        path = self.folder / COMMON_FILE
        if path.is_file():
            return dict(load_plain(path, path.name))
        name = ShardedObject(COMMON_ENTRY, None, (1,), (0,)).unique_key
        return dict(self.read([], [name])[name][0])

    def state(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Return a sharded state with values, and the values that all ranks share.

        Tensors are written into the memory of ``wanted``, Megatron's sharded state of this rank.

        Raises:
            OSError, ValueError: the files cannot be read, or do not hold all of it.
        """
        force_all_tensors_to_non_fp8(wanted)
        sharded, local, factories = load_preprocess(wanted)
        loaded = self.common()
        dict_utils.merge(loaded, local)
        sharded, _ = extract_sharded_base(sharded)
        tensors = [one for one in dict_utils.nested_values(sharded) if isinstance(one, ShardedTensor)]
        objects = [one for one in dict_utils.nested_values(sharded) if isinstance(one, ShardedObject)]
        targets = {id(one): _target(one) for one in tensors}
        found = self.read([(one, targets[id(one)]) for one in tensors], [one.unique_key for one in objects])

        def value(one: ShardedTensor | ShardedObject) -> Any:
            return targets[id(one)] if isinstance(one, ShardedTensor) else found[one.unique_key][0]

        dict_utils.merge(loaded, dict_utils.dict_list_map_outplace(value, sharded))
        return dict(apply_factory_merges(loaded, factories))

    def stored(self, part: ShardedTensor) -> TensorStorageMetadata:
        """Return the index's entry of a tensor; ValueError if there is none, or one of another shape."""
        found = self.index.state_dict_metadata.get(part.key)
        if not isinstance(found, TensorStorageMetadata):
            raise ValueError(f"{self.folder} holds no tensor {part.key}: it is not a checkpoint of this model")
        if tuple(found.size) != tuple(part.global_shape) and not part.allow_shape_mismatch:
            raise ValueError(
                f"{self.folder}: {part.key} is {tuple(found.size)}, and by its settings {tuple(part.global_shape)}"
            )
        return found

    def read(self, parts: Iterable[tuple[ShardedTensor, Tensor]], names: Iterable[str] = ()) -> dict[str, Any]:
        """Write parts of stored tensors into memory; return the entries of these names, which are no tensors.

        Raises:
            OSError, ValueError: the files cannot be read, or do not hold all of it.
        """
        planner = _Targets()
        items = [item for part, tensor in parts for item in self._tensor_items(part, planner.add(part, tensor))]
        items += [self._object_item(name) for name in names]
        try:
            self._files.read_data(LoadPlan(items), planner).wait()
        except (OSError, UnsafeFileError):
            raise
        except Exception as error:  # damaged files raise errors of many kinds
            raise refusal(ENTRY, error) from error
        return planner.objects

    def _tensor_items(self, part: ShardedTensor, target: int) -> list[ReadItem]:
        region = ChunkStorageMetadata(torch.Size(part.global_offset), sizes_of(part))
        items = create_read_items_for_chunk_list(part.key, self.stored(part), [region])
        missing = math.prod(region.sizes) - sum(math.prod(item.lengths) for item in items)
        if missing and not part.allow_shape_mismatch:
            raise ValueError(f"{self.folder}: {missing} numbers of {part.key} are in no file")
        index = MetadataIndex(part.key, index=target)
        return [dataclasses.replace(item, dest_index=index) for item in items]

    def _object_item(self, name: str) -> ReadItem:
        if name not in self.index.state_dict_metadata:
            raise ValueError(f"{self.folder} holds no entry {name}: it is not a checkpoint of this model")
        index, none = MetadataIndex(name), torch.Size((0,))
        return ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none)


class _Targets(DefaultLoadPlanner):
    """Planner that lets PyTorch's reader write each piece to its place in one of several tensors.

    ``objects`` has the entries that are no tensors, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, Any] = {}
        self._tensors: list[Tensor] = []

    def add(self, part: ShardedTensor, tensor: Tensor) -> int:
        """Add a target; return its number."""
        self._tensors.append(tensor.view(sizes_of(part)))
        return len(self._tensors) - 1

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the target of a piece."""
        return self._tensors[index.index or 0]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read an entry that is no tensor."""
        self.objects[read_item.dest_index.fqn] = load_entry(value)


def sizes_of(part: ShardedTensor) -> torch.Size:
    """Return the shape of a part inside the whole tensor, with the axes that Megatron puts in front."""
    return torch.Size((1,) * part.prepend_axis_num + tuple(part.local_shape))


def _target(part: ShardedTensor) -> Tensor:
    """Return the memory that a part is read into; zeros if the stored tensor may be smaller."""
    if part.data is None:
        part.init_data(torch.device("cpu"))
    target: Tensor = part.data.detach().contiguous()
    return target.zero_() if part.allow_shape_mismatch else target
