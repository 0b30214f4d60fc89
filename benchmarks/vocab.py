"""Log-probs and entropy from logits: time and extra memory, against plain PyTorch and Megatron-Core's cross entropy.

    python benchmarks/vocab.py [--compile] [--tp 2] [--linear] [--support]

``plain`` is log_softmax, gather and the entropy's formula (over the whole vocabulary, so only with TP 1); ``megatron``
is Megatron-Core's vocab_parallel_cross_entropy, which has no entropy and overwrites the logits; ``floor`` only reads
the logits and writes as much. The contenders run in turns, in one process for each TP rank; use an idle machine. Times
are medians of 7. Memory is the peak of ``torch.profiler`` beyond the logits, in float32 copies of the local logits.

``--linear`` measures the fused output layer against a matmul and the unfused functions instead. ``--support`` measures
log-probs over 20 and 2,000 kept tokens of each position, beside none.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
SHAPES = ((2048, 32768), (512, 151936))
SUPPORTS = (20, 2000)  # kept tokens of a position
LINEAR_SHAPES = ((1024, 1024, 32768),)  # tokens, hidden size, vocabulary
ROUNDS = 7

if __name__ == "__main__" and any(os.environ.get(name) != value for name, value in MALLOC.items()):
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | MALLOC)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.correction import run_in_turns  # noqa: E402
from megatron_rc.parallel import linear_log_probs_and_entropy, vocab_parallel_log_probs_and_entropy  # noqa: E402
from tests.parallel.test_vocab_memory import allocated  # noqa: E402

Contender = Callable[[Tensor], list[Tensor]]


def say(line: str) -> None:
    """Print a line at once, on the first rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def say_head(names: list[str]) -> None:
    """Print the head of a table."""
    say("| " + " | ".join(names) + " |\n|" + "---|" * len(names))


def plain(labels: Tensor) -> Contender:
    """The contender log_softmax, gather, entropy."""

    def run(logits: Tensor) -> list[Tensor]:
        log_pi = torch.log_softmax(logits.float(), -1)
        entropy = -(log_pi.exp() * log_pi).sum(-1)
        return [log_pi.gather(-1, labels.unsqueeze(-1)).squeeze(-1), entropy]

    return run


def seconds(work: Callable[[], object]) -> float:
    """How long some work takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_turns(contenders: dict[str, Contender], fresh: Tensor) -> dict[str, list[tuple[float, float]]]:
    """Seconds of the forward, and of forward and backward, of each contender in each round."""
    leaf = fresh.clone().requires_grad_()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for turn in range(ROUNDS + 1):
        for name, contender in contenders.items():
            both = _timed(contender, leaf, fresh)
            if turn:
                times[name].append(both)
    return times


def say_row(label: str, name: str, times: list[tuple[float, float]], cells: list[str]) -> None:
    """Print a contender's row: its median times in milliseconds, and more cells."""
    milliseconds = [f"{statistics.median(column) * 1e3:.0f}" for column in zip(*times, strict=True)]
    say(f"| {label} | " + " | ".join([name, *milliseconds, *cells]) + " |")


