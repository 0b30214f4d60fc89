"""Sum of a bucket's bytes that depends on their places. A bucket is a buffer with the bytes of several weights.

The sum is computed on the bucket's own device: a GPU copies nothing to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Number of words, of four bytes each, in a row. The sum depends on it, so sender and receiver must agree on it. The
# int64 sums of a row's columns (256 KB) stay in the cache of a core.
_ROW_WORDS = 32768
_ROWS_OF_CPU = 1
_ROWS_OF_GPU = 256  # rows that are multiplied at once; their products are 64 MB
# Seeds of the two sequences of factors.
_COLUMN_STREAM = 1
_ROW_STREAM = 2


def sum_of(bucket: Tensor) -> int:
    """Return a sum of a bucket's bytes that depends on the place of each; 0 to 2⁶⁴ − 1, equal on CPU and GPU.

    The bytes are read as words of 32 bits, the last one filled up with zeros. Word i of row j is multiplied by two odd
    pseudo-random factors of 64 bits, one of its column and one of its row, and everything is added modulo 2⁶⁴. This is
    multilinear hashing (Lemire and Kaser 2014, "Strongly universal string hashing is fast", arXiv 1202.4961) with fixed
    factors. Only the lowest 64 bits of a product stay; with words of 32 bits the highest bit of a word is among them.

    Every change of a single word is found, and every exchange of two words of one row, or of one column in a bucket of
    up to 256 MB, because the factors differ in their lowest 33 bits there. Other changes, such as exchanged blocks,
    are missed with a probability of about 2⁻³². The factors are no secret: the sum finds accidents, and keeps nobody
    from choosing bytes that have the same sum. It does not see how many zeros the bucket ends with, which the names and
    shapes beside it tell.

    Args:
        bucket: [bytes] uint8, contiguous, on any device. A few megabytes of memory are used beside it, 70 MB on a GPU,
            and a copy of the bucket if it does not begin at a multiple of 4 bytes of its storage.
    """
    words_in_rows, last_words = _as_words(bucket)
    column_factors = _factors(_ROW_WORDS, _COLUMN_STREAM, bucket.device)
    row_factors = _factors(len(words_in_rows) + 1, _ROW_STREAM, bucket.device)

    # Words times factors are int64; products and sums wrap around.
    rows_at_once = _ROWS_OF_GPU if bucket.is_cuda else _ROWS_OF_CPU
    sums_of_columns = _sums_of_columns(words_in_rows, row_factors[:-1], rows_at_once)
    sums_of_columns[: len(last_words)] += last_words.long() * row_factors[-1]
    return int((sums_of_columns * column_factors).sum()) % 2**64


def _sums_of_columns(words: Tensor, row_factors: Tensor, rows_at_once: int) -> Tensor:
    """Return Σ_j factor_j · word_ji of each column i, [_ROW_WORDS] int64; ``words`` is [rows, _ROW_WORDS] int32."""
    sums = torch.zeros(_ROW_WORDS, dtype=torch.int64, device=words.device)
    if rows_at_once == 1:
        # In one pass over the words: on a CPU this takes two thirds of the time of a product and a sum.
        for row, factor in zip(words, row_factors.tolist(), strict=True):
            sums.add_(row, alpha=factor)
        return sums
    for rows, factors in zip(words.split(rows_at_once), row_factors.split(rows_at_once), strict=True):
        sums += (rows * factors.unsqueeze(1)).sum(dim=0)
    return sums


def _as_words(bucket: Tensor) -> tuple[Tensor, Tensor]:
    """Return the whole rows of words, [rows, _ROW_WORDS] int32, and the words of the last, shorter row, int32."""
    row_bytes = 4 * _ROW_WORDS
    num_rows = bucket.numel() // row_bytes
    bytes_of_rows = bucket[: num_rows * row_bytes]
    if bucket.storage_offset() % 4:
        bytes_of_rows = bytes_of_rows.clone()  # a view of words must begin at a multiple of 4 bytes
    last_bytes = bucket[num_rows * row_bytes :]
    last_bytes = torch.nn.functional.pad(last_bytes, (0, -last_bytes.numel() % 4)).clone()
    return bytes_of_rows.view(torch.int32).view(num_rows, _ROW_WORDS), last_bytes.view(torch.int32)


def _factors(number: int, stream: int, device: torch.device) -> Tensor:
    """Return odd pseudo-random numbers, [number] int64, by the generator SplitMix64 (Steele, Lea and Flood 2014).

    All constants are the generator's, but the one that keeps the two streams apart, which is any odd number.
    """
    state = torch.arange(1, number + 1, dtype=torch.int64, device=device)
    state = state * _signed(0x9E3779B97F4A7C15) + _signed(stream * 0xD1342543DE82EF95)
    state = (state ^ _shifted_right(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted_right(state, 27)) * _signed(0x94D049BB133111EB)
    return torch.bitwise_or(state ^ _shifted_right(state, 31), 1)


def _signed(number: int) -> int:
    """Return the int64 with the lowest 64 bits of a number; torch has no arithmetic for uint64."""
    return (number + 2**63) % 2**64 - 2**63


def _shifted_right(values: Tensor, bits: int) -> Tensor:
    """Shift the 64 bits of each int64 to the right, with zeros from the left; torch's shift repeats the sign."""
    return torch.bitwise_and(values >> bits, 2 ** (64 - bits) - 1)
