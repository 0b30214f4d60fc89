"""Sums over rows of a million tokens, compiled; tests/correction sums such rows without the compiler."""

import pytest
import torch

from megatron_rc.batch.compiled import CompiledReductions


@pytest.mark.parametrize("length", [2**16, 2**20], ids=str)
def test_compiled_sums_over_long_rows_are_exact(length):
    """Every addition is in float64."""
    values = torch.rand(2, length, generator=torch.Generator().manual_seed(length))

    def reduce(row):
        return CompiledReductions().sums([row], 1)

    sums, squares = torch.compile(reduce, dynamic=False)(values)
    torch.testing.assert_close(sums[0], values.double().sum(1), rtol=1e-12, atol=0)
    torch.testing.assert_close(squares, values.double().square().sum().view(1), rtol=1e-12, atol=0)
