"""Which process groups hold the other parts of a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

Group = dist.ProcessGroup


@dataclass(frozen=True)
class ParallelGroups:
    """The process groups of one rank; ``None`` means that nothing is split that way (size 1).

    Attributes:
        tp: tensor parallel: ranks that hold the other vocabulary rows of the same tokens.
        cp: context parallel: ranks that hold the other slices of the same sequences.
        dp_cp: data and context parallel together: all ranks that hold different tokens.
        dp: data parallel: ranks that hold other sequences, at the same slice.
        pp: pipeline parallel: the stages that work on the same tokens, last stage last.
    """

    tp: Group | None = None
    cp: Group | None = None
    dp_cp: Group | None = None
    dp: Group | None = None
    pp: Group | None = None

    @classmethod
    def from_megatron(cls) -> ParallelGroups:
        """The groups of ``megatron.core.parallel_state``.

        Raises:
            RuntimeError: ``initialize_model_parallel`` has not been called.
        """
        from megatron.core import parallel_state

        if not parallel_state.model_parallel_is_initialized():
            raise RuntimeError("megatron.core.parallel_state has no groups yet: call initialize_model_parallel first")
        return cls(
            tp=parallel_state.get_tensor_model_parallel_group(),
            cp=parallel_state.get_context_parallel_group(),
            dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
            dp=parallel_state.get_data_parallel_group(),
            pp=parallel_state.get_pipeline_model_parallel_group(),
        )

    @property
    def is_last_stage(self) -> bool:
        """True on the ranks of the last pipeline stage, the ones that hold log-probs."""
        return group_rank(self.pp) == group_size(self.pp) - 1


def group_size(group: Group | None) -> int:
    """Number of ranks; 1 for ``None``."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: Group | None) -> int:
    """This process's rank inside the group; 0 for ``None``."""
    return 0 if group is None else dist.get_rank(group)


def group_device(group: Group | None) -> torch.device:
    """The device whose tensors a group sends: this process's GPU where its backend is nccl, else the CPU."""
    if group is not None and "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
