"""Tensors in MXFP4, the format of gpt-oss's published experts (Open Compute Project, Microscaling Formats v1.0).

Two numbers of four bits share a byte, the lower half first; 32 numbers share an exponent, stored with a bias of 127.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCKS = "_blocks"
SCALES = "_scales"
# Values of the sixteen codes E2M1: a sign, two bits of the exponent, one of the mantissa.
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))
_BIAS = 127


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Numbers of quantized rows; every value is exact in bfloat16.

    Args:
        blocks: [rows, blocks of a row, 16], uint8.
        scales: [rows, blocks of a row], uint8.

    Returns:
        [rows, 32 · blocks of a row], bfloat16.
    """
    values = torch.tensor(_VALUES, dtype=torch.bfloat16)
    codes = torch.stack([blocks & 0x0F, blocks >> 4], dim=-1).flatten(-2)
    exponents = scales.to(torch.int32) - _BIAS
    return torch.ldexp(values[codes.int()], exponents.unsqueeze(-1)).flatten(-2)