def measure(shape: tuple[int, int], dtype: torch.dtype, compiled: bool) -> None:
    """Print the rows of one shape and dtype."""
    group = parallel_state.get_tensor_model_parallel_group()
    tp = dist.get_world_size()
    tokens, vocabulary = shape
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    fresh = torch.randn(tokens, vocabulary // tp, generator=generator).to(dtype)

    def ours(**more: bool) -> Contender:
        return lambda logits: list(vocab_parallel_log_probs_and_entropy(logits, labels, group, **more))

    contenders: dict[str, Contender] = {"plain": plain(labels)} if tp == 1 else {}
    contenders["megatron"] = lambda logits: [vocab_parallel_cross_entropy(logits.unsqueeze(1), labels.unsqueeze(1))]
    contenders |= {"ours": ours(), "ours, in place": ours(inplace_backward=True)}
    if compiled:
        contenders["ours, compiled"] = ours(compile=True)
    times = in_turns(contenders, fresh)
    out = torch.empty_like(fresh)
    times["floor"] = [(0.0, seconds(lambda: torch.mul(fresh, 2, out=out))) for _ in range(ROUNDS + 1)]
    for name, values in times.items():
        both = statistics.median(value for _, value in values)
        others = dict.fromkeys(("plain" if tp == 1 else "megatron", "megatron"))
        ratios = [f"{both / statistics.median(value for _, value in times[other]):.2f}" for other in others]
        memory = ["", ""] if name == "floor" else peaks(contenders[name], fresh)
        say_row(f"{tokens} x {vocabulary}, {str(dtype)[6:]}, TP {tp}", name, values, [*ratios, *memory])


def measure_linear(tokens: int, hidden_size: int, vocabulary: int) -> None:
    """Print the row of one shape, float32: the fused output layer, relative to a matmul and the unfused function."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    hidden = torch.randn(tokens, hidden_size, generator=generator).requires_grad_()
    weight = (torch.randn(vocabulary, hidden_size, generator=generator) / hidden_size**0.5).requires_grad_()

    def unfused() -> tuple[Tensor, ...]:
        return vocab_parallel_log_probs_and_entropy(hidden @ weight.t(), labels, inplace_backward=True)

    def fused() -> tuple[Tensor, ...]:
        return linear_log_probs_and_entropy(hidden, weight, labels)

    def step(function: Callable[[], tuple[Tensor, ...]]) -> None:
        hidden.grad = weight.grad = None
        results = function()
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])

    medians = run_in_turns({"unfused": partial(step, unfused), "fused": partial(step, fused)}, ROUNDS)
    gradients = hidden.element_size() * (hidden.numel() + weight.numel())
    chunk = hidden.element_size() * 256 * vocabulary
    memory = []
    for function in (unfused, fused):
        step(function)
        hidden.grad = weight.grad = None
        memory.append(f"{(allocated(partial(step, function))[0] - gradients) / chunk:.2f}")
    cells = [f"{tokens} x {hidden_size} x {vocabulary}"]
    cells += [f"{medians[name] * 1e3:.0f}" for name in medians]
    say("| " + " | ".join([*cells, f"{medians['fused'] / medians['unfused']:.2f}", *memory]) + " |")


def measure_support(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Print the rows of one shape and dtype: kept tokens beside none, with the entropy over the whole vocabulary."""
    tokens, vocabulary = shape
    generator = torch.Generator().manual_seed(0)
    fresh = torch.randn(shape, generator=generator).to(dtype)
    labels = fresh.argmax(1)
    contenders: dict[str, Contender] = {"none": lambda x: list(vocab_parallel_log_probs_and_entropy(x, labels))}
    sizes = {"none": 0}
    for count in SUPPORTS:
        ids = fresh.topk(count).indices.sort().values.flatten()
        kept_set = {"support_ids": ids, "support_offsets": torch.arange(tokens + 1) * count}
        contenders[str(count)] = partial(_kept, labels, kept_set)
        sizes[str(count)] = sum(tensor.nbytes for tensor in kept_set.values())
    times = in_turns(contenders, fresh)
    for name, values in times.items():
        seconds = [value for _, value in values]
        seconds_of_none = [value for _, value in times["none"]]
        ratios = [f"{of(seconds) / of(seconds_of_none):.2f}" for of in (statistics.median, min)]
        memory = [*peaks(contenders[name], fresh), f"{sizes[name] / (4 * fresh.numel()):.3f}"]
        say_row(f"{tokens} x {vocabulary}, {str(dtype)[6:]}", name, values, [*ratios, *memory])


def _kept(labels: Tensor, kept: dict[str, Tensor], logits: Tensor) -> list[Tensor]:
    return list(vocab_parallel_log_probs_and_entropy(logits, labels, **kept))


def _restore(leaf: Tensor, fresh: Tensor) -> None:
    leaf.grad = None
    leaf.detach().copy_(fresh)


def _timed(contender: Contender, leaf: Tensor, fresh: Tensor) -> tuple[float, float]:
    """Seconds of the forward, and of forward and backward."""
    _restore(leaf, fresh)
    logits = leaf.view_as(leaf)
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    results = contender(logits)
    middle = time.perf_counter()
    torch.autograd.backward(results, [torch.ones_like(result) for result in results])
    return middle - start, time.perf_counter() - start


def peaks(contender: Contender, fresh: Tensor) -> list[str]:
    """Peak memory of the forward, and of forward and backward, in float32 copies of the local logits."""
    leaf = fresh.clone().requires_grad_()

    def both() -> None:
        results = contender(leaf.view_as(leaf))
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])

    rows = []
    for function in (lambda: contender(leaf.view_as(leaf)), both):
        _restore(leaf, fresh)
        rows.append(f"{allocated(function)[0] / (4 * fresh.numel()):.3f}")
    return rows


def work(rank: int, tp: int, meeting: str, compiled: bool) -> None:
    """Measure on one TP rank."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // tp))
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=tp)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    say(f"torch {torch.__version__}, {tp} processes of {torch.get_num_threads()} threads")
    versus = ["/ plain", "/ megatron"] if tp == 1 else ["/ megatron"]
    say_head(["logits", "", "forward, ms", "with backward, ms", *versus, "forward peak", "peak"])
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            measure(shape, dtype, compiled)
    dist.destroy_process_group()


def linear() -> None:
    """Print the table of the fused output layer."""
    say(f"torch {torch.__version__}, {torch.get_num_threads()} threads; peaks beyond gradients, in chunks of logits")
    say_head(["tokens x hidden x vocabulary", "matmul and unfused, ms", "fused, ms", "ratio", "peak", "fused peak"])
    for shape in LINEAR_SHAPES:
        measure_linear(*shape)


def support() -> None:
    """Print the table of kept tokens."""
    say(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    head = ["logits", "kept tokens", "forward, ms", "with backward, ms", "/ none", "least / least"]
    say_head([*head, "forward peak", "peak", "the support itself"])
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            measure_support(shape, dtype)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="also measure torch.compile (needs a C++ compiler)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks, one process each; default: 1")
    parser.add_argument("--linear", action="store_true", help="measure the fused output layer instead")
    parser.add_argument("--support", action="store_true", help="measure kept tokens beside none instead")
    arguments = parser.parse_args()
    if arguments.linear or arguments.support:
        (linear if arguments.linear else support)()
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (arguments.tp, f"{folder}/meeting", arguments.compile), nprocs=arguments.tp)
