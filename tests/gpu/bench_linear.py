"""The fused output layer: 8192 hidden states of 2048 numbers to 151,936 logits, in bfloat16."""

import pytest
import torch

from megatron_rc.parallel import linear_log_probs_and_entropy, vocab_parallel_log_probs_and_entropy
from tests.gpu import measure
from tests.gpu.packages import require

TOKENS = 8192
SIZE = 2048
VOCABULARY = 151_936
TURNS = 5


def ours(chunk):
    return lambda hidden, weight, labels: linear_log_probs_and_entropy(hidden, weight, labels, chunk_size=chunk)


def unfused(hidden, weight, labels):
    return vocab_parallel_log_probs_and_entropy(hidden @ weight.t(), labels, inplace_backward=True)


def liger(hidden, weight, labels):
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return [LigerFusedLinearCrossEntropyLoss()(weight, hidden, labels)]


CONTENDERS = {
    "matmul and unfused": unfused,
    **{f"ours, chunks of {chunk}": ours(chunk) for chunk in (256, 512, 1024, 2048, 4096)},
    "Liger": liger,
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", CONTENDERS)
def test_forward_and_backward(device, on_gpu, figures, name):
    """Liger's has the loss alone, without an entropy, and makes all gradients in its forward."""
    if name == "Liger":
        require("liger_kernel")
        if not on_gpu:
            pytest.skip("its kernels need a GPU")
    tokens, size, vocabulary = (TOKENS, SIZE, VOCABULARY) if on_gpu else (24, 8, 101)
    hidden = torch.randn(tokens, size, device=device).bfloat16().requires_grad_()
    weight = (torch.randn(vocabulary, size, device=device) / size**0.5).bfloat16().requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), device=device)

    def work(lap=lambda: None):
        results = CONTENDERS[name](hidden, weight, labels)
        lap()
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])
        lap()
        hidden.grad = weight.grad = None

    forward, backward = measure.milliseconds(work, device, TURNS, ahead=True)
    figures(forward_ms=forward, backward_ms=backward, both_ms=forward + backward)
    if on_gpu:
        gradients = 2 * (hidden.numel() + weight.numel())
        figures(peak_of_logits=(measure.peak_bytes(work) - gradients) / (2 * tokens * vocabulary))
