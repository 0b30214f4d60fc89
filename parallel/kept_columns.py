"""The logits of kept tokens as a table: a row for each position, a column for each of its kept tokens.

Rows with fewer kept tokens than others are filled up. So what works on chunks of dense logits works on kept tokens too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.parallel.support import Support, host_waits_for


@dataclass(frozen=True)
class KeptColumns:
    """The local columns of the kept tokens of some rows of logits, [rows, k]; k is the largest number of a row."""

    column: Tensor  # [rows, k] int64, a local column; any in range if it does not count
    counted: (
        Tensor  # [rows, k] bool: this rank has the token's column, and the token comes for the first time in its row
    )

    def gathered(self, rows: Tensor) -> Tensor:
        """The logits in these columns, [rows, k], of the logits [rows, v/tp]; -inf in those that do not count."""
        return rows.gather(1, self.column).masked_fill(~self.counted, -torch.inf)

    def scattered(self, values: Tensor, like: Tensor) -> Tensor:
        """Rows like those of ``like``, [rows, v/tp], with the values, [rows, k], in these columns and 0 elsewhere."""
        rows = like.new_zeros(len(values), like.shape[1])
        # A column that does not count may be that of another token: it adds 0 there.
        counted_values = torch.where(self.counted, values, 0)
        return rows.scatter_add_(1, self.column, counted_values.to(rows.dtype))


def kept_columns(support: Support, index: Tensor, columns: int) -> KeptColumns:
    """Find the local columns of the kept tokens of some rows; ids that are not in the vocabulary are left out.

    The host waits for the largest number of ids of a row.

    Args:
        support: the kept tokens of all rows.
        index: [rows] int64, the rows.
        columns: number of local columns that are vocabulary.
    """
    counts = support.counts[index].unsqueeze(1)
    place_in_row = torch.arange(int(counts.max()), device=index.device)
    is_present = place_in_row < counts
    place = (support.offsets[index].unsqueeze(1) + place_in_row).clamp_(max=len(support.ids) - 1)
    ids = support.ids[place].long()
    is_in_vocabulary = (ids >= 0) & (ids < support.vocab_size)

    # Sorted, equal ids are neighbours. The places that fill up a row come last.
    ids = torch.where(is_present & is_in_vocabulary, ids, support.vocab_size)
    if not _are_sorted(ids, support):
        ids = ids.sort(1).values
    is_first = torch.ones_like(is_present)
    is_first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    column = ids - support.first_id
    is_local = (ids < support.vocab_size) & (column >= 0) & (column < columns)
    return KeptColumns(column=torch.where(is_local, column, 0), counted=is_local & is_first)


def _are_sorted(ids: Tensor, support: Support) -> bool:
    """Whether the ids of each row, [rows, k], ascend; on a GPU ``support.is_sorted``, to spare the host a wait."""
    if host_waits_for(ids):
        return support.is_sorted
    return bool((ids[:, 1:] >= ids[:, :-1]).all())
