"""The divergence from a teacher: time beside two calls of log-probs, and peak memory beside the logits' gradient.

    python benchmarks/divergence.py [--nemo-rl FOLDER] [--verl FOLDER] [--top-k 64]

``two log-probs`` are the log-probs of both policies' labels, each with its backward. ``plain`` is log_softmax of both,
and the formula. ``nemo_rl`` is NeMo-RL's DistributedCrossEntropy, the forward KL up to the teacher's entropy, of a
checkout in FOLDER. ``verl`` is verl's divergence from the teacher's top k, of a checkout in FOLDER.

The contenders run in turns in one process on one thread. Times are CPU seconds of the process, medians of 7, with the
backward; so other programs on the machine matter little. Memory is the peak of ``torch.profiler`` beyond the logits of
both policies, in sizes of the student's gradient, for four times as many tokens.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from benchmarks.vocab import say, say_head
from megatron_rc.parallel import (
    top_k_divergence,
    vocab_parallel_divergence,
    vocab_parallel_log_probs,
)
from megatron_rc.parallel.divergence import DIVERGENCES
from tests.parallel.test_vocab_memory import allocated
from tests.support.divergence_oracle import divergence

SHAPES = ((512, 32768), (128, 151936))
MORE_TOKENS = 4  # memory is measured with so many times the tokens, for which times would take long
ROUNDS = 7
BASE = "two log-probs"

Contender = Callable[[Tensor], Tensor]  # from the student's logits to one number a token


def of_nemo_rl(folder: Path, teacher: Tensor) -> Contender:
    """NeMo-RL's forward KL, less the teacher's entropy, of a checkout."""
    sys.path.insert(0, str(folder))
    from nemo_rl.distributed.model_utils import DistributedCrossEntropy

    group = parallel_state.get_tensor_model_parallel_group()
    return lambda logits: DistributedCrossEntropy.apply(logits, teacher, group)


def of_verl(folder: Path, log_probs: Tensor, ids: Tensor) -> Contender:
    """The forward KL of verl over the teacher's top k, of a checkout: two definitions of a module, not its imports."""
    path = folder / "verl" / "trainer" / "distillation" / "megatron" / "losses.py"
    module = ast.parse(path.read_text(encoding="utf-8"))
    names = ("vocab_parallel_log_softmax", "_VocabParallelKLDivergence")
    module.body = [node for node in module.body if getattr(node, "name", None) in names]
    definitions: dict[str, Any] = {"torch": torch, "Optional": Optional}
    exec(compile(module, str(path), "exec"), definitions)
    function = definitions["_VocabParallelKLDivergence"]
    return lambda logits: function.apply(logits.unsqueeze(0), log_probs.unsqueeze(0), ids.unsqueeze(0), None)[0]


def step(contender: Contender, leaf: Tensor) -> None:
    """Forward and backward."""
    leaf.grad = None
    contender(leaf.view_as(leaf)).sum().backward()


