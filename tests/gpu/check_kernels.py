"""Log-probs and entropy on the device against float64: the Triton kernels, PyTorch's, and the fused output layer."""

import dataclasses

import pytest
import torch

from megatron_rc.parallel import (
    kernels,
    linear_log_probs_and_entropy,
    vocab_parallel_log_probs,
    vocab_parallel_log_probs_and_entropy,
)
from tests.gpu import measure
from tests.gpu.packages import require
from tests.support.errors import largest_error
from tests.support.vocab_cases import Case, bad_logits, results, textbook

FLOAT32 = torch.float32
BFLOAT16 = torch.bfloat16
FLOAT16 = torch.float16
# A GPU's exponential is good to two units in the last place, and sums are of float32.
FORWARD = 1e-5
BACKWARD = 2e-5
WIDTHS = {
    "1": Case(1, 4),
    "5": Case(5, 5, entropy=False, used=(0,), temperature=0.7),
    "33": Case(33, 40, temperature=1.3, gap=3),
    "4099": Case(4099, 4111, temperature=0.7, gap=11, used=(0, 1)),
    "8192": Case(8192, 8192),
    "32003": Case(32003, 32128, used=(0, 2)),
    "151936": Case(151936, 151936, temperature=0.9, used=(0, 1)),
    "152064 with padding": Case(151669, 152064, gap=5),
    "4099, 20 kept": Case(4099, 4111, temperature=0.7, kept=20),
    "4099 in place": Case(4099, 4111, gap=5, used=(0, 1), inplace=True),
}
DTYPES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}


@pytest.fixture(autouse=True)
def interpreted(device, on_gpu, monkeypatch):
    """Without a GPU the kernels run under Triton's interpreter."""
    if not on_gpu:
        monkeypatch.setattr(kernels, "uses_triton", lambda logits: logits.element_size() <= 4)


def exact(logits, labels, kept=None, over=False):
    """(logits, log-probs, entropy) in float64 by plain PyTorch; ``kept``: True for the tokens that count."""
    logits = logits.detach().double().requires_grad_()
    whole = logits.log_softmax(-1)
    log_pi = whole if kept is None else logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
    of_entropy = log_pi if over else whole
    entropy = -(of_entropy.exp() * of_entropy.masked_fill(of_entropy == -torch.inf, 0)).sum(-1)
    return logits, log_pi.gather(-1, labels.long().unsqueeze(-1)).squeeze(-1), entropy


