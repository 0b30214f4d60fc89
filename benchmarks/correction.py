"""The correction with all metrics, eager and compiled, against a plain multi-pass correction: time and peak memory.

    python benchmarks/correction.py [--compile] [--verl FOLDER]

Token-level weights truncated at 2, one rejection criterion, every metric. The baseline, ``benchmarks/naive.py``,
computes verl's 44 metrics of these one by one from full tensors. The contenders run in turns, in one process; use an
idle machine. Times are medians. Peak memory is the memory allocated at once by ``torch.profiler``, in tensors of the
log-probs' size.

``--verl`` is a folder with the package verl and its helper's imports (``pip install --no-deps --target``). A second
table compares with that helper, on one thread, given its trainer's int64 mask and a float mask. All must find the same
weights, masks and mean weight.

Without the two settings of glibc's allocator below, page faults would dominate the times.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
SHAPES = ((512, 2048), (64, 32768), (673, 24929))  # the last: 2²⁴ + 1 tokens
ROUNDS = 9

if __name__ == "__main__" and any(os.environ.get(name) != value for name, value in MALLOC.items()):
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | MALLOC)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks import naive  # noqa: E402
from megatron_rc import RolloutCorrectionConfig, correct_rollouts  # noqa: E402
from tests.parallel.test_vocab_memory import allocated  # noqa: E402

Batch = tuple[Tensor, Tensor, Tensor]
Result = tuple[dict[str, float], Tensor, Tensor]  # metrics, weights, mask

CONFIG = RolloutCorrectionConfig(rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="0.5_2")


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def make_batch(shape: tuple[int, int]) -> Batch:
    """(train, rollout, mask), three quarters of the tokens valid."""
    generator = torch.Generator().manual_seed(0)
    rollout = -3 * torch.rand(shape, generator=generator) - 0.01
    train = (rollout + 0.05 * torch.randn(shape, generator=generator)).clamp(max=0)
    return train, rollout, torch.rand(shape, generator=generator) > 0.25


def ours(batch: Batch, *, compile: bool = False) -> Result:
    """This package's correction."""
    result = correct_rollouts(*batch, CONFIG, compile=compile)
    result.check()
    return result.metrics(), result.weights, result.mask


def baseline(batch: Batch) -> Result:
    """The multi-pass correction."""
    weights, mask, metrics = naive.correct(*batch)
    return metrics, weights, mask


def verl(batch: Batch) -> Result:
    """The correction of verl's trainer."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        *batch,
        rollout_is="token",
        rollout_is_threshold=2.0,
        rollout_rs="token_k1",
        rollout_rs_threshold="0.5_2.0",
    )
    return metrics, weights.batch["rollout_is_weights"], mask


def run_in_turns(contenders: Mapping[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """The median time of each contender."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, function in contenders.items():
            start = time.perf_counter()
            result = function()  # freed after the time is taken
            if turn:
                times[name].append(time.perf_counter() - start)
            del result
    return {name: statistics.median(values) for name, values in times.items()}


def measure(shape: tuple[int, int], compiled: bool) -> None:
    """Print one row of the first table."""
    batch = make_batch(shape)
    contenders: dict[str, Callable[[], Result]] = {
        "baseline": lambda: baseline(batch),
        "eager": lambda: ours(batch),
    }
    if compiled:
        contenders["compiled"] = lambda: ours(batch, compile=True)
    medians = run_in_turns(contenders)
    memory = {name: allocated(function)[0] / (4 * batch[0].numel()) for name, function in contenders.items()}
    cells = [
        f"{medians[name] * 1e3:.1f} ms ({medians['baseline'] / medians[name]:.2f}x), {memory[name]:.2f}"
        for name in medians
    ]
    say(f"| {shape[0]} x {shape[1]} | " + " | ".join(cells) + " |")


def measure_verl(shape: tuple[int, int]) -> None:
    """Print one row of the table with verl, on one thread."""
    train, rollout, mask = batch = make_batch(shape)
    by_mask = {"verl, int64 mask": (train, rollout, mask.long()), "verl, float mask": (train, rollout, mask.float())}
    contenders: dict[str, Callable[[], Result]] = {
        name: functools.partial(verl, tensors) for name, tensors in by_mask.items()
    }
    contenders["eager"] = lambda: ours(batch)
    check_alike({name: function() for name, function in contenders.items()})
    medians = run_in_turns(contenders)
    cells = [f"{medians[name] * 1e3:.1f} ms" for name in by_mask]
    ratios = " and ".join(f"{medians[name] / medians['eager']:.2f}x" for name in by_mask)
    cells.append(f"{medians['eager'] * 1e3:.1f} ms ({ratios})")
    say(f"| {shape[0]} x {shape[1]} | " + " | ".join(cells) + " |")


def check_alike(results: dict[str, Result]) -> None:
    """Raise AssertionError if the contenders' results differ."""
    metrics, weights, mask = results["eager"]
    name = "rollout_corr/rollout_is_mean"
    for other_metrics, other_weights, other_mask in results.values():
        torch.testing.assert_close(other_weights, weights)
        torch.testing.assert_close(other_mask.bool(), mask)
        if not abs(other_metrics[name] - metrics[name]) <= 1e-5:  # also raises for NaN
            raise AssertionError(f"{name} is {other_metrics[name]}, not {metrics[name]}")


def print_header(names: list[str], note: str) -> None:
    """Print the head of a table."""
    say(f"torch {torch.__version__}, {torch.get_num_threads()} threads; {note}")
    say("| shape | " + " | ".join(names) + " |")
    say("|" + "---|" * (len(names) + 1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="also measure torch.compile (needs a C++ compiler)")
    parser.add_argument("--verl", metavar="FOLDER", help="also measure the verl in this folder, on one thread")
    arguments = parser.parse_args()
    names = ["baseline", "eager", *["compiled"] * arguments.compile]
    print_header(names, "time (baseline / time), peak in tensors")
    for each in SHAPES:
        measure(each, arguments.compile)
    if arguments.verl:
        warnings.simplefilter("ignore")  # of verl's imports
        sys.path.append(arguments.verl)
        torch.set_num_threads(1)
        print_header(["verl, int64 mask", "verl, float mask", "eager"], "time (verl / time)")
        for each in SHAPES[:2]:
            measure_verl(each)
