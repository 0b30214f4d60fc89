"""A run whose rewards are all equal says so, once."""

import json

import pytest

from megatron_rc.launch.training.checks.equal_rewards import BATCHES, EqualRewards
from megatron_rc.records.rollout import save_rollouts
from tests.support.ranks import Layout
from tests.support.recorded_training import COMMON, LLAMA, flags, recorded_batch, run_config
from tests.support.training_runs import LIVE, rows, said_by_training


def batch(largest, smallest=None):
    return {"reward/max": largest, "reward/min": largest if smallest is None else smallest}


def lines(watch, batches):
    """Number of each batch after which a line was said, and the line."""
    sentences = ((number, watch.batch(metrics, lambda: "4" * 500)) for number, metrics in enumerate(batches, 1))
    return [(number, sentence) for number, sentence in sentences if sentence is not None]


@pytest.mark.parametrize(
    ("batches", "due"),
    [
        ([batch(0)] * 60, [20]),
        ([batch(0)] * 19 + [batch(0, -1)] + [batch(0)] * 19, []),
        ([batch(0)] * 19 + [batch(1)] * 21, [39]),
        ([batch(1, 0)] * 5 + [batch(-0.5)] * 20, [25]),
        ([batch(0)] * 25 + [batch(1, 0)] + [batch(0)] * 25, [20]),
    ],
    ids=["always", "but-one-response", "another-value", "later", "twice"],
)
def test_twenty_batches_in_a_row_have_one_value(tmp_path, batches, due):
    watch = EqualRewards(run_config(flags(tmp_path)))
    assert [number for number, _ in lines(watch, batches)] == due


def test_the_line_names_the_value_what_gave_it_and_a_response(tmp_path):
    ((_, sentence),) = lines(EqualRewards(run_config(flags(tmp_path))), [batch(-0.5)] * 20)
    assert "last 20 rollout batches are -0.5" in sentence
    assert "--task count_up" in sentence
    assert "4" * 120 in sentence
    assert len(sentence) < 400
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "1", "answer": "2"}) + "\n")
    files = [*LLAMA, *COMMON, f"--runs-dir={tmp_path}", f"--prompt-data={tmp_path}/a.jsonl", "--label-key=answer"]
    config = run_config([*(word for word in files if word != "--task=count_up"), "--reward=exact"])
    ((_, sentence),) = lines(EqualRewards(config), [batch(0)] * 20)
    assert "--label-key answer" in sentence
    assert "--reward exact" in sentence
    save_rollouts(recorded_batch(0), tmp_path / "step-0000000-replica-0000.safetensors")
    config = run_config(flags(tmp_path, f"--load-rollouts={tmp_path}", "--train-iters=2"))
    ((_, sentence),) = lines(EqualRewards(config), [batch(0)] * 20)
    assert f"--load-rollouts {tmp_path}" in sentence


@pytest.mark.parametrize("steps_of_batch", [1, 2])
def test_a_run_that_goes_on_counts_the_batches_before_its_checkpoint(tmp_path, steps_of_batch):
    """Rows of steps that are made again do not count, nor do evaluations; a line that was said is not said again."""
    config = run_config(flags(tmp_path, f"--grpo-iterations={steps_of_batch}"))
    steps = [{"step": step, **batch(0)} for step in range(1, 61)]
    written = [row for step in steps for row in (step, {"step": step["step"], "eval/reward": 0.0})]
    for made, due in ((12, [8]), (20, []), (25, [])):
        watch = EqualRewards(config)
        watch.go_on(written, made * steps_of_batch)
        assert [number for number, _ in lines(watch, [batch(0)] * 30)] == due


def test_a_run_says_it_once_over_all_replicas_and_its_parts(ranks, tmp_path):
    """Labels that no response can be."""
    layout = Layout(dp=2)
    save = [f"--save={tmp_path}/save", f"--load={tmp_path}/save"]
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "1 + 1 = ", "label": "never" * 9}) + "\n")
    base = [word for word in [*LLAMA, *COMMON, *LIVE] if not word.startswith("--task")]
    arguments = [*base, f"--prompt-data={tmp_path}/a.jsonl", "--reward=exact", "--seq-length=24", "--num-layers=1"]
    arguments += [f"--runs-dir={tmp_path}", "--max-response-length=4", *save, *layout.flags()]
    message = []
    for steps in (BATCHES - 1, BATCHES + 1):
        (error, output), _ = ranks.run(said_by_training, layout, [*arguments, f"--train-iters={steps}"])
        assert error is None
        message.append([line for line in output.splitlines() if line.startswith("all rewards of the last 20 ")])
    assert [len(lines) for lines in message] == [0, 1]
    assert "batches are 0," in message[1][0]
    assert {row["reward/max"] for row in rows(tmp_path)} == {0}
