"""Sums over rows of a million tokens, compiled; tests/correction sums such rows without the compiler."""

import pytest
import torch

from megatron_rc.correction.reductions import CompiledReductions


@pytest.mark.parametrize("length", [2**16, 2**20], ids=str)
def test_compiled_sums_over_long_rows_are_exact_to_six_digits(length):
    """Tokens that are added one after the other would be off by more: a compiled loop adds in vectors."""
    values = torch.rand(2, length, generator=torch.Generator().manual_seed(length))
    found = torch.compile(lambda rows: CompiledReductions().sums([rows], 1)[0][0], dynamic=False)(values)
    torch.testing.assert_close(found.double(), values.double().sum(1), rtol=1e-6, atol=0)
