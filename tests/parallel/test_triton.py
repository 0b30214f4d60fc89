"""The Triton kernels: their results under Triton's interpreter, which needs no GPU, and their compilation for a GPU."""

import functools
import importlib.util
import os
import subprocess
import sys
import types

import pytest
import torch

from megatron_rc.parallel import kernels
from megatron_rc.parallel.softmax import RowGradients, SoftmaxOptions
from tests.support.paths import ROOT
from tests.support.vocab_cases import Case, bad_logits, results, textbook

SMALL = {"_FORWARD_BLOCK": 128, "_BACKWARD_BLOCK": 128}  # several blocks of few columns: the interpreter is slow


def require_triton():
    if importlib.util.find_spec("triton") is None:
        pytest.fail("these tests need Triton: pip install 'megatron-rc[test]', or triton alone", pytrace=False)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """The results of all calls below, from a process of its own: Triton chooses at its import whether it interprets."""
    require_triton()
    path = str(tmp_path_factory.mktemp("triton") / "results.pt")
    done = subprocess.run(
        (sys.executable, "-c", f"from tests.parallel.test_triton import interpret; interpret({path!r})"),
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(path)


def interpret(path):
    from megatron_rc.parallel import triton_kernels

    kernels.uses_triton = lambda logits: True
    outcomes = {name: results(case) for name, case in CASES.items() if case.large}
    vars(triton_kernels).update(SMALL)
    outcomes |= {name: results(case) for name, case in CASES.items() if name not in outcomes}
    outcomes["bad"] = bad_logits()
    # Rows without any probability, and a rank whose columns are all padding.
    outcomes["nothing"] = [triton_kernels.row_statistics(torch.full((2, 200), -torch.inf), whole(n)) for n in (200, 0)]
    torch.save(outcomes, path)


# The public functions, against the textbook in float64.


CASES = {
    "one column, log-probs alone": Case(1, 4, entropy=False, used=(0,), temperature=0.7),
    "33 columns": Case(33, 40, temperature=1.3, gap=3),
    "140 columns, nothing of the entropy": Case(140, 144, used=(0, 2)),
    "300 columns, in place": Case(300, 320, temperature=0.7, gap=11, used=(0, 1), inplace=True),
    "300 columns, 20 kept": Case(300, 305, temperature=0.7, gap=11, kept=20),
    "300 columns of bfloat16, in place": Case(300, 320, torch.bfloat16, gap=5, inplace=True),
    "129 columns of float16": Case(129, 136, torch.float16, used=(1,)),
    "blocks as they are": Case(8192 + 5, 8192 + 16, temperature=1.1, large=True),
}


def rounding(dtype):
    """Rounding error of a gradient from float32; unlike a GPU, the interpreter truncates to bfloat16."""
    return 0 if dtype == torch.float32 else torch.finfo(dtype).eps


@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_match_the_textbook(interpreted, name):
    case = CASES[name]
    outcome = interpreted[name]
    *expected, grad = textbook(case)
    for got, value in zip(outcome["values"], expected, strict=False):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), value, rtol=3e-6, atol=3e-6)
    assert outcome["grad"].dtype == case.dtype
    torch.testing.assert_close(outcome["grad"].double(), grad, rtol=2e-5 + rounding(case.dtype), atol=2e-6)
    exact = torch.zeros_like(grad, dtype=torch.bool)
    exact[3] = True
    exact[:, case.columns :] = True
    assert torch.equal(outcome["grad"][exact], torch.zeros_like(outcome["grad"][exact]))


@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_the_logits_are_written_to_in_place_alone(interpreted, name):
    case = CASES[name]
    outcome = interpreted[name]
    expected = outcome["grad"] if case.inplace else case.logits().detach()
    torch.testing.assert_close(outcome["after"], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.processes
def test_a_bad_logit_is_not_hidden(interpreted):
    assert interpreted["bad"][:, :4].isnan().all()
    assert interpreted["bad"][:, 4].isfinite().all()


@pytest.mark.processes
def test_a_row_without_any_probability_adds_nothing(interpreted):
    """Another rank of the vocabulary may have probabilities."""
    for statistics in interpreted["nothing"]:
        assert statistics.tolist() == [[-torch.inf] * 2, [0, 0], [0, 0], [0, 0]]


# The kernels themselves, against PyTorch's.


def whole(columns, entropy=True, squares=True):
    """The options for rows of this number of columns."""
    return SoftmaxOptions(columns, 1 / 0.7, entropy, squares, None, False, allow_minus_inf=True)


# For a GPU that this machine lacks.


class NoGpu:
    """The driver of a GPU, as far as the compiler needs it."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


class Compiled:
    """A stand-in of a kernel that keeps the assembly instead of launching it."""

    def __init__(self, kernel, assembly):
        self.kernel = kernel
        self.assembly = assembly

    def __getitem__(self, grid):
        return functools.partial(self.launch, grid)

    def launch(self, grid, *arguments, **options):
        compiled = self.kernel.warmup(*arguments, grid=grid, **options)
        # A GPU takes the machine code that the assembler made.
        assert compiled.asm["cubin"].startswith(b"\x7fELF")
        self.assembly.append(compiled.asm["ptx"])


@pytest.fixture(params=[80, 90, 100], ids="sm_{}".format)
def assembly(request, monkeypatch, tmp_path):
    require_triton()
    from megatron_rc.parallel import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sources = []
    for name in ("_statistics_kernel", "_gradient_kernel"):
        monkeypatch.setattr(triton_kernels, name, Compiled(getattr(triton_kernels, name), sources))
    # triton.runtime.driver.set_active cannot be undone where there is no GPU.
    monkeypatch.setattr("triton.runtime.jit.driver", types.SimpleNamespace(active=NoGpu(request.param)))
    return sources


def test_the_kernels_compile_for_a_gpu(assembly):
    """The interpreter passes much that the compiler rejects."""
    from megatron_rc.parallel import triton_kernels

    rows = torch.ones(4, dtype=torch.bool)
    factor = torch.zeros(4)
    for dtype, width, columns, all_terms in ((torch.bfloat16, 2048, 2001, True), (torch.float32, 1, 1, False)):
        logits = torch.zeros(4, width, dtype=dtype)
        optional = factor if all_terms else None
        options = whole(columns, all_terms, all_terms)
        triton_kernels.row_statistics(logits, options)
        gradients = RowGradients(
            log_normalizer=factor,
            constant=factor,
            log_pi_factor=optional,
            pi_factor=optional,
            label_column=rows.long(),
            owns_label=rows,
            label_gradient=factor,
            counted=rows,
        )
        triton_kernels.write_gradient(logits, logits, gradients, options)
    forward, backward, *single = assembly
    assert len(single) == 2
    # Logits are loaded as vectors, although the vocabulary is a multiple of nothing.
    assert "ld.global.v4" in forward
    assert "ld.global.v4" in backward
    assert "st.global.v4" in backward
    # To the interpreter, unlike to a GPU, every maximum with NaN is NaN.
    assert "max.NaN.f32" in forward
    assert "max.NaN.f32" in backward
