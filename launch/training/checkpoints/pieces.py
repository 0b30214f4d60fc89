"""Writing of one checkpoint: Megatron's sharded state as files of PyTorch's distributed format, and their index."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import common as common_strategies
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megatron_rc.launch.errors import one_line
from megatron_rc.launch.training.checkpoints.reader import COMMON_ENTRY, COMMON_FILE, sizes_of

_FORMAT = CheckpointingConfig("torch_dist", 1)
# Until megatron-core 0.18 the values that all ranks share are a file of their own.
_HAS_COMMON_FILE = hasattr(common_strategies, "TorchCommonSaveStrategy")


class Pieces(DefaultSavePlanner):
    """This rank's pieces of a sharded state, in host memory.

    ``common`` has the values that all ranks share; None: they are a piece.

    Collectives: Megatron's check that every piece has one owner.
    """

    def __init__(self, state: dict[str, Any], folder: Path) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.folder, self.common = folder, None
        sharded, common = save_preprocess(state)
        if _HAS_COMMON_FILE:
            self.common = common
        else:
            sharded[COMMON_ENTRY] = ShardedObject(COMMON_ENTRY, common, (1,), (0,), replica_id=dist.get_rank())
        own = [piece for piece in nested_values(sharded) if is_main_replica(piece.replica_id)]
        described = [_content(piece) for piece in own]
        self.own_plan = SavePlan([item for item, _ in described])
        self._contents = {item.index: content for item, content in described}

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return the content of a piece."""
        return self._contents[write_item.index]

    def write(self) -> list[WriteResult]:
        """Write this rank's file, by any process that has the pieces; return the place of each piece."""
        writer = _writer(self.folder)
        # PyTorch numbers files by the plan's position.
        plan = writer.prepare_global_plan([self.own_plan] * (dist.get_rank() + 1))[-1]
        try:
            return list(writer.write_data(plan, self).value()) if self._contents else []
        except RuntimeError as error:
            # PyTorch closes its archive during the file system's error, and raises another one.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise

    def gathered(self) -> list[SavePlan]:
        """Return the plans of all ranks on rank 0, none elsewhere. Collectives: one gather."""
        plans: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(self.own_plan, plans, dst=0)
        return plans or []


def write_common(pieces: Pieces) -> None:
    """Write the values that all ranks share; on rank 0 alone. OSError if the file cannot be written."""
    if pieces.common is not None:
        # To memory first: PyTorch does not say why it cannot write to a path.
        content = io.BytesIO()
        torch.save(pieces.common, content)
        (pieces.folder / COMMON_FILE).write_bytes(content.getbuffer())


def write_index(folder: Path, index: Metadata, written: list[list[WriteResult]]) -> None:
    """Write PyTorch's index, with the places of each rank's pieces, and Megatron's mark of the format; on rank 0 alone.

    Raises OSError if a file cannot be written.
    """
    _writer(folder).finish(index, written)
    save_config(_FORMAT, str(folder))


def reason_of(error: BaseException) -> str:
    """Return the cause of an error as one line; for the file system's errors the file and its reason."""
    if isinstance(error, OSError) and error.strerror:
        return f"{Path(str(error.filename)).name}: {error.strerror}" if error.filename else error.strerror
    return one_line(error)


def _writer(folder: Path) -> FileSystemWriter:
    # One thread, since errors of others are lost; nothing to copy ahead, since all is in host memory.
    writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(is_coordinator=dist.get_rank() == 0)
    return writer


def _content(piece: ShardedTensor | ShardedObject) -> tuple[WriteItem, Tensor | io.BytesIO]:
    """Return PyTorch's description of a piece, and its content in host memory."""
    if isinstance(piece, ShardedObject):
        stored = io.BytesIO()
        # A list, as Megatron has it.
        torch.save([piece.data], stored)
        return WriteItem(MetadataIndex(piece.unique_key), WriteItemType.BYTE_IO), stored
    tensor = piece.data.detach()
    if tensor.is_cuda and "dequantize" in type(tensor).__dict__:
        tensor = tensor.dequantize()
    tensor = tensor.cpu().contiguous().view(sizes_of(piece))
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        # Here and not in the process that writes: PyTorch's threads do not live on in a fork.
        tensor = tensor.clone()
    chunk = ChunkStorageMetadata(torch.Size(piece.global_offset), tensor.shape)
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor), torch.Size(piece.global_shape))
    return WriteItem(MetadataIndex(piece.key, chunk.offsets), WriteItemType.SHARD, tensor_data=data), tensor
