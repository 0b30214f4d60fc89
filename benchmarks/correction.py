"""The correction with all its metrics against a straightforward multi-pass one: time, peak memory, and both compiled.

    python benchmarks/correction.py [--compile]

Token-level weights truncated at 2, one rejection criterion, every metric; the baseline is ``benchmarks/naive.py``,
which computes the 44 metrics that verl has for the two, each by itself from full tensors. The contenders run in turns,
in one process on an otherwise idle machine; medians are printed. Peak memory is what ``torch.profiler`` saw allocated
at once, in tensors of the log-probs' size.

Without the two settings of glibc's allocator below, most of what is measured are page faults.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
SHAPES = ((512, 2048), (64, 32768), (673, 24929))  # the last: 2²⁴ + 1 tokens
ROUNDS = 9

if __name__ == "__main__" and any(os.environ.get(name) != value for name, value in MALLOC.items()):
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | MALLOC)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from benchmarks import naive  # noqa: E402
from megatron_rc import RolloutCorrectionConfig, correct_rollouts  # noqa: E402

CONFIG = RolloutCorrectionConfig(rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="0.5_2")


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def make_batch(shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """(train, rollout, mask), three quarters of the tokens valid."""
    generator = torch.Generator().manual_seed(0)
    rollout = -3 * torch.rand(shape, generator=generator) - 0.01
    train = (rollout + 0.05 * torch.randn(shape, generator=generator)).clamp(max=0)
    return train, rollout, torch.rand(shape, generator=generator) > 0.25


def peak(function: Callable[[], object]) -> int:
    """Bytes allocated at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    held = largest = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            largest = max(largest, held)
    return largest


def measure(shape: tuple[int, int], compiled: bool) -> None:
    """Print one row of the table."""
    train, rollout, mask = make_batch(shape)
    kept: dict[str, object] = {}

    def ours(**more: bool) -> None:
        result = correct_rollouts(train, rollout, mask, CONFIG, **more)
        result.check()
        kept["ours"] = result.metrics(), result.weights, result.mask

    def theirs() -> None:
        kept["theirs"] = naive.correct(train, rollout, mask)

    contenders: dict[str, Callable[[], None]] = {"baseline": theirs, "eager": ours}
    if compiled:
        contenders["compiled"] = lambda: ours(compile=True)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(ROUNDS + 1):
        for name, function in contenders.items():
            start = time.perf_counter()
            function()
            if turn:
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    kept.clear()
    memory = {name: peak(function) / (4 * train.numel()) for name, function in contenders.items()}
    cells = [
        f"{medians[name] * 1e3:.1f} ms ({medians['baseline'] / medians[name]:.2f}x), {memory[name]:.2f}"
        for name in medians
    ]
    say(f"| {shape[0]} x {shape[1]} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="also through torch.compile (needs a C++ compiler)")
    arguments = parser.parse_args()
    names = ["baseline", "eager", *["compiled"] * arguments.compile]
    say(f"torch {torch.__version__}, {torch.get_num_threads()} threads; time (baseline / time), peak in tensors")
    say("| shape | " + " | ".join(names) + " |")
    say("|" + "---|" * (len(names) + 1))
    for each in SHAPES:
        measure(each, arguments.compile)
