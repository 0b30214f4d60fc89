"""Flags of what ends a response, of the chat template and of special tokens: their sources, and what is refused."""

import json
import logging

import pytest

from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.resolved_file import as_launch_file
from megatron_rc.launch.tasks.text import CharacterText
from tests.launch.tasks.test_text import SEARCH, THINKING, tokenizer_folder
from tests.support.recorded_training import COMMON, LLAMA, flags
from tests.support.refusals import refused
from tests.support.several_ends import ENDS, glm_folder, words_of


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    return glm_folder(tmp_path_factory.mktemp("glm"))


def ends_of(words):
    config, task = configure(words, 1)
    assert config.rollouts.end_token_ids == task.text.ends.token_ids
    return task.text.ends


def test_the_model_of_load_hf_names_the_ends(glm, tmp_path):
    """With its own tokenizer, or with a copy of it in a directory without the files."""
    ends = ends_of(words_of(glm))
    assert list(ends.token_ids) == ENDS
    assert ends.words == (
        "end tokens: 0 <|endoftext|> (tokenizer, config.json, generation_config.json), 3 <|user|>, 4 <|observation|> "
        "(config.json, generation_config.json)"
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((glm / name).read_bytes())
    assert list(ends_of(words_of(glm, f"--tokenizer-model={tmp_path}")).token_ids) == ENDS
    # A tokenizer of one token a character has no ids of the model's.
    assert ends_of(words_of(glm, "--tokenizer-type=CharacterTokenizer")).token_ids == (1,)


def test_a_tokenizers_directory_names_them_for_a_model_that_comes_from_elsewhere(glm, tmp_path):
    arguments = [*LLAMA, *COMMON, f"--runs-dir={tmp_path}", "--vocab-size=64"]
    assert list(ends_of([*arguments, f"--tokenizer-model={glm}"]).token_ids) == ENDS
    assert ends_of(arguments).words == "end tokens: 1 <eos> (tokenizer)"


def test_flags_change_the_set_and_come_back_from_the_written_file(glm, tmp_path):
    arguments = words_of(glm, "--rollout-stop-token-ids", "7", "8", "--rollout-no-stop-token-ids", "3")
    arguments += ["--rollout-stop", "=?", "12 \n", "--rollout-skip-special-tokens"]
    config, task = configure(arguments, 1)
    assert (task.text.ends.token_ids, task.text.ends.strings) == ((0, 4, 7, 8), ("=?", "12 \n"))
    assert task.text.skip_special_tokens
    (tmp_path / "again.yaml").write_text(as_launch_file(config.flags))
    again, task = configure([f"--config={tmp_path}/again.yaml"], 1)
    assert again.rollouts == config.rollouts
    assert (task.text.ends.token_ids, task.text.ends.strings) == ((0, 4, 7, 8), ("=?", "12 \n"))


REFUSED = """
--rollout-stop-token-ids 99 :: --rollout-stop-token-ids 99 | 13
--rollout-stop-token-ids a :: --rollout-stop-token-ids | 'a'
--rollout-no-stop-token-ids 5 :: --rollout-no-stop-token-ids 5
--rollout-no-stop-token-ids 1 :: --rollout-no-stop-token-ids 1 | --rollout-stop-token-ids
--rollout-stop= :: --rollout-stop
--chat-template-kwargs {a --apply-chat-template :: --chat-template-kwargs | {a | JSON
--chat-template-kwargs [1] --apply-chat-template :: --chat-template-kwargs | [1] | JSON object
--apply-chat-template-kwargs {} :: apply-chat-template-kwargs | --chat-template-kwargs
--tool-key tools :: tool-key | --tools-key
"""


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_what_cannot_work_is_one_sentence(tmp_path, row):
    arguments, _, parts = row.partition(" :: ")
    with refused(parts):
        configure([*flags(tmp_path), *arguments.split()], 1)


def chat_words(tmp_path, *more, template=THINKING, **row):
    folder = tokenizer_folder(tmp_path / "tokenizer", template=template)
    rows = [{"prompt": [{"role": "user", "content": "4 + 5"}], "label": "9", **row}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [*LLAMA, *(word for word in COMMON if not word.startswith("--task")), f"--runs-dir={tmp_path}/runs"]
    arguments += ["--reward=exact", "--seq-length=512", "--max-response-length=16", f"--tokenizer-model={folder}"]
    return [*arguments, f"--prompt-data={tmp_path}/a.jsonl", *more]


def prompt_of(words):
    task = configure(words, 1)[1]
    return task.text.decode(task.text.encode(task.problems(0, 1)[0]))


def test_the_template_gets_the_flags_variables_and_the_rows_tools(tmp_path):
    """From the command line, from a launch file as an entry of its own, and from the file that a run writes."""
    arguments = chat_words(tmp_path, tools=[SEARCH])
    chat = ["--apply-chat-template", "--tools-key=tools"]
    shown = prompt_of([*arguments, *chat])
    assert json.loads(shown.partition("</s>")[0].removeprefix("[tools]")) == SEARCH
    assert shown.endswith("[assistant]")
    typed = [*arguments, *chat, '--chat-template-kwargs={"enable_thinking": false, "style": {"name": "brief"}}']
    expected = f"{shown}<think></think>(brief)"
    assert prompt_of(typed) == expected
    for text in (
        "chat-template-kwargs: {enable_thinking: false, style: {name: brief}}",
        """chat-template-kwargs: '{"enable_thinking": false, "style": {"name": "brief"}}'""",
        as_launch_file(configure(typed, 1)[0].flags),
    ):
        (tmp_path / "run.yaml").write_text(text)
        assert prompt_of([*arguments, *chat, f"--config={tmp_path}/run.yaml"]) == expected


def test_tools_that_nothing_shows_are_refused(tmp_path):
    with refused("a.jsonl, line 1 | 'tools' | --tools-key tools"):
        configure(chat_words(tmp_path, "--apply-chat-template", tools=[SEARCH]), 1)
    plain = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    arguments = chat_words(tmp_path, "--apply-chat-template", "--tools-key=tools", template=plain, tools=[SEARCH])
    with refused("--tools-key tools | chat template | tools"):
        configure(arguments, 1)


def test_a_launch_files_variables_are_dropped_with_its_template(tmp_path, caplog):
    """They were meant for another tokenizer; typed ones are refused."""
    (tmp_path / "run.yaml").write_text("apply-chat-template: true\nchat-template-kwargs: {enable_thinking: false}\n")
    arguments = [*flags(tmp_path / "runs"), f"--config={tmp_path}/run.yaml"]
    with caplog.at_level(logging.WARNING):
        config, task = configure(arguments, 1)
    assert (config.task.apply_chat_template, config.task.chat_template_kwargs) == (False, None)
    assert isinstance(task.text, CharacterText)
    with refused("--chat-template-kwargs {} | CharacterTokenizer"):
        configure([*arguments, "--chat-template-kwargs={}"], 1)
