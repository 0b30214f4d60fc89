"""The one token function: however the tokens lie in memory, and through ``torch.compile``."""

import dataclasses

import pytest
import torch

from tests.support.correction_cases import CASES, make_batch
from tests.support.correction_comparison import correct, numbers


@pytest.mark.parametrize("names", [("mask",), ("train", "rollout"), ("mask", "train", "rollout")], ids="+".join)
def test_tokens_may_lie_transposed_in_memory(names):
    """Megatron's tensors are [s, b]: their transposes are [b, s], and not contiguous."""
    batch = make_batch(CASES["token"], 5)
    turned = {name: getattr(batch, name).t().contiguous().t() for name in names}
    assert not any(value.is_contiguous() for value in turned.values())
    want, got = correct("token", batch), correct("token", dataclasses.replace(batch, **turned))
    assert torch.equal(numbers(got), numbers(want))
    assert torch.equal(got.mask, want.mask)
    assert torch.equal(got.weights, want.weights)