def assert_case(case, device, figures):
    outcome, (*expected, grad) = results(case, device), textbook(case)
    errors = []
    for got, value in zip(outcome["values"], expected if case.entropy else expected[:1], strict=True):
        assert got.device.type == device.type
        assert got.dtype == FLOAT32
        errors.append(float(((got.cpu().double() - value).abs() / (1 + value.abs())).max()))
    error = largest_error(errors)
    got = outcome["grad"].cpu().double()
    bound = BACKWARD * grad.abs() + 2e-6 + (0 if case.dtype == FLOAT32 else torch.finfo(case.dtype).eps) * grad.abs()
    backward = float(((got - grad).abs() / bound).max())
    figures(forward_error=error, backward_of_bound=backward)
    assert error <= FORWARD
    assert backward <= 1
    assert not got[3].any()
    assert not got[:, case.columns :].any()
    want = outcome["grad"].cpu() if case.inplace else case.logits().detach()
    torch.testing.assert_close(outcome["after"].cpu(), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_triton(device, figures, width, dtype):
    require("triton")
    case = dataclasses.replace(WIDTHS[width], dtype=DTYPES[dtype])
    assert kernels.uses_triton(case.logits(device))
    assert_case(case, device, figures)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pytorch(device, figures, monkeypatch, dtype):
    """What runs where Triton is missing."""
    monkeypatch.setattr(kernels, "uses_triton", lambda logits: False)
    assert_case(dataclasses.replace(WIDTHS["4099"], dtype=DTYPES[dtype]), device, figures)


def test_bad_logits_are_not_hidden(device):
    values = bad_logits(device).cpu()
    assert values[:, :4].isnan().all()
    assert values[:, 4].isfinite().all()


def test_float64(device):
    """Has no kernel, and is exact."""
    logits = torch.randn(7, 3001, dtype=torch.float64, device=device, requires_grad=True)
    labels = torch.arange(7, device=device)
    values = vocab_parallel_log_probs_and_entropy(logits, labels)
    for value, expected in zip(values, exact(logits, labels)[1:], strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


def test_views(device, figures):
    """[s, b, v] seen as [b, s, v], as Megatron's output is; int32 labels; -100 as a label."""
    logits = torch.randn(40, 3, 1111, device=device).to(BFLOAT16).requires_grad_()
    labels = torch.randint(0, 1111, (3, 40), device=device, dtype=torch.int32)
    labels[:, -5:] = -100
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(logits.transpose(0, 1), labels)
    (log_probs.sum() + entropy.sum()).backward()
    counts = labels >= 0
    leaf, want, of_entropy = exact(logits.transpose(0, 1), labels.clamp(min=0))
    torch.where(counts, want + of_entropy, 0.0).sum().backward()
    want = torch.where(counts, want, 0.0)
    figures(forward_error=float((log_probs - want).abs().max()))
    torch.testing.assert_close(log_probs.double(), want, rtol=FORWARD, atol=FORWARD)
    torch.testing.assert_close(logits.grad.transpose(0, 1).double(), leaf.grad, rtol=8e-3, atol=1e-6)


@pytest.mark.parametrize("over", [False, True])
def test_kept_tokens(device, over):
    """In any order, with one id twice; one row without, which counts the whole vocabulary."""
    rows = 9
    width = 3001
    logits = torch.randn(rows, width, device=device).to(BFLOAT16).requires_grad_()
    ids = logits.detach().topk(40, dim=1).indices
    labels = ids[:, 3].clone()
    ids = torch.cat([ids, ids[:, :1]], dim=1)[1:].flatten()
    offsets = torch.tensor([0, *range(0, 41 * rows, 41)], device=device)
    values = vocab_parallel_log_probs_and_entropy(
        logits, labels, support_ids=ids, support_offsets=offsets, entropy_over_support=over
    )
    sum(result.sum() for result in values).backward()
    kept = torch.zeros(rows, width, dtype=torch.bool, device=device).index_fill_(0, labels.new_zeros(1), True)
    kept[1:].scatter_(1, ids.view(rows - 1, 41), True)
    leaf, *want = exact(logits, labels, kept, over)
    sum(result.sum() for result in want).backward()
    for value, expected in zip(values, want, strict=True):
        torch.testing.assert_close(value.double(), expected, rtol=FORWARD, atol=FORWARD)
    torch.testing.assert_close(logits.grad.double(), leaf.grad, rtol=8e-3, atol=1e-6)


def test_many_rows(device, on_gpu):
    """More programs than the second axis of a grid could have."""
    rows = 70_001 if on_gpu else 11
    logits = torch.randn(rows, 50, device=device, requires_grad=True)
    labels = torch.randint(0, 50, (rows,), device=device)
    log_probs = vocab_parallel_log_probs(logits, labels)
    log_probs.sum().backward()
    leaf, want, _ = exact(logits, labels)
    want.sum().backward()
    torch.testing.assert_close(log_probs.double(), want, rtol=FORWARD, atol=FORWARD)
    torch.testing.assert_close(logits.grad.double(), leaf.grad, rtol=BACKWARD, atol=2e-6)


def test_more_elements_than_an_int32_counts(device, on_gpu, figures):
    rows, width = (14_200, 151_936) if on_gpu else (8, 301)
    needed = 3 * 2 * rows * width
    if on_gpu and torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed >> 30} GiB of free memory")
    assert not on_gpu or rows * width > 2**31
    logits = torch.empty(rows, width, device=device, dtype=BFLOAT16).normal_()
    logits.requires_grad_()
    labels = torch.arange(rows, device=device) * 10 % width
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(logits, labels)
    (log_probs.sum() + 0.1 * entropy.sum()).backward()
    for row in (0, rows // 2, rows - 1):
        leaf, want, of_entropy = exact(logits[row], labels[row])
        (want + 0.1 * of_entropy).backward()
        torch.testing.assert_close(log_probs[row].double(), want, rtol=FORWARD, atol=FORWARD)
        torch.testing.assert_close(logits.grad[row].double(), leaf.grad, rtol=8e-3, atol=1e-9)
    figures(elements=rows * width)


def test_cost(device, counts, figures):
    """The memory that is promised, no wait of the host, two kernels and some of one number a token."""
    rows = 2048
    width = 151_936
    logits = torch.randn(rows, width, device=device, dtype=BFLOAT16)
    labels = torch.randint(0, width, (rows,), device=device)
    size = logits.numel() * logits.element_size()

    def work(inplace=False):
        leaf = logits.detach().requires_grad_()
        log_probs, entropy = vocab_parallel_log_probs_and_entropy(leaf, labels, inplace_backward=inplace)
        torch.autograd.backward([log_probs, entropy], [torch.ones_like(log_probs), torch.ones_like(entropy)])

    costs = measure.costs(work)
    backup = logits.clone()
    inplace = measure.peak_bytes(lambda: work(inplace=True)) / size
    assert not torch.equal(backup, logits)
    figures(launches=costs["launches"], syncs=costs["syncs"])
    figures(peak=costs["peak_bytes"] / size, peak_in_place=inplace)
    assert costs["syncs"] == 0
    assert costs["peak_bytes"] <= 1.02 * size
    assert inplace <= 0.02


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("accumulates", [False, True], ids=["autograd", "main_grad"])
def test_fused_output_layer(device, on_gpu, figures, dtype, accumulates):
    """Hidden states to log-probs, against the logits in float64."""
    tokens, size, vocabulary = (700, 256, 5003) if on_gpu else (30, 16, 203)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, size, generator=generator).to(device, DTYPES[dtype]).requires_grad_()
    weight = (torch.randn(vocabulary, size, generator=generator) / size**0.5).to(device, DTYPES[dtype])
    weight.requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator).to(device)
    if accumulates:
        weight.main_grad = torch.ones(weight.shape, dtype=FLOAT32, device=device)
    values = linear_log_probs_and_entropy(hidden, weight, labels, gradient_accumulation=accumulates)
    (values[0].sum() + values[1].sum()).backward()
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    want = vocab_parallel_log_probs_and_entropy(wide[0] @ wide[1].t(), labels)
    (want[0].sum() + want[1].sum()).backward()
    of_weight = weight.main_grad - 1 if accumulates else weight.grad
    pairs = {
        "forward": (values[0], want[0]),
        "hidden": (hidden.grad, wide[0].grad),
        "weight": (of_weight, wide[1].grad),
    }
    errors = {name: float((got.double() - value).norm() / value.norm()) for name, (got, value) in pairs.items()}
    figures(**{f"{name}_error": value for name, value in errors.items()})
    assert largest_error(errors.values()) <= (1e-4 if dtype == "float32" else 1e-2)
