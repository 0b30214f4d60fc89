"""Training on prompts from files, on ranks: who draws what, resumption, and files that differ."""

import json
import re

import pytest

from megatron_rc.launch.checkpoint_folders import iteration_folder
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.flags.saved_settings import SETTINGS
from megatron_rc.launch.rewards.rules import Source
from megatron_rc.launch.rollouts.recorded import find_rollouts
from megatron_rc.launch.training.checkpoints.fitting import warn_of_other_data
from megatron_rc.records.rollout import load_rollouts
from tests.launch.tasks.test_text import tokenizer_folder
from tests.support.checkpoint_outline import outline_of_checkpoint
from tests.support.ranks import Layout
from tests.support.recorded_training import COMMON, LLAMA, flags, run_config
from tests.support.training_runs import LIVE, logged, rows, run_training

LAYOUT = Layout(dp=2)
# 4 prompts a step of 11 that fit: the second epoch begins in the third step.
PROMPTS = [f"{number} {number} " for number in range(11)]
DATA = ["--reward=exact", "--seq-length=24", "--max-response-length=6", "--grpo-prompts-per-step=4"]


@pytest.fixture
def files(tmp_path):
    for name, prompts in (("train", [*PROMPTS, "9" * 20]), ("test", ["1 1 ", "2 2 ", "3 3 "])):
        lines = [json.dumps({"prompt": prompt, "label": prompt.split()[0]}) for prompt in prompts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return ["--prompt-data", f"{tmp_path}/train.jsonl", "--eval-data", f"{tmp_path}/test.jsonl"]


def words(folder, files, *more):
    base = [word for word in COMMON if not word.startswith("--task")]
    evaluation = ["--eval-interval=2", "--eval-samples=2"]
    saved = [f"--save-rollouts={folder}/rollouts", f"--runs-dir={folder}"]
    return [*LLAMA, *base, *LIVE, *DATA, *evaluation, *saved, *LAYOUT.flags(), *files, *more]


def drawn(folder, task):
    """The prompts of every step, as the replicas sampled them."""
    results = []
    for step, batch in find_rollouts(f"{folder}/rollouts").items():
        parts = [load_rollouts(path) for path in batch]
        assert {int(group) for part in parts for group in part.group_ids} == set(range(4)), step
        shown = [
            task.text.decode(row[: mask.int().argmax()].tolist())
            for part in parts
            for row, mask in zip(part.tokens, part.response_mask, strict=True)
        ]
        results.append(shown[::4])
    return results


def test_prompts_are_those_of_their_numbers_through_epochs_and_a_resumption(ranks, tmp_path, files):
    """Every prompt of the file once an epoch, over both replicas; a run in two parts draws what a whole one draws."""
    whole = tmp_path / "whole"
    broken = tmp_path / "broken"
    save = [f"--save={tmp_path}/save", f"--load={tmp_path}/save"]
    runs = ((whole, ["--train-iters=3"]), (broken, ["--train-iters=2", *save]), (broken, ["--train-iters=3", *save]))
    for folder, more in runs:
        assert ranks.run(run_training, LAYOUT, words(folder, files, *more)) == [None, None]
    _, task = configure(words(whole, files, "--train-iters=3"), 2)
    steps = drawn(whole, task)
    assert steps == [[problem.prompt for problem in task.problems(4 * step, 4)] for step in range(3)]
    assert {prompt for step in steps for prompt in step} == set(PROMPTS)
    assert drawn(broken, task) == steps
    trained = [row for row in rows(whole) if "loss/total" in row]
    assert [row["data/epoch"] for row in trained] == pytest.approx([4 / 11, 8 / 11, 12 / 11])
    assert {row["data/overlong_prompts"] for row in trained} == {1}
    evaluated = [row for row in rows(whole) if "eval/reward" in row]
    assert [(row["step"], "eval/pass@2" in row) for row in evaluated] == [(0, True), (2, True), (3, True)]
    assert [row["loss/total"] for row in rows(broken) if "loss/total" in row] == [row["loss/total"] for row in trained]


def run_aloud(flags):
    """Train, and give back what was said of checkpoints."""
    with logged() as message:
        assert run_training(flags) is None
    return [line for line in message if "checkpoint" in line]


def test_files_that_changed_since_the_checkpoint_are_said(ranks, tmp_path, files):
    path = tmp_path / "train.jsonl"
    save = [f"--save={tmp_path}/save", f"--load={tmp_path}/save", "--eval-interval=9", "--eval-samples=1"]
    message = []
    for iterations, changed in enumerate((None, tmp_path / "test.jsonl", path), 1):
        if changed:
            changed.write_text(changed.read_text() + '\n{"prompt": "0 0 ", "label": 1}')
        message += ranks.run(run_aloud, Layout(), words(tmp_path, files, *save, f"--train-iters={iterations}"))
    assert message[0] == []
    for step, lines in enumerate(message[1:], start=1):
        (line,) = lines
        assert f"--prompt-data or --eval-data are not those of checkpoint {step}: " in line


@pytest.mark.parametrize(("seed", "lines"), [(1, 0), (2, 1)])
def test_another_seed_of_a_task_is_said(tmp_path, caplog, seed, lines):
    folder = iteration_folder(outline_of_checkpoint(tmp_path), 3)
    (folder / SETTINGS).write_text(json.dumps({"training": {"seed": 1}}))
    config = run_config([*flags(tmp_path, f"--load={tmp_path}", f"--seed={seed}", "--train-iters=5")])
    warn_of_other_data(config, 3)
    message = [record.getMessage() for record in caplog.records]
    assert len(message) == lines
    assert not lines or re.match("--seed 2 .* checkpoint 3, which is 1: ", message[0])


def run_with_own_file(paths, folder):
    from torch import distributed

    files = ["--prompt-data", paths[distributed.get_rank()]]
    flags = [word for word in words(folder, files, "--train-iters=2") if not word.startswith("--eval")]
    return run_training(flags)


def test_ranks_with_other_files_end_together(ranks, tmp_path):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, label in zip(paths, ("1", "2"), strict=True):
        path.write_text(json.dumps({"prompt": "1 1 ", "label": label}))
    ended = ranks.run(run_with_own_file, LAYOUT, [str(path) for path in paths], tmp_path)
    assert ended[0] == ended[1]
    assert re.match("RunError: .*--prompt-data and --eval-data differ between machines", ended[0])


def run_with_cache(words, cache):
    """Train, with converted copies of tables in this folder."""
    import datasets

    datasets.config.HF_DATASETS_CACHE = cache
    return run_training(words)


def test_a_run_of_verls_own_file(ranks, tmp_path, monkeypatch):
    """Parquet, prompts of messages, labels in an object, scored by the real library; two ranks convert it at once."""
    import datasets as library
    import pandas

    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", f"{tmp_path}/cache")

    tokenizer = tokenizer_folder(tmp_path / "tokenizer")
    for name, first in (("train", 0), ("test", 8)):
        table = [
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": f"{number} + 1 = ?"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": f"{number + 1}"},
                "extra_info": {"index": number},
            }
            for number in range(first, first + 8)
        ]
        pandas.DataFrame(table).to_parquet(tmp_path / f"{name}.parquet")
    base = [word for word in COMMON if not word.startswith("--task")]
    keys = ["--input-key=prompt", "--label-key=reward_model.ground_truth", "--apply-chat-template"]
    data = [f"--prompt-data={tmp_path}/train.parquet", f"--eval-data={tmp_path}/test.parquet", "--eval-interval=1"]
    more = ["--reward=math-verify", "--reward-workers=1", "--seq-length=64", "--max-response-length=6"]
    more += [f"--tokenizer-model={tokenizer}", f"--runs-dir={tmp_path}", "--train-iters=1", "--num-layers=1"]
    flags_of_run = [*LLAMA, *base, *LIVE, *LAYOUT.flags(), *keys, *data, *more]
    assert ranks.run(run_with_cache, LAYOUT, flags_of_run, f"{tmp_path}/cache") == [None, None]
    trained = [row for row in rows(tmp_path) if "loss/total" in row]
    assert [(row["reward/errors"], row["data/overlong_prompts"]) for row in trained] == [(0, 0)]
    answers = [json.loads(line) for line in (tmp_path / "run/eval/step-0000001.jsonl").read_text().splitlines()]
    assert [answer["label"] for answer in answers] == [str(number) for number in range(9, 17)]
    assert answers[0]["prompt"] == [{"role": "user", "content": "8 + 1 = ?"}]
    # What an answer of the model would get: the label is the number alone.
    _, task = configure(flags_of_run, 2)
    rule = Source(None, 1, "math-verify").load()
    problem = task.problems(0, 1, held_out=True)[0]
    scores = [
        rule(prompt=problem.prompt, response=text, label=problem.label, record=problem.record)
        for text in (r"So it is \boxed{9}.", r"So it is \boxed{8}.")
    ]
    assert scores == [1, 0]
