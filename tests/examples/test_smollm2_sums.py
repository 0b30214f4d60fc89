"""Files and reward of ``make run-smollm2``: every sum with its label, and the rewarded answers."""

import json
import re
import runpy
import shlex
import subprocess
import sys

import pytest
import transformers

from megatron_rc.launch.flags.configure import configure
from tests.launch.tasks.test_text import tokenizer_folder
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(ROOT / "examples" / "smollm2_sums.py"))


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def conversation(question):
    """The model's prompt: two solved sums and an open one."""
    shown = [
        *("8 + 4 + 5 = ?", "8 + 4 = 12, 12 + 5 = 17. Answer: 17"),
        *("3 + 9 + 7 = ?", "3 + 9 = 12, 12 + 7 = 19. Answer: 19"),
    ]
    roles = ["user", "assistant", "user", "assistant", "user"]
    return [{"role": role, "content": text} for role, text in zip(roles, [*shown, question], strict=True)]


def test_the_files_hold_every_sum_once(tmp_path, example):
    example["main"](str(tmp_path / "new" / "sums"))
    written = {name: rows(tmp_path / "new" / "sums" / f"{name}.jsonl") for name in ("train", "test")}
    assert {name: len(some) for name, some in written.items()} == {"train": 582, "test": 145}
    assert written["test"][0] == {"prompt": conversation("1 + 4 + 4 = ?"), "label": 9}
    assert written["train"][1] == {"prompt": conversation("5 + 6 + 9 = ?"), "label": 20}
    every = [row for some in written.values() for row in some]
    asked = [row["prompt"][-1]["content"] for row in every]
    numbers = [[int(number) for number in re.fullmatch(r"(\d) \+ (\d) \+ (\d) = \?", text).groups()] for text in asked]
    assert [row["label"] for row in every] == [sum(three) for three in numbers]
    shown = [[8, 4, 5], [3, 9, 7]]
    assert sorted([*numbers, *shown]) == [[a, b, c] for a in range(1, 10) for b in range(1, 10) for c in range(1, 10)]


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("4 + 5 = 9, 9 + 6 = 15. Answer: 15", 1),
        (" Answer: 15.\n1 + 1 = ?", 1),
        ("I think\nAnswer: 15", 0),
        ("Answer: 15 or 16", 0),
        ("Answer: 150", 0),
        ("", 0),
    ],
)
def test_the_rule_wants_the_answer_at_the_end_of_the_first_line(example, response, reward):
    assert example["reward"](prompt="4 + 5 + 6 = ?", response=response, label=15, record={}) == reward


def command(*phrases):
    """The trainer's flags in the last command of a target of the Makefile."""
    shown = subprocess.run(["make", "-n", *phrases], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in shown.replace("\\\n", "").splitlines() if "-m megatron_rc.launch " in line]
    arguments = shlex.split(line)
    return arguments[arguments.index("megatron_rc.launch") + 3 :]


def commands_of_the_page():
    text = (ROOT / "docs" / "smollm2.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```sh\n(python examples.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    made, trained = (shlex.split(line, comments=True) for line in block.splitlines())
    return made[1:], [word.replace("DIR", "smollm2") for word in trained[5:]]


def run(monkeypatch, *arguments):
    """Run ``python words`` in this process."""
    monkeypatch.setattr(sys, "argv", list(arguments))
    runpy.run_path(arguments[0], run_name="__main__")


def test_the_launch_file_learns_from_them(tmp_path, monkeypatch, capsys):
    """The command of the Makefile and docs/smollm2.md, in a folder with the example, the sums and a tiny model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    written, of_the_page = commands_of_the_page()
    run(monkeypatch, *written)
    model = transformers.LlamaConfig(
        hidden_size=36, intermediate_size=48, num_hidden_layers=2, num_attention_heads=9, vocab_size=300
    )
    transformers.AutoModelForCausalLM.from_config(model).save_pretrained(tmp_path / "smollm2")
    tokenizer_folder(tmp_path / "smollm2")
    capsys.readouterr()
    run(monkeypatch, *written, "smollm2")
    # Random weights give any answer.
    shown = capsys.readouterr().out.splitlines()
    assert sum("= ?  " in line for line in shown) == 16
    assert re.fullmatch(r"\d+ of 16 right", shown[-1])
    of_make = command("run-smollm2", "ENGINE=transformers", f"VENV={tmp_path}")
    for arguments in (of_make, of_the_page):
        # Here one byte is one token; the real tokenizer has several in one.
        config, task = configure([*arguments, "--seq-length=512"], 2)
        assert config.launch.run_name == "smollm2_sums"
        assert config.rewards.reward == "python:examples.smollm2_sums:reward"
        assert config.task.task is None
        assert (config.rollouts.max_response_length, config.evaluation.eval_problems) == (32, 96)
        first = task.problems(0, 1, held_out=True)[0]
        assert (list(first.messages), first.label) == (conversation("1 + 4 + 4 = ?"), 9)