def cpu_seconds(contenders: dict[str, Contender], fresh: Tensor) -> dict[str, float]:
    """The median CPU time of each contender, forward and backward, in turns."""
    leaf = fresh.clone().requires_grad_()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(ROUNDS + 1):
        for name, contender in contenders.items():
            start = time.process_time()
            step(contender, leaf)
            if turn:
                times[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def peaks(contenders: dict[str, Contender], fresh: Tensor) -> dict[str, float]:
    """The peak memory of each contender beyond the logits, in sizes of the student's gradient."""
    leaf = fresh.clone().requires_grad_()
    times = {}
    for name, contender in contenders.items():
        leaf.grad = None
        peak = allocated(lambda contender=contender: step(contender, leaf))[0]
        times[name] = peak / (fresh.element_size() * fresh.numel())
    return times


def say_rows(make: Callable[[int], tuple[dict[str, Contender], Tensor]], shape: tuple[int, int], label: str) -> None:
    """Print a row for each contender; ``make`` gives the contenders and the student's logits for a number of tokens."""
    seconds = cpu_seconds(*make(shape[0]))
    memory = peaks(*make(MORE_TOKENS * shape[0]))
    for name, value in seconds.items():
        say(f"| {label} | {name} | {value * 1e3:.0f} | {value / seconds[BASE]:.2f} | {memory[name]:.3f} |")


def two_log_probs(teacher: Tensor, labels: Tensor) -> Contender:
    """The log-probs of the labels by both policies; the backward of both runs."""
    teacher = teacher.clone().requires_grad_()

    def run(logits: Tensor) -> Tensor:
        teacher.grad = None
        return vocab_parallel_log_probs(logits, labels) + vocab_parallel_log_probs(teacher, labels)

    return run


def whole_vocabulary(
    width: int, dtype: torch.dtype, nemo_rl: Path | None, tokens: int
) -> tuple[dict[str, Contender], Tensor]:
    """The divergences over whole vocabularies, and the student's logits."""
    generator = torch.Generator().manual_seed(0)
    fresh, teacher = torch.randn(2, tokens, width, generator=generator).to(dtype)
    labels = torch.randint(0, width, (tokens,), generator=generator)
    contenders: dict[str, Contender] = {BASE: two_log_probs(teacher, labels)}
    for kind in DIVERGENCES:
        contenders[f"{kind}, plain"] = lambda x, kind=kind: divergence(kind, x.float(), teacher.float())
        contenders[f"{kind}, ours"] = lambda x, kind=kind: vocab_parallel_divergence(x, teacher, kind=kind)
    if nemo_rl is not None:
        contenders["forward_kl, nemo_rl"] = of_nemo_rl(nemo_rl, teacher)
    return contenders, fresh


def top_k(width: int, few: int, verl: Path | None, tokens: int) -> tuple[dict[str, Contender], Tensor]:
    """The divergences from a few of the teacher's tokens, float32, and the student's logits."""
    generator = torch.Generator().manual_seed(0)
    fresh, teacher = torch.randn(2, tokens, width, generator=generator)
    labels = torch.randint(0, width, (tokens,), generator=generator)
    log_probs = teacher.log_softmax(-1)
    teacher_top_k = log_probs.topk(few)
    of_labels = log_probs.gather(1, labels.unsqueeze(1)).squeeze(1)
    of_teacher = (teacher_top_k.indices.flatten(), few * torch.arange(tokens + 1), teacher_top_k.values.flatten())
    of_sample = {"labels": labels, "teacher_label_log_probs": of_labels}
    contenders: dict[str, Contender] = {BASE: two_log_probs(teacher, labels)}
    for tail, more in (("sampled", of_sample), ("rest", {}), ("none", {})):
        contenders[f"forward_kl, {tail}, ours"] = lambda x, tail=tail, more=more: top_k_divergence(
            x, *of_teacher, tail=tail, kind="forward_kl", **more
        )
    if verl is not None:
        contenders["forward_kl, verl"] = of_verl(verl, teacher_top_k.values, teacher_top_k.indices)
    return contenders, fresh


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nemo-rl", type=Path, help="folder of a checkout of NeMo-RL, to measure it too")
    parser.add_argument("--verl", type=Path, help="folder of a checkout of verl, to measure it too")
    parser.add_argument("--top-k", type=int, default=64, help="tokens of the teacher at a position; default: 64")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        say(f"torch {torch.__version__}, one thread, CPU time")
        say_head(["logits", "", "with backward, ms", f"/ {BASE}", "peak / gradient"])
        for shape in SHAPES:
            for dtype in (torch.float32, torch.bfloat16):
                make = partial(whole_vocabulary, shape[1], dtype, arguments.nemo_rl)
                say_rows(make, shape, f"{shape[0]} x {shape[1]}, {str(dtype)[6:]}")
        for shape in SHAPES:
            make = partial(top_k, shape[1], arguments.top_k, arguments.verl)
            say_rows(make, shape, f"{shape[0]} x {shape[1]}, float32, k {arguments.top_k}")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
