"""Memory of log-probs and entropy in units of one float32 copy of the logits."""

import gc

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_rc.parallel import vocab_parallel_log_probs, vocab_parallel_log_probs_and_entropy

TOKENS = 256
WIDTH = 8192
COPY = 4 * TOKENS * WIDTH  # bytes of the logits in float32


def allocated(function):
    """(bytes allocated at once, bytes still held at the end) while the function's result is alive."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        alive = function()
    current = largest = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            current += event.nbytes()
            largest = max(largest, current)
    del alive
    return largest, current


def make(dtype, trained=True):
    """(logits, labels, mask)."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_(trained)
    return logits, torch.randint(0, WIDTH, (TOKENS,), generator=generator), torch.ones(TOKENS, dtype=torch.bool)


def forward(logits, labels, mask, **options):
    return vocab_parallel_log_probs_and_entropy(logits, labels, mask=mask, chunk_size=4, **options)


def gradient(logits, labels, mask, **options):
    results = forward(logits, labels, mask, **options)
    return torch.autograd.grad(sum(result.sum() for result in results), logits)


@pytest.mark.parametrize(("dtype", "sum_squares", "results"), [(torch.float32, False, 8), (torch.bfloat16, True, 12)])
def test_the_forward_needs_one_chunk_and_a_few_bytes_a_token(dtype, sum_squares, results):
    for trained in (True, False):
        inputs = make(dtype, trained)
        peak, at_end = allocated(lambda inputs=inputs: forward(*inputs, sum_squares=sum_squares))
        assert peak <= 0.05 * COPY
        assert at_end <= (results + 4 * trained) * TOKENS


def test_log_probs_alone_hold_two_numbers_a_token():
    logits, labels, mask = make(torch.float32)
    peak, at_end = allocated(lambda: vocab_parallel_log_probs(logits, labels, mask=mask, chunk_size=4))
    assert peak <= 0.05 * COPY
    assert at_end <= 8 * TOKENS


@pytest.mark.parametrize(
    ("dtype", "inplace", "sum_squares", "limit"),
    [
        (torch.float32, False, True, 1.06),
        (torch.bfloat16, False, False, 0.56),
        (torch.float32, True, False, 0.06),
        (torch.bfloat16, True, True, 0.06),
    ],
)
def test_the_backward_needs_the_gradient_and_one_chunk(dtype, inplace, sum_squares, limit):
    inputs = make(dtype)
    peak, at_end = allocated(lambda: gradient(*inputs, sum_squares=sum_squares, inplace_backward=inplace))
    assert peak <= limit * COPY
    assert at_end == (0 if inplace else inputs[0].nbytes)
