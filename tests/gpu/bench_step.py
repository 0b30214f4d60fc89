"""A step of a model of a billion parameters: how much of it is the correction, and what its modes save.

The plan of a rollout batch and one update, without an engine: 16 sequences of 1024 tokens, bfloat16, the distributed
optimizer. The correction's share is the time between the beginning and the end of its own calls in the GPU's queue, so
that the host's part counts as far as the GPU has to wait for it: much of it, where the host is slower than the GPU.
``alone_ms`` is the time of the same calls with a wait for the GPU before and after each.
"""

import statistics
import time

import pytest
import torch

from benchmarks.step import timed_correction
from tests.gpu.training import joined, words_for
from tests.support.made_rollouts import near_rollouts
from tests.support.recorded_training import make_trainer

VOCABULARY = 128_256
LENGTH = 1024
SEQUENCES = 16
ROWS = 4
BILLION = """--num-layers=16 --hidden-size=2048 --ffn-hidden-size=8192 --num-attention-heads=32 --num-query-groups=8
--bf16 --use-distributed-optimizer""".split()
SMALL = "--num-layers=2 --hidden-size=64 --ffn-hidden-size=96 --num-attention-heads=4 --num-query-groups=2".split()
COMMON = """--from-scratch --group-query-attention --position-embedding-type=rope --normalization=RMSNorm --swiglu
--disable-bias-linear --cpu --task=count_up --grpo-prompts-per-step=4 --grpo-group-size=4 --train-iters=100 --lr=1e-6
--lr-decay-style=constant --grpo-kl-beta=0""".split()
CRITERIA = ("--rollout-rs=token_k1", "--rollout-rs-threshold=0.5_2")
VARIANTS = {
    "decoupled": ("--rollout-is=token", *CRITERIA),
    "measured alone": ("--rollout-correction-preset=disabled",),
    "bypass": ("--rollout-is=none", "--bypass-mode", *CRITERIA),
}


@pytest.fixture(scope="module", autouse=True)
def groups(request, tmp_path_factory):
    arguments = flags(request.config.getoption("--device"), tmp_path_factory.mktemp("groups"))
    with joined(arguments):
        yield


def flags(device, folder, *more):
    length, vocabulary, rows = (LENGTH, VOCABULARY, ROWS) if device == "cuda" else (64, 512, 4)
    sizes = [f"--seq-length={length}", f"--vocab-size={vocabulary}", f"--max-response-length={length // 2}"]
    sizes += [f"--micro-batch-size={rows}", f"--global-batch-size={SEQUENCES}", f"--runs-dir={folder}"]
    return words_for(device, [*(BILLION if device == "cuda" else SMALL), *COMMON, *sizes, *more])


def rollouts(trainer):
    """Random tokens of which the last three quarters train."""
    mask = torch.zeros(SEQUENCES, trainer.config.training.seq_length, dtype=torch.bool)
    mask[:, mask.shape[1] // 4 :] = True
    return near_rollouts(trainer, mask, 0.03, torch.Generator())


def now():
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def mark():
    """A place in the GPU's queue."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(begun, end):
    return 1e3 * (end - begun) if isinstance(end, float) else begun.elapsed_time(end)


def of_correction(trainer, batch, clock):
    """Median milliseconds of the correction's calls in a step."""
    times = []
    for _ in range(4):
        with timed_correction(trainer.correction, clock) as calls:
            run_steps(trainer, batch, 1)
        times.append(sum(milliseconds(*call) for call in calls))
    return statistics.median(times)


def run_steps(trainer, batch, number):
    """Seconds of the plan and one update, each time."""
    times = []
    for _ in range(number):
        before = now()
        trainer.update(trainer.prepare(batch), 0)
        times.append(now() - before)
    return times


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", VARIANTS)
def test_step(device, on_gpu, figures, tmp_path, name):
    if on_gpu and torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("needs 60 GiB of free memory")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer = make_trainer(flags(device.type, tmp_path, *VARIANTS[name]))
    batch = rollouts(trainer)
    run_steps(trainer, batch, 2)
    step = 1e3 * statistics.median(run_steps(trainer, batch, 6))
    parameters = sum(parameter.numel() for chunk in trainer.chunks for parameter in chunk.parameters())
    figures(parameters=parameters, step_ms=step, alone_ms=of_correction(trainer, batch, now))
    inside = of_correction(trainer, batch, mark)
    figures(correction_ms=inside, share=inside / step)
    if on_gpu:
        figures(peak_GiB=torch.cuda.max_memory_allocated() / 2**30)
