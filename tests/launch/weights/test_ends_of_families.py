"""End tokens and chat templates of families as published: those of a run, and of the model that it exports."""

import json

import pytest
import transformers

from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.tasks.text import Problem
from megatron_rc.launch.training.hugging_face import write_directory
from megatron_rc.launch.weights.checkpoint_names import checkpoint_tensors
from tests.support.published_tokenizers import TOKENS, write_published
from tests.support.recorded_training import COMMON

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


@pytest.mark.parametrize("name", TOKENS)
def test_a_run_ends_responses_as_published_and_exports_what_it_read(tmp_path, name):
    source = tmp_path / "source"
    source.mkdir()
    described = write_published(source, name)
    tokens = TOKENS[name]
    arguments = [*COMMON, f"--load-hf={source}", f"--runs-dir={tmp_path}/runs", "--apply-chat-template"]
    config, task = configure([*arguments, "--micro-batch-size=8", "--seq-length=128"], 1)
    text = task.text

    # The ends are the tokenizer's, and those of both files.
    ends = {tokens.names["eos_token"], *tokens.of_config, *tokens.of_generation}
    assert set(text.ends.token_ids) == {tokens.id_of(token) for token in ends}
    assert text.ends.token_ids[0] == tokens.id_of(tokens.names["eos_token"])
    for token in ends:
        assert text.ends.length_of([1, tokens.id_of(token), 2]) == 2

    prompt = text.encode(Problem("12"))
    assert text.decode(prompt) == tokens.prompt
    assert prompt == text.tokenizer.apply_chat_template(
        [{"role": "user", "content": "12"}], add_generation_prompt=True, return_dict=False
    )

    target = tmp_path / "exported"
    model = transformers.AutoModelForCausalLM.from_config(described)
    write_directory(target, config, text, checkpoint_tensors(model).items())
    check_export(source, target, tokens, text)


def check_export(source, target, tokens, text):
    """Compare an exported directory with the one that the run started from."""
    published = json.loads((source / "config.json").read_text())
    written = json.loads((target / "config.json").read_text())
    generation = json.loads((source / "generation_config.json").read_text())
    for entry in ("bos_token_id", "pad_token_id"):
        assert written.get(entry) == published.get(entry), entry

    # A file that lacks an end of the run gets it; all other entries stay.
    all_ends = set(text.ends.token_ids)
    of_files = {"config.json": published["eos_token_id"], "generation_config.json": generation["eos_token_id"]}
    for file, entry in of_files.items():
        written_entry = json.loads((target / file).read_text())["eos_token_id"]
        ids = set(entry) if isinstance(entry, list) else {entry}
        if ids == all_ends:
            assert written_entry == entry, file
        else:
            assert set(written_entry) == all_ends, file
    if of_files["generation_config.json"] == text.ends.eos_token_id:
        assert (target / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
    written_generation = json.loads((target / "generation_config.json").read_text())
    assert written_generation | {"eos_token_id": None} == generation | {"eos_token_id": None}

    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / file).is_file():
            assert (target / file).read_bytes() == (source / file).read_bytes(), file
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    turns = [{"role": "user", "content": "12"}]
    assert tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False) == tokens.prompt
    assert tokenizer.eos_token == tokens.names["eos_token"]
    ends_of_generate = transformers.GenerationConfig.from_pretrained(target).eos_token_id
    assert {ends_of_generate} if isinstance(ends_of_generate, int) else set(ends_of_generate) == all_ends
