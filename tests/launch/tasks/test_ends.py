"""What ends a response: the union of tokenizer and files, flags that change it, and where a response has its end."""

import json

import pytest

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.tasks.ends import ResponseEnds, choose_ends, ends_of_directory
from megatron_rc.launch.tasks.text import CharacterText

TEXT = CharacterText("abcdé")
A, B, C, D, E_ACUTE = TEXT.tokens_of("abcdé")
NAMED = {"tokenizer": (1,), "config.json": (1, C), "generation_config.json": (C, D)}


def choose(named=NAMED, added=(), **how):
    return choose_ends({**named, "--rollout-stop-token-ids": added}, decode=TEXT.decode, vocab_size=TEXT.size, **how)


def test_the_ends_are_the_union_and_one_line_says_where_each_comes_from():
    ends = choose()
    assert ends.token_ids == (1, C, D)
    assert ends.eos_token_id == [1, C, D]
    assert ends.words == (
        f"end tokens: 1 <eos> (tokenizer, config.json), {C} c (config.json, generation_config.json), "
        f"{D} d (generation_config.json)"
    )
    assert choose({"tokenizer": (1,), "config.json": (1,)}).eos_token_id == 1
    assert choose({"tokenizer": (1,), "config.json": (1, 50256)}).token_ids == (1,), "no token of this model"


def test_flags_add_and_take_out():
    ends = choose(added=(B, 1), removed=(C,), strings=("ab", " \n"))
    assert ends.token_ids == (1, D, B)
    assert ends.strings == ("ab", " \n")
    assert ends.words == (
        f"end tokens: 1 <eos> (tokenizer, config.json, --rollout-stop-token-ids), {D} d (generation_config.json), "
        f"{B} b (--rollout-stop-token-ids); not {C} c (--rollout-no-stop-token-ids); "
        r"stop strings: 'ab', ' \n' (--rollout-stop)"
    )


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"added": (TEXT.size,)}, f"--rollout-stop-token-ids {TEXT.size} .*--vocab-size {TEXT.size}"),
        ({"added": (-1,)}, "--rollout-stop-token-ids -1"),
        ({"removed": (B,)}, f"--rollout-no-stop-token-ids {B}: no response ends with this token"),
        ({"added": (B,), "removed": (B,)}, f"--rollout-no-stop-token-ids {B} contradicts --rollout-stop-token-ids {B}"),
        ({"removed": (1, C, D)}, f"--rollout-no-stop-token-ids 1 {C} {D} leaves no end token"),
        ({"strings": ("a", "")}, "--rollout-stop ''"),
    ],
)
def test_flags_that_name_no_end_are_refused(how, message):
    with pytest.raises(ConfigurationError, match=message):
        choose(**how)


def write(folder, name, **entries):
    (folder / name).write_text(json.dumps(entries))


def test_files_name_one_id_several_or_none(tmp_path):
    assert ends_of_directory(tmp_path) == {}
    write(tmp_path, "config.json", eos_token_id=7)
    write(tmp_path, "generation_config.json", eos_token_id=[7, 5])
    assert ends_of_directory(tmp_path) == {"config.json": (7,), "generation_config.json": (7, 5)}
    write(tmp_path, "generation_config.json", eos_token_id=None)
    assert ends_of_directory(tmp_path) == {"config.json": (7,)}


@pytest.mark.parametrize("content", ['{"eos_token_id": "</s>"}', '{"eos_token_id": [1, true]}', "[1]", "{", "\xff"])
def test_files_that_cannot_be_used_are_named(tmp_path, content):
    (tmp_path / "generation_config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigurationError, match=r"generation_config\.json") as caught:
        ends_of_directory(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "length", "reason"),
    [
        ("ab<eos>", 3, "stop"),
        ("abd", 3, "stop"),
        ("abaa", None, "length"),
        ("dab<eos>", 1, "length"),  # an end that was no end
        ("ac", 2, "stop"),
        ("aca", 2, "length"),
        ("abbéa", 4, "length"),
        ("bbé", 3, "stop"),
        ("", None, "length"),
    ],
)
def test_a_response_ends_with_the_first_of_its_ends(text, length, reason):
    """The tokens <eos> and d, the strings "ac" and "bé"."""
    ends = ResponseEnds((1, D), ("ac", "bé"), TEXT.decode)
    tokens = TEXT.tokens_of(text)
    assert ends.length_of(tokens) == length
    if tokens:
        assert ends.finish_reason(tokens) == reason
    # An engine looks at the newest token of a response that had no end.
    for count in range(1, (length or len(tokens)) + 1):
        assert ends.is_at_end(tokens[:count]) == (count == length)


def test_the_tail_that_an_engine_decodes_holds_every_string():
    """Each token of one byte, and a string of which the last token completes the last character."""
    bytes_of = {index: bytes([index]) for index in range(256)}
    ends = ResponseEnds((300,), ("éß.",), lambda ids: b"".join(bytes_of[one] for one in ids).decode(errors="replace"))
    response = list("xéß.".encode())
    results = [
        ends.is_at_end(response[max(0, count - ends.tail_length) : count]) for count in range(1, len(response) + 1)
    ]
    assert results == [False] * (len(response) - 1) + [True]
    assert ends.length_of([*response, 120]) == len(response)
