"""Megatron's format of checkpoints, written by PyTorch in a thread of the rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as torch_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_rc.launch.errors import one_line

FORMAT = "torch_dist"
FORMAT_VERSION = 1


class ThreadedSaveStrategy(torch_strategies.TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Strategy for ``dist_checkpointing.save(..., async_sharded_save=True)`` without processes.

    Megatron's own strategy forks two writers for each rank, which outlive it and which nobody misses when they die, and
    starts a manager of 300 MB beside them. A thread ends with its rank, and PyTorch's collectives turn an error of one
    rank into an error of all.

    Args:
        group: all ranks, over gloo; used by the thread alone, since training uses the other groups meanwhile.
        on_progress: called before each tensor and object is written.
    """

    def __init__(self, group: ProcessGroup, on_progress: Callable[[], None]) -> None:
        super().__init__(FORMAT, FORMAT_VERSION)
        self.group = group
        self.on_progress = on_progress

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "") -> AsyncRequest:
        """Copy this rank's tensors to the host; ``async_fn`` of the returned request writes them, on all ranks.

        Megatron 0.19 also passes the name of an own way to write, which is not used.
        """
        parts_by_key, _, _ = torch_strategies._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, keep_only_main_replica=True
        )
        for parts in parts_by_key.values():
            for part in parts:
                if isinstance(part, ShardedTensor):
                    part.data = _host_copy(part.data)
        write = partial(
            torch_save,
            torch_strategies.mcore_to_pyt_state_dict(parts_by_key),
            storage_writer=_Writer(checkpoint_dir),
            planner=_Planner(self.on_progress),
            process_group=self.group,
        )
        return AsyncRequest(write, (), [])


class _Planner(torch_strategies.MCoreSavePlanner):  # type: ignore[misc]
    """Megatron's planner that reports progress."""

    def __init__(self, on_progress: Callable[[], None]) -> None:
        super().__init__(flatten_state_dict=False, dedup_replicated_tensors=False)
        self.on_progress = on_progress

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the content of an entry."""
        self.on_progress()
        return super().resolve_data(write_item)


class _Writer(FileSystemWriter):
    """PyTorch's writer of one file a rank; a full disk is an OSError."""

    def __init__(self, folder: str | Path) -> None:
        # All tensors are on the host, so that nothing has to be copied ahead.
        super().__init__(folder, thread_count=1, per_thread_copy_ahead=0)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's entries."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # PyTorch closes its archive while the file system's error is on its way, and raises another one then.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def reason_of(error: BaseException) -> str:
    """Return the cause of an error on one line: of several ranks' errors the first, of a file's its name and reason."""
    if isinstance(error, CheckpointException):
        error, _ = next(iter(error.failures.values()))
    if isinstance(error, OSError) and error.strerror:
        return f"{Path(str(error.filename)).name}: {error.strerror}" if error.filename else error.strerror
    if "iostream error" in str(error):
        # All that PyTorch says when torch.save cannot write to a path.
        return "a file could not be written, as on a full disk"
    return one_line(error)


def _host_copy(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, which later training steps do not change."""
    tensor = tensor.detach()
    if tensor.is_cuda and "dequantize" in type(tensor).__dict__:
        # An fp8 weight of Transformer Engine.
        tensor = tensor.dequantize()
    return torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format).copy_(tensor)
