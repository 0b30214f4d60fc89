"""The process groups that hold the other parts of a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_rc.parallel.arguments import check_kind

Group = dist.ProcessGroup
GROUPS_REMEDY = "ParallelGroups.from_megatron(), or ParallelGroups() if nothing is split"


@dataclass(frozen=True)
class ParallelGroups:
    """The process groups of one rank; ``None`` is a group of size 1: nothing is split that way.

    Attributes:
        tp: tensor parallel: ranks that hold other vocabulary rows of the same tokens.
        cp: context parallel: ranks that hold other slices of the same sequences.
        dp_cp: data and context parallel together: all ranks that hold different tokens.
        dp: data parallel: ranks that hold other sequences, at the same slice.
        pp: pipeline parallel: the stages that work on the same tokens, in order.
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
        # Imported here, so that the library can be imported without Megatron.
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

    @classmethod
    def given(cls, groups: ParallelGroups | None) -> ParallelGroups:
        """The groups that a caller passed; for None, groups of size 1.

        Raises:
            ValueError: ``groups`` is neither None nor a ParallelGroups.
        """
        if groups is None:
            return cls()
        check_kind("groups", groups, cls, GROUPS_REMEDY)
        return groups

    def check_cut(self, cp_rank: int, cp_size: int) -> None:
        """Raise ValueError unless a layout's rank and size are this process's rank in ``cp`` and its size."""
        size = group_size(self.cp)
        rank = group_rank(self.cp)
        if (cp_size, cp_rank) != (size, rank):
            raise ValueError(
                f"the layout was made for rank {cp_rank} of {cp_size} context-parallel ranks; this process is rank "
                f"{rank} of {size} in groups.cp: give the layout cp_rank={rank} and cp_size={size}, or the CP group of "
                "its sequences, cp_group=, if that is another one"
            )

    def check_sums(self, *cp_groups: Group | None) -> None:
        """Raise ValueError if ``dp_cp`` cannot hold all ranks with different tokens: sums over it would miss some.

        These are the ranks of ``cp`` and ``dp``, and of ``cp_groups``, the CP groups that layouts name themselves.
        """
        cp_size = group_size(self.cp)
        dp_size = group_size(self.dp)
        dp_cp_size = group_size(self.dp_cp)
        # Without a dp group its size is unknown: dp_cp may then be any multiple of cp.
        wrong_product = self.dp is not None and dp_cp_size != cp_size * dp_size
        if dp_cp_size % (cp_size * dp_size) or wrong_product:
            raise ValueError(
                f"groups.cp has {cp_size} ranks, groups.dp {dp_size}, groups.dp_cp {dp_cp_size}: dp_cp must hold all "
                "ranks with different tokens, cp times dp of them; without data parallelism pass the cp group itself"
            )

        dp_cp_ranks = group_ranks(self.dp_cp)
        for cp_group in set(cp_groups) - {None, self.dp_cp}:
            cp_ranks = group_ranks(cp_group)
            # A group of one rank shares no sequence with another rank.
            if len(cp_ranks) > 1 and not set(cp_ranks) <= set(dp_cp_ranks):
                raise ValueError(
                    f"the layout's cp_group has the ranks {cp_ranks}, groups.dp_cp {dp_cp_ranks}: pass a dp_cp that "
                    "holds all ranks with different tokens"
                )

    @property
    def is_last_stage(self) -> bool:
        """True on the ranks of the last pipeline stage, which hold the log-probs."""
        return group_rank(self.pp) == group_size(self.pp) - 1

    @property
    def is_first_of_replica(self) -> bool:
        """True on the first rank of each data-parallel replica: rank 0 of ``tp``, ``cp`` and ``pp``."""
        return group_rank(self.tp) == group_rank(self.cp) == group_rank(self.pp) == 0


def group_size(group: Group | None) -> int:
    """Number of ranks in a group; 1 for ``None``."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: Group | None) -> int:
    """Rank of this process in a group; 0 for ``None``."""
    return 0 if group is None else dist.get_rank(group)


def group_ranks(group: Group | None) -> list[int]:
    """Global ranks of a group's processes, in the group's order; an empty list for ``None``."""
    return [] if group is None else dist.get_process_group_ranks(group)


def group_device(group: Group | None) -> torch.device:
    """The device whose tensors a group can reduce: this process's GPU for the nccl backend, else the CPU."""
    # A group may have several backends, as in "cpu:gloo,cuda:nccl".
    if group is not None and "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
