"""``make run-smollm2`` learns from files and a function: the sums and the rule of ``--task sums``."""

import json
import re
import runpy
import shlex
import subprocess
import sys

import pytest
import transformers

from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.tasks import make_task
from tests.launch.tasks.test_text import tokenizer_folder
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(ROOT / "examples" / "smollm2_sums.py"))


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_files_hold_the_tasks_sums_and_keep_the_same_ones_out(tmp_path, example):
    example["main"](str(tmp_path / "new" / "sums"))
    found = {name: rows(tmp_path / "new" / "sums" / f"{name}.jsonl") for name in ("train", "test")}
    assert {name: len(some) for name, some in found.items()} == {"train": 582, "test": 145}
    asked = {name: [row["prompt"][-1]["content"] for row in some] for name, some in found.items()}
    assert not set(asked["train"]) & set(asked["test"])
    task = make_task("sums", 1234)
    held_out = task.problems(0, 145, held_out=True)
    assert asked["test"] == [problem.prompt.strip() for problem in held_out]
    assert [row["label"] for row in found["test"]] == [problem.label for problem in held_out]
    assert set(asked["train"]) == {problem.prompt.strip() for problem in task.problems(0, 582)}


@pytest.mark.parametrize(
    "response",
    [
        "4 + 5 = 9, 9 + 6 = 15. Answer: 15",
        " Answer: 15.\nmore",
        "Answer: 16",
        "15",
        "",
        "Answer: 15 or 16",
        "Answer: 15",
    ],
)
def test_the_rule_is_the_tasks(example, response):
    asked = {"prompt": "4 + 5 + 6 = ?", "response": response, "label": 15, "record": {}}
    assert example["reward"](**asked) == make_task("sums", 1).reward(**asked)


def command(*words):
    """The trainer's flags in the command that a target of the Makefile ends with."""
    shown = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in shown.replace("\\\n", "").splitlines() if "-m megatron_rc.launch " in line]
    found = shlex.split(line)
    return found[found.index("megatron_rc.launch") + 3 :]


def commands_of_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```sh\n(python examples.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    made, trained = (shlex.split(line, comments=True) for line in block.splitlines())
    return made[1:], [word.replace("DIR", "smollm2") for word in trained[5:]]


def answers(*words):
    """An exported directory answers, with random weights whatever they say."""
    shown = subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True).stdout.splitlines()
    assert sum("= ?  " in line for line in shown) == 16
    assert re.fullmatch(r"\d+ of 16 right", shown[-1])


@pytest.mark.parametrize("place", ["make", "readme"])
def test_the_launch_file_learns_from_them(tmp_path, monkeypatch, place):
    """What the Makefile and README start, from a folder with the example, the sums and a tiny model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    written, words = commands_of_readme()
    subprocess.run([sys.executable, *written], check=True)
    if place == "make":
        words = command("run-smollm2", "ENGINE=transformers", f"VENV={tmp_path}")
    model = transformers.LlamaConfig(
        hidden_size=36, intermediate_size=48, num_hidden_layers=2, num_attention_heads=9, vocab_size=300
    )
    transformers.AutoModelForCausalLM.from_config(model).save_pretrained(tmp_path / "smollm2")
    tokenizer_folder(tmp_path / "smollm2")
    answers(*written, "smollm2")
    # One byte is one token here, several are one in the real tokenizer.
    config, task = configure([*words, "--seq-length=512"], 2)
    assert config.launch.run_name == "smollm2_sums"
    assert config.rewards.reward == "python:examples.smollm2_sums:reward"
    assert config.task.task is None
    assert (config.rollouts.max_response_length, config.evaluation.eval_problems) == (32, 96)
    sums = make_task("sums", 1234, task.text)
    shown, known = (source.problems(0, 96, held_out=True) for source in (task, sums))
    assert [task.text.encode(problem) for problem in shown] == [task.text.encode(problem) for problem in known]
