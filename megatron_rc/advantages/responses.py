"""Sums over the responses to each prompt, on every rank that holds one of them."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rc.parallel.arguments import check_integer, check_tensors
from megatron_rc.parallel.collectives import all_reduce_max, all_reduce_sum
from megatron_rc.parallel.groups import ParallelGroups


class ResponseRows:
    """Which rows of a batch make one response: usually each row by itself; with rollout ids several rows of this rank.

    A sum over responses is a sum over rows in which each of a response's k rows counts 1/k.

    Attributes:
        kept: [n] bool, True for rows that count in the statistics of their prompt.
        share_of_all: [n] float64, 1/k for a response of k rows.
        share_of_kept: [n] float64, 1/k for a kept row of a response with k kept rows; 0 for a row that is not kept.
    """

    def __init__(self, group_ids: Tensor, rollout_ids: Tensor | None, kept: Tensor) -> None:
        """Take the rows of one prompt with equal ``rollout_ids`` as one response; without ids each row is one.

        Args:
            group_ids: [n] int64, equal for the responses to one prompt.
            rollout_ids: [n] int64, or None.
            kept: [n] bool.

        Raises:
            ValueError: ``rollout_ids`` has another shape or dtype.
        """
        ones = torch.ones_like(group_ids, dtype=torch.float64)
        self.kept = kept
        self.share_of_all = ones
        self.share_of_kept = torch.where(kept, ones, 0)
        self._response_of_row: Tensor | None = None
        if rollout_ids is None:
            return

        check_tensors({}, rollout_ids=rollout_ids)
        if rollout_ids.shape != group_ids.shape or rollout_ids.dtype != torch.int64:
            raise ValueError(
                f"rollout_ids is {rollout_ids.dtype} {tuple(rollout_ids.shape)}: expected torch.int64 "
                f"{tuple(group_ids.shape)}, one a row"
            )
        pairs = torch.stack([group_ids, rollout_ids], dim=1)
        _, self._response_of_row = pairs.unique(dim=0, return_inverse=True)
        num_rows = _sum_by(self._response_of_row, ones)
        num_kept_rows = _sum_by(self._response_of_row, self.share_of_kept)
        self.share_of_all = ones / num_rows
        self.share_of_kept = self.share_of_kept / num_kept_rows.clamp(min=1)

    def total(self, values: Tensor) -> Tensor:
        """Return, for each row, the sum of ``values`` over the kept rows of its response, [n]."""
        if self._response_of_row is None:
            return values
        return _sum_by(self._response_of_row, torch.where(self.kept, values.double(), 0))

    def differ(self, *values: Tensor) -> Tensor:
        """Return [n] bool: True for kept rows that differ, in any of ``values``, from the response's first kept row."""
        response_of_row = self._response_of_row
        if response_of_row is None:
            return torch.zeros_like(self.kept)
        last_row = len(response_of_row) - 1
        rows = torch.arange(len(response_of_row), device=response_of_row.device)
        kept_rows = torch.where(self.kept, rows, last_row)
        first_of_response = torch.full_like(rows, last_row)
        first_of_response.scatter_reduce_(0, response_of_row, kept_rows, "amin")
        first_row = first_of_response[response_of_row]

        differs = torch.zeros_like(self.kept)
        for value in values:
            # A NaN does not count as a difference: the correction's check reports it.
            differs |= (value != value[first_row]) & ~value.isnan()
        return differs & self.kept


class PromptSums:
    """Sums and maxima over the responses to each prompt, over all ranks that hold some of them.

    The ranks of a CP group hold the same responses, and only the first of them counts.

    Attributes:
        prompt_of_row: [n] int64, index of each row's prompt in a table of prompts.
        num_entries: number of entries of the table. With ``num_groups`` the last entry is for rows whose id is out of
            range.
    """

    def __init__(
        self, group_ids: Tensor, *, num_groups: int | None, groups: ParallelGroups, counts_here: Tensor
    ) -> None:
        """Number the prompts.

        Args:
            group_ids: [n] int64, equal for the responses to one prompt.
            num_groups: number of prompts of the whole batch; ids are in [0, num_groups) on all ranks. None: all
                responses to a prompt are on this rank, ids are any numbers, and sums need no other rank.
            groups: the other ranks of ``dp_cp`` hold the other responses.
            counts_here: [n] bool, True for the rows that this rank adds, because it is the first of their CP group.
        """
        self._counts_here: Tensor | None = None
        self._dp_cp = None
        if num_groups is None:
            ids, self.prompt_of_row = group_ids.unique(return_inverse=True)
            self.num_entries = len(ids)
            return
        check_integer("num_groups", num_groups, least=0)
        is_in_range = (group_ids >= 0) & (group_ids < num_groups)
        self.prompt_of_row = torch.where(is_in_range, group_ids, num_groups)
        self.num_entries = num_groups + 1
        self._counts_here = counts_here
        self._dp_cp = groups.dp_cp

    def sum(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Sum each of these [n] tensors over the rows of every prompt: [num_entries] each.

        Collectives: with ``num_groups`` one SUM of [num_entries, number of values] over ``dp_cp``.
        """
        columns = torch.stack(values, dim=1)
        if self._counts_here is not None:
            columns = torch.where(self._counts_here.unsqueeze(1), columns, 0)
        table = columns.new_zeros(self.num_entries, len(values))
        table.index_add_(0, self.prompt_of_row, columns)
        return all_reduce_sum(table, self._dp_cp).unbind(1)

    def max(self, values: Tensor) -> Tensor:
        """Return the largest of these [n] values for every prompt, [num_entries]; -inf for a prompt without rows.

        Collectives: with ``num_groups`` one MAX of [num_entries] over ``dp_cp``.
        """
        table = values.new_full((self.num_entries,), -torch.inf)
        table.scatter_reduce_(0, self.prompt_of_row, values, "amax")
        return all_reduce_max(table, self._dp_cp)


def _sum_by(index: Tensor, values: Tensor) -> Tensor:
    """Return, for each row, the sum of the values over all rows with the same index, [n] float64."""
    sums = torch.zeros(len(values), dtype=torch.float64, device=values.device)
    return sums.index_add_(0, index, values)[index]
