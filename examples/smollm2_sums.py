"""Sums of three numbers, solved step by step: the files that a small language model learns from, and its reward.

Copy it, and write your own rows and your own rule:

    python examples/smollm2_sums.py sums        # writes sums/train.jsonl and sums/test.jsonl
    --prompt-data sums/train.jsonl --eval-data sums/test.jsonl --reward python:examples.smollm2_sums:reward
    python examples/smollm2_sums.py sums DIR    # lets the exported model in DIR answer the first test problems
"""

import json
import random
import re
import sys
from collections.abc import Iterable
from itertools import product
from pathlib import Path

Sum = tuple[int, ...]
# Two examples with their answers are in every conversation.
SHOWN: tuple[Sum, ...] = ((8, 4, 5), (3, 9, 7))
ANSWERED = 16
ANSWER = re.compile(r"Answer: (\d+)\.?$")


def reward(prompt: str, response: str, label: int, record: dict[str, object]) -> float:
    """1 if the first line of the response ends with the right answer, else 0."""
    first, _, _ = response.strip().partition("\n")
    found = ANSWER.search(first.strip())
    return float(found is not None and int(found[1]) == label)


def question(numbers: Sum) -> str:
    """The model's problem: ``3 + 9 + 7 = ?``."""
    return " + ".join(map(str, numbers)) + " = ?"


def solution(numbers: Sum) -> str:
    """The model's right answer: ``3 + 9 = 12, 12 + 7 = 19. Answer: 19``."""
    first, second, third = numbers
    half = first + second
    return f"{first} + {second} = {half}, {half} + {third} = {half + third}. Answer: {half + third}"


def row(numbers: Sum) -> dict[str, object]:
    """One line of a file: the conversation, and the sum."""
    said = [text for shown in SHOWN for text in (question(shown), solution(shown))]
    roles = ("user", "assistant")
    texts = enumerate([*said, question(numbers)])
    return {"prompt": [{"role": roles[index % 2], "content": text} for index, text in texts], "label": sum(numbers)}


def write(path: Path, sums: Iterable[Sum]) -> None:
    """Write JSON lines, one a sum."""
    path.write_text("".join(json.dumps(row(numbers)) + "\n" for numbers in sums), encoding="utf-8")


def answer(model_folder: str, file: Path) -> None:
    """Print the most likely responses to the first problems of a file, and the number of right ones."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    lines = file.read_text(encoding="utf-8").splitlines()[:ANSWERED]
    right = 0.0
    for problem in map(json.loads, lines):
        asked = tokenizer.apply_chat_template(
            problem["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        tokens = model.generate(**asked, do_sample=False, max_new_tokens=32)[0, asked["input_ids"].shape[1] :]
        response = tokenizer.decode(tokens, skip_special_tokens=True)
        right += reward("", response, problem["label"], problem)
        sys.stdout.write(f"{problem['prompt'][-1]['content']}  {response.strip()}\n")
    sys.stdout.write(f"{right:.0f} of {len(lines)} right\n")


def main(folder: str, model_folder: str | None = None) -> None:
    """Write the files, or let a model answer; a fifth of all sums of numbers from 1 to 9 is kept for the test."""
    if model_folder is not None:
        answer(model_folder, Path(folder) / "test.jsonl")
        return
    sums = [numbers for numbers in product(range(1, 10), repeat=3) if numbers not in SHOWN]
    random.Random("1234").shuffle(sums)
    cut = len(sums) // 5
    Path(folder).mkdir(parents=True, exist_ok=True)
    write(Path(folder) / "test.jsonl", sums[:cut])
    write(Path(folder) / "train.jsonl", sums[cut:])


if __name__ == "__main__":
    main(*sys.argv[1:])
