"""Log-probs and entropy of 8192 tokens of 151,936 logits: time beside a copy of them, and memory beyond them."""

import pytest
import torch

from megatron_rc.parallel import vocab_parallel_log_probs_and_entropy
from tests.gpu import measure
from tests.gpu.packages import require

ROWS = 8192
WIDTH = 151_936
TURNS = 15
SHARE = 0.85
PEAK = 1.02
PEAK_IN_PLACE = 0.02


@pytest.fixture(params=["bfloat16", "float32"])
def data(request, device, on_gpu):
    """(logits, labels), drawn anew."""
    rows, width = (ROWS, WIDTH) if on_gpu else (32, 301)
    logits = torch.empty(rows, width, device=device, dtype=getattr(torch, request.param)).normal_()
    return logits, torch.randint(0, width, (rows,), device=device)


def ours(inplace=False):
    return lambda logits, labels: vocab_parallel_log_probs_and_entropy(logits, labels, inplace_backward=inplace)


def plain(logits, labels):
    """log_softmax, gather and the entropy's formula."""
    log_pi = torch.log_softmax(logits.float(), -1)
    return log_pi.gather(-1, labels.unsqueeze(-1)).squeeze(-1), -(log_pi.exp() * log_pi).sum(-1)


def work_of(function, logits, labels, restores=False):
    """Forward and backward of a function; ``restores``: it overwrites the logits."""
    fresh = logits.clone() if restores else None

    def work(lap=lambda: None):
        leaf = logits.detach().requires_grad_()
        results = function(leaf, labels)
        lap()
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])
        lap()
        if fresh is not None:
            logits.copy_(fresh)

    return work


def times(function, logits, labels, *, restores=False, turns=TURNS, ahead=True):
    """Median milliseconds of (forward, backward), of the GPU alone or, unless ``ahead``, with the host's part."""
    return measure.milliseconds(work_of(function, logits, labels, restores), logits.device, turns, ahead=ahead)


def copy_bandwidth(logits):
    """Bytes a second that a copy of the logits reads and writes."""
    out = torch.empty_like(logits)
    (median,) = measure.milliseconds(lambda lap: (out.copy_(logits), lap()), logits.device, TURNS, ahead=True)
    return 2e3 * out.numel() * out.element_size() / median


@pytest.mark.timeout(120)
def test_ours(data, on_gpu, figures, target):
    """The forward reads the logits once; the backward reads them and writes as much."""
    logits, labels = data
    size = logits.numel() * logits.element_size()
    bandwidth = copy_bandwidth(logits)
    forward, backward = times(ours(), logits, labels)
    figures(copy_GB_s=bandwidth / 1e9, forward_ms=forward, backward_ms=backward)
    figures(both_ms_alone=sum(times(ours(), logits, labels, ahead=False)))
    shares = 1e3 * size / bandwidth / forward, 2e3 * size / bandwidth / backward
    peak = PEAK
    if on_gpu:
        peak = measure.peak_bytes(work_of(ours(), logits, labels)) / size
        target("peak_of_logits", peak, most=PEAK)
        in_place = measure.peak_bytes(work_of(ours(inplace=True), logits, labels)) / size
        target("peak_in_place", in_place, most=PEAK_IN_PLACE)
    target("forward_share", shares[0], least=SHARE if on_gpu else 0)
    target("backward_share", shares[1], least=SHARE if on_gpu else 0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kept", [0, 20, 2000])
def test_kept_tokens(data, on_gpu, figures, kept):
    """Log-probs over so many tokens of each position, which an engine kept, the label among them; 0: over all."""
    logits, labels = data
    kept = kept if on_gpu else min(kept, 30)
    step = logits.shape[1] // max(kept, 1)
    ids = ((labels.unsqueeze(1) + step * torch.arange(kept, device=labels.device)) % logits.shape[1]).flatten()
    offsets = kept * torch.arange(len(labels) + 1, device=labels.device)
    support = {"support_ids": ids, "support_offsets": offsets} if kept else {}

    def function(logits, labels):
        return vocab_parallel_log_probs_and_entropy(logits, labels, **support)

    forward, backward = times(function, logits, labels, turns=7)
    figures(forward_ms=forward, backward_ms=backward, both_ms=forward + backward)
    if on_gpu:
        peak = measure.peak_bytes(work_of(function, logits, labels))
        figures(peak_of_logits=peak / (logits.numel() * logits.element_size()))


@pytest.mark.timeout(120)
def test_blocks_and_warps(data, counts, figures, monkeypatch):
    """The same with other numbers of columns and warps a program: what to choose where the share is low."""
    require("triton")
    from megatron_rc.parallel import triton_kernels

    logits, labels = data
    for block in (2048, 4096, 8192, 16384):
        for warps in (4, 8, 16):
            for name in ("_FORWARD_BLOCK", "_BACKWARD_BLOCK"):
                monkeypatch.setattr(triton_kernels, name, block)
            monkeypatch.setattr(triton_kernels, "_warps", lambda _, warps=warps: warps)
            forward, backward = times(ours(), logits, labels, turns=5)
            figures(**{f"{block}x{warps}": f"{forward:.2f}/{backward:.2f}ms"})


def megatron(device):
    require("megatron.core")
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    return lambda logits, labels: [vocab_parallel_cross_entropy(logits.unsqueeze(1), labels.unsqueeze(1))]


OTHERS = {"plain": lambda _: plain, "compiled": lambda _: torch.compile(plain), "megatron": megatron}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", OTHERS)
def test_others(data, device, figures, name):
    """Plain PyTorch, the same compiled, and Megatron-Core's cross entropy, which has no entropy and overwrites."""
    logits, labels = data
    function = OTHERS[name](device)
    try:
        forward, backward = times(function, logits, labels, restores=name == "megatron", turns=5)
        figures(forward_ms=forward, backward_ms=backward)
        if device.type == "cuda":
            size = logits.numel() * logits.element_size()
            figures(peak_of_logits=measure.peak_bytes(work_of(function, logits, labels)) / size)
    except torch.OutOfMemoryError:
        pytest.skip("it does not fit this GPU's memory")
