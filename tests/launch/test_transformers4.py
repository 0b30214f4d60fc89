"""Written directories, in the entries and names that programs older than transformers 5 read."""

import json
import logging

import pytest
import torch
import transformers

from megatron_rc.launch.engines.model_directory import ModelDirectory
from megatron_rc.launch.tasks.text import CharacterText
from megatron_rc.launch.training.hugging_face import write_directory
from megatron_rc.launch.transformers4 import earlier_entries
from megatron_rc.launch.weights import find_family
from megatron_rc.launch.weights.architecture import read_architecture
from megatron_rc.launch.weights.checkpoint_names import checkpoint_tensors
from tests.support.published_configs import PUBLISHED, WRITTEN
from tests.support.published_models import words_of
from tests.support.ranks import Layout
from tests.support.recorded_training import run_config


@pytest.fixture
def said_by_transformers():
    """Warnings of transformers, which has a logger of its own."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


def published(folder, name):
    """A directory with a publisher's ``config.json``."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name]))
    return folder


def check_entries(path, name, dtype):
    """Compare a written ``config.json`` with the expected entries."""
    entries = json.loads(path.read_text())
    expected = WRITTEN[name] | {"dtype": dtype, "torch_dtype": dtype}
    for entry, value in expected.items():
        if value is ...:
            assert entry not in entries
        else:
            assert entries[entry] == value, entry


def rotary_parameters(folder):
    """What transformers 5 reads; empty without rotary embeddings."""
    config = transformers.AutoConfig.from_pretrained(folder)
    parameters = {"partial_rotary_factor": 1.0} | dict(getattr(config, "rope_parameters", None) or {})
    parameters.pop("type", None)
    if parameters.get("rope_type") == "yarn":
        return {"beta_fast": 32.0, "beta_slow": 1.0} | parameters  # transformers' defaults
    return parameters


def rotary_flags(folder):
    """What this program reads."""
    flags = read_architecture(folder)
    arguments = ("rotary", "mscale", "rope-scaling", "rope-dynamic", "yarn")
    return {name: flags[name] for name in flags if any(word in name for word in arguments)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_directory_for_engines_has_both_forms(tmp_path, name, said_by_transformers):
    source = published(tmp_path / "source", name)
    config = run_config(words_of(source, Layout()))
    directory = ModelDirectory(tmp_path / "served", find_family(config).hugging_face_config(config), eos_token_id=1)
    (tmp_path / "served").mkdir()
    directory.write_config(torch.bfloat16)
    check_entries(tmp_path / "served" / "config.json", name, "bfloat16")
    # transformers 5 and this program read the two forms as one.
    assert rotary_parameters(tmp_path / "served") == rotary_parameters(source)
    assert rotary_flags(tmp_path / "served") == rotary_flags(source)
    # GPT-2's own tokens are beyond this small vocabulary.
    assert not [text for text in said_by_transformers if "token_id" not in text]


@pytest.mark.parametrize("name", ["llama-3.2", "qwen3-moe", "deepseek-v3", "glm-4.5"])
def test_an_exported_model_has_both_forms(tmp_path, name, said_by_transformers):
    source = published(tmp_path / "source", name)
    config = run_config([*words_of(source, Layout()), "--bf16"])
    described = find_family(config).hugging_face_config(config)
    model = transformers.AutoModelForCausalLM.from_config(described, dtype=torch.bfloat16)
    weights = checkpoint_tensors(model).items()
    write_directory(tmp_path / "out", config, CharacterText("0123456789"), weights)
    check_entries(tmp_path / "out" / "config.json", name, "bfloat16")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    assert not said_by_transformers


def test_the_class_of_a_tokenizer_is_one_that_transformers_4_has(tmp_path):
    CharacterText("0123456789").save(tmp_path)
    entries = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert entries["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not {"extra_special_tokens", "additional_special_tokens"} & entries.keys()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("0123")["input_ids"] == [3, 4, 5, 6]


def test_rotary_parameters_of_several_kinds_of_layers_have_no_earlier_form():
    """As Gemma 3's, which a GGUF file may hold."""
    nested = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert earlier_entries({"model_type": "gemma3_text", "rope_parameters": nested}) == {}
