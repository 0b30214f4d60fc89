"""A checkpoint that an earlier version of this project wrote: runs go on from it, digit for digit.

``tests/golden/checkpoint`` holds it: tensor, pipeline and data parallel 2, distributed optimizer, critic, reference
policy, and responses that were under way. ``rows.json`` beside it has the metrics of the steps that followed in the run
that wrote it. ``python -m tests.launch.training.checkpoints.test_older_checkpoint FOLDER`` writes such a folder by the
code of the checkout.
"""

import json
import platform
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.support.forked import launch_forked
from tests.support.numbered_server import numbered_servers
from tests.support.paths import ROOT
from tests.support.runs import finish, steps

OLDER = ROOT / "tests" / "golden" / "checkpoint"
SAVED = 2
STEPS = 5
# data-parallel replicas, and prompts of a rollout batch
REPLICAS = 2
PROMPTS = 16
FLAGS = f"""--cpu --from-scratch --num-layers=2 --hidden-size=32 --ffn-hidden-size=48 --num-attention-heads=4
--group-query-attention --num-query-groups=2 --position-embedding-type=rope --normalization=RMSNorm --swiglu
--disable-bias-linear --init-method-std=0.08 --make-vocab-size-divisible-by=4 --seq-length=12
--tensor-model-parallel-size=2 --pipeline-model-parallel-size=2 --use-distributed-optimizer
--task=python:tests.support.numbered_rollouts:Numbers --grpo-prompts-per-step={PROMPTS} --grpo-group-size=1
--global-batch-size={PROMPTS} --micro-batch-size=4 --grpo-iterations=1 --train-iters={STEPS}
--advantage-estimator=gae --gae-lambda=0.95 --critic-lr=2e-3 --value-clip=0.2 --grpo-kl-beta=0.05
--lr=1e-3 --min-lr=1e-4 --lr-decay-style=cosine --weight-decay=0.01
--rollout-is=token --rollout-is-threshold=2 --rollout-rs=token_k1 --rollout-rs-threshold=0.5_2
--rl-partial-rollouts --rollout-staleness=2 --rollout-engine=vllm-server --rollout-dtype=bf16 --run-name=run""".split()


def step_of(number):
    """The step whose weights answer a prompt, once the checkpoint is there: the step of its rollout batch."""
    return number // PROMPTS


def step_of_first_run(number):
    """As above, but half of the batch after the checkpoint and all of the second one are answered before it.

    These responses are in the checkpoint; the others are asked for again.
    """
    batch, prompt = divmod(number, PROMPTS)
    is_even = prompt % 2 == 0
    if batch == SAVED + 1 or (batch == SAVED and is_even):
        return SAVED - 1
    return batch


def train(folder, steps_of_prompts, *more):
    """Rows of a run, without times."""
    with numbered_servers(REPLICAS, steps_of_prompts) as urls:
        arguments = [*FLAGS, f"--rollout-url={','.join(urls)}", f"--rollout-weights-dir={folder}/weights"]
        arguments += [f"--runs-dir={folder}", *more]
        code, _, errors = finish(launch_forked(folder, ["--nproc-per-node=8", *arguments]), timeout=600)
    assert code == 0, errors
    return steps(folder / "run")


def machine():
    """What the last digits of a sum in float32 depend on."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "torch": torch.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "processor": names[0].partition(": ")[2] if names else platform.processor(),
    }


@pytest.mark.processes
def test_a_run_goes_on_from_an_older_checkpoint(tmp_path):
    recorded = json.loads((OLDER / "rows.json").read_text())
    rows = train(tmp_path, step_of, f"--load={OLDER}")
    expected = recorded["rows"]
    assert [row["step"] for row in rows] == [3, 4, 5]
    assert [row["rollout/staleness_max"] for row in rows] == [1, 2, 0]
    for row, expected_row in zip(rows, expected, strict=True):
        # Later versions have further metrics.
        recorded_metrics = {name: row[name] for name in expected_row}
        if machine() == recorded["machine"]:
            assert recorded_metrics == expected_row
        else:
            assert recorded_metrics == pytest.approx(expected_row, rel=1e-3, abs=1e-4)


def record(folder):
    """Write the checkpoint and the rows that follow it."""
    rows = train(folder, step_of_first_run, f"--save={folder}/save", f"--save-interval={SAVED}")
    name = f"iter_{SAVED:07d}"
    shutil.copytree(folder / "save" / name, folder / "checkpoint" / name)
    (folder / "checkpoint" / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    recorded = {"machine": machine(), "rows": rows[SAVED:]}
    (folder / "checkpoint" / "rows.json").write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
