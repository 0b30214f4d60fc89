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
    message = [{"role": "system", "content": ""}, {**USER, "name": "Ann"}]
    problem = CHAT.problem({"prompt": message, "label": "9"})
    assert (problem.messages, problem.prompt) == (tuple(message), "4 + 5")
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
    # A table gives each schema the keys of all, without a value.
    widened = {"type": "function", "function": {"name": "search", "strict": None}, "note": None}
    assert tools.problem({"prompt": [USER], "functions": [widened]}).tools == (SEARCH,)
    inside = replace(CHAT, tools_key="extra.tools")
    assert inside.problem({"prompt": [USER], "extra": {"tools": [SEARCH]}}).tools == (SEARCH,)
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


NO_ANSWERS = {
    "object": ({"is": True}, "an object"),
    "switch": (True, "true or false .True."),
    "empty list": ([], "an empty list"),
    "in a list": (["1", {"is": 1}], "an object"),
    "null in a list": (["1", None], "null"),
    "list in a list": ([["1"]], "a list"),
    "infinite": (float("inf"), "inf, which is no finite number"),
}


@pytest.mark.parametrize("rule", ["exact", "math-verify"])
@pytest.mark.parametrize(("label", "words"), NO_ANSWERS.values(), ids=NO_ANSWERS)
def test_labels_that_no_response_can_be_are_refused_where_they_are_compared(rule, label, words):
    compared = replace(PLAIN, rule=rule)
    with pytest.raises(ValueError, match=rf"^has {words}.* under 'label', .*--reward {rule} .*python:"):
        compared.problem({"prompt": "a", "label": label})
    assert PLAIN.problem({"prompt": "a", "label": label}).label == label
    for plain in ("34", 8, 1.5, ["34", 8, 1.5]):
        assert compared.problem({"prompt": "a", "label": plain}).label == plain


def test_an_empty_label_is_an_answer_but_no_expression():
    """The toy task has such labels: nothing follows a nine."""
    assert replace(PLAIN, rule="exact").problem({"prompt": "a", "label": ""}).label == ""
    for label in ("", " \n", ["1", ""]):
        with pytest.raises(ValueError, match=r"^has an empty text under 'label', .*--reward math-verify"):
            replace(PLAIN, rule="math-verify").problem({"prompt": "a", "label": label})


# A row as verl's data sets have it.
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "How many?", "name": None}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "34"},
    "extra_info": {"index": 0, "question": "How many are there?"},
}


def test_keys_lead_into_objects():
    results = replace(CHAT, label_key="reward_model.ground_truth", needs_label=True, rule="math-verify").problem(VERL)
    assert (results.prompt, results.label, results.record) == ("How many?", "34", VERL)
    assert results.messages == ({"role": "user", "content": "How many?"},), "a table's null is no key of a message"
    text = replace(PLAIN, input_key="extra_info.question", label_key="extra_info.index").problem(VERL)
    assert (text.prompt, text.label) == ("How many are there?", 0)
    # A key with a dot of its own counts first, at each level.
    row = {"a.b": "1", "a": {"b": "2", "c.d": "3"}, "prompt": "?"}
    assert [replace(PLAIN, label_key=key).problem(row).label for key in ("a.b", "a.c.d")] == ["1", "3"]


@pytest.mark.parametrize(
    ("label", "inside"),
    [
        (VERL["reward_model"], "ground_truth"),
        ({"source": "web", "answer": ["34", 34]}, "answer"),
        ({"none": None, "value": 34}, "value"),
    ],
)
@pytest.mark.parametrize("rule", ["exact", "math-verify"])
def test_the_answer_inside_of_an_object_is_named(rule, label, inside):
    row_format = replace(PLAIN, label_key="reward_model", rule=rule)
    with pytest.raises(ValueError, match=rf"an object .* under 'reward_model'.*--label-key reward_model\.{inside}$"):
        row_format.problem({"prompt": "a", "reward_model": label})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "a", "label": 1}, "has no 'prompt' .it has 'question', 'label'.: .*--input-key"),
        ({"prompt": "a", "answer": 1}, "has no 'label' .it has 'prompt', 'answer'.: .*--label-key"),
        ({"prompt": "a", "label": None}, "null under 'label'"),
        ({"prompt": "a", "reward_model": {"style": "rule"}}, "has no 'label' .it has 'prompt', 'reward_model'"),
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


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "has no 'a.b.c' .it has 'prompt'.: .*--label-key"),
        ({"a": {"d": 1}}, "has no 'a.b.c' .'a' has 'd'.: "),
        ({"a": {"b": {"d": 1, "e": 2}}}, "has no 'a.b.c' .'b' has 'd', 'e'.: "),
        ({"a": {"b": {}}}, "has no 'a.b.c' .'b' has no key at all.: "),
        ({"a": '{"b": {"c": 1}}'}, "has no 'a.b.c' .'a' is a string.: "),
        ({"a": {"b": None}}, "has no 'a.b.c' .'b' is null.: "),
        ({"a": {"b": {"c": None}}}, "is null under 'a.b.c'"),
    ],
)
def test_a_key_that_leads_nowhere(row, message):
    with pytest.raises(ValueError, match=message):
        replace(PLAIN, label_key="a.b.c").problem({"prompt": "?", **row})
