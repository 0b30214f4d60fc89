"""The factor by which a model multiplies its logits, from the function that it applies to them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def factor_of(scale_logits: Callable[[Tensor], Tensor] | None) -> float:
    """The positive number that ``scale_logits`` multiplies by; 1 without a function.

    It is called with four numbers on the CPU, so that the host waits for no GPU.

    Raises:
        ValueError: the function does more than multiply by a positive number, as a soft cap does.
    """
    if scale_logits is None:
        return 1.0

    def scaled(logit: float) -> float:
        return float(scale_logits(torch.tensor(logit, dtype=torch.float64, device="cpu")))

    factor = scaled(1.0)
    # A product with a power of 2 is exact; the large ones show bounds.
    for logit in (2.0, 2.0**20, -(2.0**20)):
        if factor <= 0 or scaled(logit) != logit * factor:
            raise ValueError(
                f"scale_logits makes {factor} of 1 and {scaled(logit)} of {logit:g}, which is no multiplication by a "
                "positive number: log_prob_processor needs fused=False, LogProbRequest mode='auto'"
            )
    return factor
