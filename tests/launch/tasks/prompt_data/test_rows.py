"""What a row says, and every way in which it can be wrong."""

import json
from dataclasses import replace

import pytest

from megatron_rc.launch.tasks.prompt_data.rows import RowFormat, parse_line

PLAIN = RowFormat(input_key="prompt", label_key="label", needs_label=True, chat=False)
CHAT = RowFormat(input_key="prompt", label_key="label", needs_label=False, chat=True)
USER = {"role": "user", "content": "4 + 5"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "a"\r\n', "is not JSON .* at column 15"),
        (b"  \t\r\n", "is empty"),
        (b'["a", "b"]', "a list, not a JSON object"),
        (b'{"prompt": "\xff"}', "UTF-8 .byte 13 is 0xff."),
        (b'{"prompt": "a", "label": NaN}', "NaN"),
        (b'{"prompt": "a", "prompt": "b"}', "key 'prompt' twice"),
        (b'{"a": [1e999]}', "1e999"),
    ],
)
def test_a_line_that_is_none(line, message):
    with pytest.raises(ValueError, match=message):
        parse_line(line)


def test_text_is_shown_as_it_is_and_messages_are_kept_whole():
    problem = PLAIN.problem({"prompt": " 4 + 5 = ", "label": 9, "level": "easy"})
    assert (problem.prompt, problem.label, problem.messages) == (" 4 + 5 = ", 9, ())
    assert problem.record == {"prompt": " 4 + 5 = ", "label": 9, "level": "easy"}
    assert CHAT.problem({"prompt": " 4 "}).messages == ({"role": "user", "content": " 4 "},)
    assert CHAT.problem({"prompt": "4"}).label is None
    said = [{"role": "system", "content": ""}, {**USER, "name": "Ann"}]
    problem = CHAT.problem({"prompt": said, "label": "9"})
    assert (problem.messages, problem.prompt) == (tuple(said), "4 + 5")
    # The keys are the user's, and the characters the tokenizer's.
    problem = replace(PLAIN, input_key="question", label_key="answer").problem(
        {"question": "4 + 5", "answer": False, "prompt": 3}
    )
    assert (problem.prompt, problem.label) == ("4 + 5", False)
    digits = replace(PLAIN, needs_label=False, alphabet=frozenset("0123"))
    assert digits.problem({"prompt": "12"}).prompt == "12"
    with pytest.raises(ValueError, match=r"'4' in prompt, .*--tokenizer-model"):
        digits.problem({"prompt": "14"})


SEARCH = {"type": "function", "function": {"name": "search"}}


def test_tools_are_schemas_or_their_text():
    tools = replace(CHAT, tools_key="functions")
    for given in ([SEARCH], json.dumps([SEARCH])):
        problem = tools.problem({"prompt": [USER], "functions": given, "tools": "the user's own"})
        assert (problem.tools, problem.record["functions"]) == ((SEARCH,), given)
    assert tools.problem({"prompt": [USER], "functions": None}).tools == ()
    assert tools.problem({"prompt": [USER], "functions": []}).tools == ()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "has no 'functions' .it has 'prompt'.*--tools-key"),
        ({"functions": SEARCH}, "an object under 'functions'"),
        ({"functions": ["search"]}, "a list with other entries than objects under 'functions'"),
        ({"functions": "search"}, "a text under 'functions' that is not JSON"),
        ({"functions": '"search"'}, "a string under 'functions'"),
    ],
)
def test_tools_that_are_none_are_named(row, message):
    with pytest.raises(ValueError, match=message):
        replace(CHAT, tools_key="functions").problem({"prompt": [USER], **row})


def test_tools_that_nothing_shows_are_refused():
    for prompt in ([USER], "4 + 5"):
        with pytest.raises(ValueError, match=r"'tools', which .*--tools-key tools"):
            CHAT.problem({"prompt": prompt, "tools": [SEARCH]})
        assert CHAT.problem({"prompt": prompt, "tools": []}).tools == ()
    # Without a chat template it is a key of the user's, as all others.
    assert PLAIN.problem({"prompt": "4", "label": 1, "tools": [SEARCH]}).record["tools"] == [SEARCH]


@pytest.mark.parametrize("label", [[1, 2], {"is": 1}, True])
def test_labels_that_no_response_can_be_are_refused_where_they_are_compared(label):
    exact = replace(PLAIN, plain_label=True)
    with pytest.raises(ValueError, match=r" under 'label', .*--reward exact "):
        exact.problem({"prompt": "a", "label": label})
    assert PLAIN.problem({"prompt": "a", "label": label}).label == label
    assert [exact.problem({"prompt": "a", "label": plain}).label for plain in ("", 8, 1.5)] == ["", 8, 1.5]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "a", "label": 1}, "has no 'prompt' .it has 'question', 'label'.: .*--input-key"),
        ({"prompt": "a", "answer": 1}, "has no 'label' .it has 'prompt', 'answer'.: .*--label-key"),
        ({"prompt": "a", "label": None}, "null under 'label'"),
        ({"prompt": 3, "label": 1}, "a number under 'prompt'"),
        ({"prompt": " \n", "label": 1}, "empty text as prompt"),
        ({"prompt": json.loads('"a\\ud800"'), "label": 1}, "surrogate .* prompt, at character 2"),
        ({"prompt": [], "label": 1}, "no message under 'prompt'"),
        ({"prompt": ["a"], "label": 1}, r"a string as prompt\[0\],"),
        ({"prompt": [{"content": "a"}], "label": 1}, r"nothing as prompt\[0\]\['role'\]"),
        ({"prompt": [USER, {"role": "user", "content": ["a"]}], "label": 1}, r"a list as prompt\[1\]\['content'\]"),
        ({"prompt": [USER, {"role": "assistant", "content": "9"}], "label": 1}, "'prompt' with .* assistant"),
        ({"prompt": [USER], "label": 1}, "messages under 'prompt': .*--apply-chat-template"),
    ],
)
def test_a_row_that_is_wrong(row, message):
    with pytest.raises(ValueError, match=message):
        PLAIN.problem(row)
