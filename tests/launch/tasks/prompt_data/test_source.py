"""Prompts of a run from files: orders, epochs, shares, and prompts that are too long."""

import json
import logging
from dataclasses import replace

import pytest

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.tasks.prompt_data.room import Room
from megatron_rc.launch.tasks.prompt_data.rows import RowFormat
from megatron_rc.launch.tasks.prompt_data.source import HeldOut, PromptData
from megatron_rc.launch.tasks.text import CharacterText, HuggingFaceText
from tests.launch.tasks.test_text import TEMPLATE, tokenizer_folder

PLAIN = RowFormat(input_key="prompt", label_key="label", needs_label=True, chat=False)
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 "


def write(path, prompts):
    path.write_text("".join(json.dumps({"prompt": prompt, "label": prompt}) + "\n" for prompt in prompts))
    return str(path)


def source(*train, held_out=(), seed=1, room=10, drops=True, row_format=PLAIN, text=None):
    text = text or CharacterText(LETTERS)
    files = [HeldOut(f"file-{number}", path, row_format) for number, path in enumerate(held_out)]
    return PromptData(train, files, row_format, text, seed, Room(text, room + 5, 5, drops), 5)


def prompts(data, start, count, held_out=False):
    return [problem.prompt for problem in data.problems(start, count, held_out)]


@pytest.fixture
def letters(tmp_path):
    return write(tmp_path / "letters.jsonl", LETTERS[:26])


@pytest.fixture
def digits(tmp_path):
    return write(tmp_path / "digits.jsonl", LETTERS[26:36])


