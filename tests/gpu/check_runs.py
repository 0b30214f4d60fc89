"""Whole runs of the launcher on one device: the reward rises, whichever engine samples."""

import json
import statistics

import pytest

from tests.gpu.packages import require
from tests.gpu.training import job

# The launch file's model on one rank, in a third of its steps.
ONE_RANK = ("--tensor-model-parallel-size=1", "--pipeline-model-parallel-size=1", "--no-sequence-parallel")
ITERATIONS = 60
LIMIT = 140  # seconds of a run


def launch(folder, device, *arguments):
    """The metrics of each step of a run."""
    command = ["-m", "megatron_rc.launch", "--nproc-per-node=1", "--config=count_up", *ONE_RANK]
    command += [*arguments, f"--runs-dir={folder}", "--run-name=run", *(["--cpu"] if device.type == "cpu" else [])]
    done = job(command, LIMIT)
    if device.type == "cuda":
        assert "runs on the CPU" not in done.stdout + done.stderr
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if "reward/mean" in row]


def assert_learnt(rows, figures, least):
    """The mean reward of the last tenth of the steps is above that of the first by this much."""
    some = max(1, len(rows) // 10)
    first, last = (statistics.mean(row["reward/mean"] for row in part) for part in (rows[:some], rows[-some:]))
    names = [f"perf/{name}_seconds" for name in ("sync", "rollout", "plan", "update")]
    times = {name[5:-8]: statistics.median(row[name] for row in rows if name in row) for name in names}
    figures(reward_before=first, reward_after=last, **{f"{name}_s": value for name, value in times.items()})
    assert last > first + least


@pytest.mark.timeout(LIMIT + 10)
@pytest.mark.parametrize(
    "more", [(), ("--bf16", "--use-distributed-optimizer", "--rl-use-sequence-packing")], ids=["float32", "bfloat16"]
)
def test_transformers_engine(device, on_gpu, figures, tmp_path, more):
    steps = ITERATIONS if on_gpu else 4
    rows = launch(tmp_path, device, f"--train-iters={steps}", *more)
    assert len(rows) == steps
    assert_learnt(rows, figures, 0.2 if on_gpu else -1)


@pytest.mark.timeout(LIMIT + 10)
@pytest.mark.parametrize("more", [(), ("--rollout-colocate",)], ids=["stays", "sleeps"])
def test_vllm_engine(device, on_gpu, figures, tmp_path, more):
    """In the trainer's own process, with weights handed over in memory; on a GPU it may sleep between rollouts."""
    require("vllm")
    steps = 40 if on_gpu else 2
    arguments = ["--rollout-engine=vllm", "--rollout-dtype=bf16", f"--train-iters={steps}", *(more if on_gpu else ())]
    rows = launch(tmp_path, device, *arguments)
    assert len(rows) == steps
    assert_learnt(rows, figures, 0.02 if on_gpu else -1)
