"""Advantages with mean 0 and standard deviation 1 over the tokens of the whole batch."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rc.advantages.shards import check_floats, layout_of
from megatron_rc.parallel.collectives import all_reduce_sum
from megatron_rc.parallel.groups import ParallelGroups
from megatron_rc.parallel.layout import SequenceLayout

EPSILON = 1e-8


def whiten(
    values: Tensor,
    response_mask: Tensor,
    *,
    layout: SequenceLayout | None = None,
    groups: ParallelGroups | None = None,
) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8), over all counted tokens of all ranks; the variance is a sample's (n - 1).

    The deviations are taken from the mean of the whole batch, in a second pass, so that the result is the same for
    every split, and no large moments are subtracted.

    Args:
        values: of the layout's local shape.
        response_mask: bool, like ``values``, True if the token counts; others change no bit.
        layout: which tokens these are. Default: padded, rows of ``values``.
        groups: ``dp_cp`` holds the other tokens. Default: this process alone.

    Returns:
        Like ``values``, at least float32; 0 if nothing counts. One counted value of any rank that is NaN or infinite
        makes everything NaN, which the correction's ``check()`` reports.

    Collectives: two SUMs over ``dp_cp``, of two doubles and of one. Gradient: none.

    Raises:
        ValueError: shapes or dtypes are wrong.
    """
    groups = ParallelGroups.given(groups)
    groups.check_sums(layout_of(response_mask, layout, groups).cp_group)
    check_floats("values", values, response_mask.shape, "tokens")
    exact = torch.where(response_mask, values.detach().double(), 0)
    sums = torch.stack([response_mask.sum(dtype=torch.float64), exact.sum()])
    count, total = all_reduce_sum(sums, groups.dp_cp)
    centred = torch.where(response_mask, exact - total / count.clamp(min=1), 0)
    variance = all_reduce_sum(centred.square().sum(), groups.dp_cp) / (count - 1).clamp(min=1)
    white: Tensor = centred / (variance + EPSILON).sqrt()
    return white.to(torch.promote_types(values.dtype, torch.float32))
