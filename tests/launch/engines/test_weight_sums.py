"""The sum of a bucket's bytes against loops over Python's integers, and what it must and must not see."""

from unittest import mock

import pytest
import torch

from megatron_rc.launch.engines import weight_sums
from megatron_rc.launch.engines.weight_stream import BUCKET_BYTES
from megatron_rc.launch.engines.weight_sums import sum_of

WORDS_OF_ROW = 32768
ROW = 4 * WORDS_OF_ROW  # bytes
MODULUS = 2**64


def factors(number, stream):
    """SplitMix64 over Python's integers."""
    numbers = []
    for index in range(1, number + 1):
        state = (index * 0x9E3779B97F4A7C15 + stream * 0xD1342543DE82EF95) % MODULUS
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % MODULUS
        numbers.append((state ^ (state >> 31)) | 1)
    return numbers


def expected_sum(content):
    content += bytes(-len(content) % 4)
    integers = [int.from_bytes(content[at : at + 4], "little", signed=True) for at in range(0, len(content), 4)]
    columns = factors(WORDS_OF_ROW, 1)
    rows = factors(len(integers) // WORDS_OF_ROW + 1, 2)
    total = 0
    for index, integer in enumerate(integers):
        row, column = divmod(index, WORDS_OF_ROW)
        total += integer * columns[column] * rows[row]
    return total % MODULUS


def random_bytes(size, seed=0):
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 4, 7, ROW, ROW + 3, 3 * ROW, 3 * ROW + 2050])
@pytest.mark.parametrize("rows_at_once", [1, 2, 256])
def test_the_sum_is_that_of_loops_wherever_the_bucket_lies(size, rows_at_once):
    """And however many rows are multiplied at once, in which a CPU and a GPU differ."""
    bucket = random_bytes(size)
    expected = expected_sum(bytes(bucket.tolist()))
    with mock.patch.object(weight_sums, "_ROWS_OF_CPU", rows_at_once):
        assert sum_of(bucket) == expected
        for offset in (1, 2, 3, 4):
            assert sum_of(torch.cat([bucket.new_zeros(offset), bucket])[offset:]) == expected


def exchanged(bucket, first, second, size):
    changed = bucket.clone()
    changed[first : first + size] = bucket[second : second + size]
    changed[second : second + size] = bucket[first : first + size]
    return changed


@pytest.mark.parametrize("size", [4, 8, 512, ROW, 2 * ROW])
@pytest.mark.parametrize("second", [2 * ROW, 3 * ROW, 4 * ROW + 64])
def test_blocks_that_change_places_change_the_sum(size, second):
    bucket = random_bytes(7 * ROW + 100)
    assert sum_of(exchanged(bucket, 0, second, size)) != sum_of(bucket)


def test_exchanges_within_a_row_or_a_column_are_always_found():
    """Two words differ by less than 2³². So the sum is the same only if their factors agree in the lowest 33 bits."""
    rows_of_bucket = BUCKET_BYTES // ROW
    for number, stream in ((WORDS_OF_ROW, 1), (rows_of_bucket, 2)):
        assert len({factor % 2**33 for factor in factors(number, stream)}) == number