def test_every_epoch_has_every_prompt_once_in_an_order_that_follows_from_the_seed(letters, digits):
    """A run that is resumed, or a rank that draws its share, finds what it would have drawn."""
    epochs = [prompts(source(letters), 26 * number, 26) for number in range(3)]
    assert all(sorted(epoch) == sorted(LETTERS[:26]) != epoch for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    arguments = ("0.7", letters, "0.3", digits)
    whole = prompts(source(*arguments), 0, 120)
    for start, count in ((97, 9), (25, 4), (0, 1)):
        assert prompts(source(*arguments), start, count) == whole[start : start + count]
    assert prompts(source(*arguments, seed=2), 0, 120) != whole


def test_files_have_their_weights(letters, digits):
    drawn = prompts(source("0.25", letters, "0.75", digits), 0, 400)
    assert sum(prompt.isalpha() for prompt in drawn) == 100
    assert {drawn.count(digit) for digit in LETTERS[26:36]} == {30}
    without = prompts(source(letters, digits), 0, 36)
    assert sorted(without) == sorted(LETTERS[:36])
    # The file that is read most counts the epochs.
    assert source("0.5", letters, "0.5", digits).metrics(100)["data/epoch"] == 5


def test_held_out_prompts_come_from_each_file_in_turn_in_its_order(tmp_path, letters, digits):
    """So the first problems have some of every file, and of a small file all."""
    assert prompts(source(letters, held_out=[digits]), 2, 3, held_out=True) == ["2", "3", "4"]
    data = source(letters, held_out=[digits, write(tmp_path / "small.jsonl", "xyz"), letters])
    assert "".join(prompts(data, 0, 14, held_out=True)) == "0xa1yb2zc3d4e5"
    assert [data.name_of_held_out(number) for number in (0, 1, 2, 8, 9)] == [
        *("file-0", "file-1", "file-2", "file-2", "file-0")
    ]
    assert data.num_held_out == 39
    assert prompts(data, 9, 30, held_out=True) == prompts(data, 0, 39, held_out=True)[9:]
    with pytest.raises(ConfigurationError, match="holds 39 prompts, 40 were asked for"):
        data.problems(10, 30, held_out=True)


def test_held_out_files_have_no_weights(letters, digits):
    with pytest.raises(ConfigurationError, match=f"--eval-data 1 {digits} takes no weights"):
        source(letters, held_out=["1", digits])


@pytest.mark.parametrize(
    ("prompt", "template"), [("a" * 1_280_000, None), ("a", "{{ messages[0]['content'] * 1280000 }}")]
)
def test_a_prompt_of_far_too_many_characters_is_no_work_for_the_tokenizer(tmp_path, monkeypatch, prompt, template):
    """It would take half a minute and gigabytes for them."""
    text = HuggingFaceText(tokenizer_folder(tmp_path / "tokenizer", template=template or TEMPLATE), chat=bool(template))
    encode = HuggingFaceText.encode

    def encode_short(text, problem):
        assert len(text.shown(problem)) < 100
        return encode(text, problem)

    monkeypatch.setattr(HuggingFaceText, "encode", encode_short)
    row_format = replace(PLAIN, chat=text.chat)
    file = write(tmp_path / "long.jsonl", [prompt])
    with pytest.raises(ConfigurationError, match=r"at least 10000 tokens, .*--seq-length 15"):
        source(file, drops=False, row_format=row_format, text=text)
    with pytest.raises(ConfigurationError, match="the shortest has 10000 tokens"):
        source(file, row_format=row_format, text=text)


def test_prompts_that_are_too_long_are_left_out_and_counted(tmp_path, caplog):
    path = write(tmp_path / "a.jsonl", ["ab", "a" * 11, "a" * 10, "b" * 30])
    with caplog.at_level(logging.WARNING):
        data = source(path)
    assert sorted(prompts(data, 0, 2)) == ["a" * 10, "ab"]
    assert caplog.messages == [f"--prompt-data {path}: 2 of 4 prompts have more than 10 tokens and are left out"]
    assert data.metrics(3) == {"data/epoch": 1.5, "data/overlong_prompts": 2}
    with pytest.raises(ConfigurationError, match="every prompt is too long, the shortest has 11 tokens"):
        source(write(tmp_path / "b.jsonl", ["a" * 12, "a" * 11]))


def test_an_evaluation_of_what_is_trained_is_said(tmp_path, letters, digits, caplog):
    with caplog.at_level(logging.WARNING):
        source(letters, digits, held_out=[write(tmp_path / "other.jsonl", "xyz")])
        assert not caplog.messages
        copy = write(tmp_path / "copy.jsonl", LETTERS[26:36])
        source(letters, digits, held_out=[copy])
    (message,) = caplog.messages
    assert message.startswith(f"--eval-data {copy} has the rows of --prompt-data {digits}: ")


def test_other_rows_are_told_apart(tmp_path, letters, digits):
    copy = write(tmp_path / "copy.jsonl", LETTERS[:26])
    assert source(letters).digest == source(copy).digest != source(digits).digest
    assert source(letters).digest != source(letters, held_out=[digits]).digest


CHAT = RowFormat(input_key="prompt", label_key="label", needs_label=False, chat=True)


def test_conversations_are_counted_as_they_are_shown(tmp_path):
    """The template's own tokens count; prompts that surely fit are not tokenized, and it makes no difference."""
    text = HuggingFaceText(tokenizer_folder(tmp_path / "t"), chat=True)
    frame = len("[user]") + 1 + len("[assistant]")
    rows = [[{"role": "user", "content": "a" * length}] for length in (3, 19, 20, 21, 60)]
    rows.append([{"role": "system", "content": "a" * 30}, {"role": "user", "content": "b"}])
    path = write(tmp_path / "a.jsonl", rows)
    data = source(path, room=frame + 20, row_format=CHAT, text=text)
    assert data.dropped == 3
    kept = data.problems(0, 3)
    assert sorted(len(problem.prompt) for problem in kept) == [3, 19, 20]
    assert max(len(text.encode(problem)) for problem in kept) == frame + 20
    # All that a template shows of a message counts.
    template = "{% for m in messages %}{{ m['content'] }}{{ m['tools'] }}</s>{% endfor %}"
    text = HuggingFaceText(tokenizer_folder(tmp_path / "tools", template=template), chat=True)
    rows = [[{"role": "user", "content": "a", "tools": "b" * length}] for length in (3, 200)]
    data = source(write(tmp_path / "b.jsonl", rows), row_format=CHAT, text=text, room=100)
    assert (data.dropped, data.problems(0, 1)[0].messages[0]["tools"]) == (1, "bbb")


def test_the_tokens_of_tools_are_counted(tmp_path):
    """However long a template writes them: the same roles with longer tools do not fit."""
    template = "{{ tools | tojson(indent=8) }}" + TEMPLATE
    text = HuggingFaceText(tokenizer_folder(tmp_path / "t", template=template), chat=True)
    user = {"role": "user", "content": "a"}
    names = ["b", "b" * 30]
    rows = [{"prompt": [user], "label": 1, "tools": [{"type": "function", "name": name}]} for name in names]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    row_format = replace(CHAT, tools_key="tools")
    shortest, longest = (len(text.encode(row_format.problem(row))) for row in rows)
    data = source(str(path), row_format=row_format, text=text, room=longest - 1)
    assert shortest < longest - 1
    assert data.dropped == 1
    assert data.problems(0, 1)[0].tools == ({"type": "function", "name": "b"},)


def test_a_conversation_that_the_template_refuses_is_named(tmp_path):
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
    text = HuggingFaceText(tokenizer_folder(tmp_path / "t", template=template), chat=True)
    user = {"role": "user", "content": "a"}
    path = write(tmp_path / "a.jsonl", [[user], [{"role": "system", "content": "s"}, user]])
    with pytest.raises(ConfigurationError, match=r"line 2 cannot be shown to the model: .*\(no system\)"):
        source(path, row_format=CHAT, text=text, room=100)
