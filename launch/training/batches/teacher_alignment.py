"""Results of a teacher with prompts of its own, brought to the policy's tokens by response token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.launch.training.batches.micro_batches import LocalBatch
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.groups import Group, group_rank, group_size


@dataclass(frozen=True)
class TeacherAlignment:
    """The places of the response tokens in the teacher's batch and in the policy's, on the last stage.

    Every rank of CP gets the results at all places of its replica's batch, because a token lies on another rank in the
    teacher's longer row.
    """

    policy: LocalBatch
    teacher: LocalBatch
    shifts: Tensor  # [rows] int64, see TeacherRows
    length: int  # columns of the rollout batch
    groups: ParallelGroups
    sequence_parallel: bool

    def log_probs(self, values: Tensor) -> Tensor:
        """Log-probs of the labels, like the policy's tokens, from those like the teacher's; 0 where there are none.

        Collectives: one SUM of [rows · length] over ``cp``.
        """
        whole = self._whole(values, self.teacher.label_places)
        return _taken(whole, self._places_in_teacher(self.policy.label_places))

    def hidden_states(self, values: Tensor) -> Tensor:
        """Hidden states [micro-batches, s/cp(/tp), b, h] of the policy's micro-batches, from the teacher's.

        Collectives: one SUM of [rows · length, h] over ``cp``, and with SP over ``tp``.
        """
        whole = self._whole(values, self._places_of_hidden(self.teacher))
        if self.sequence_parallel:
            _sum_in_place(whole, self.groups.tp)
        return _taken(whole, self._places_in_teacher(self._places_of_hidden(self.policy)))

    def _whole(self, values: Tensor, places: Tensor) -> Tensor:
        """Values at all places of the teacher's batch, [rows · length, ...], from this rank's at these places."""
        further_dimensions = values.shape[places.dim() :]
        whole = values.new_zeros(len(self.shifts) * self.length, *further_dimensions)
        is_token = places >= 0
        whole[places[is_token]] = values[is_token]
        _sum_in_place(whole, self.groups.cp)
        return whole

    def _places_in_teacher(self, places: Tensor) -> Tensor:
        """Where tokens at these places of the policy's batch are in the teacher's; -1 if they are not in it."""
        row = places.clamp(min=0) // self.length
        moved = places + self.shifts[row]
        is_in_row = (moved >= row * self.length) & (moved < (row + 1) * self.length)
        return torch.where((places >= 0) & is_in_row, moved, -1)

    def _places_of_hidden(self, batch: LocalBatch) -> Tensor:
        """Places of the hidden states, [micro-batches, s/cp(/tp), b]."""
        tp_group = self.groups.tp if self.sequence_parallel else None
        places = []
        for mini_batch in batch.cuts:
            for cut in mini_batch:
                of_cut = batch.label_places[cut.tokens]
                # Packed tokens are one row.
                rows = of_cut if of_cut.dim() == 2 else of_cut.unsqueeze(0)
                places.append(rows.t().chunk(group_size(tp_group))[group_rank(tp_group)])
        return torch.stack(places)


def _sum_in_place(values: Tensor, group: Group | None) -> None:
    """Add up values over a group in their own memory, because a copy would be as large as the replica's batch."""
    if group_size(group) > 1:
        dist.all_reduce(values, group=group)


def _taken(whole: Tensor, places: Tensor) -> Tensor:
    """The values at some places, and 0 at -1."""
    values = whole[places.clamp(min=0)]
    values[places < 0] = 0
    return values
