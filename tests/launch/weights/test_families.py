"""The table of model families: each complete, or an error where it is defined."""

import re
from importlib import metadata

import pytest
import transformers

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.checks.weights import check_architecture
from megatron_rc.launch.weights.entries import Row
from megatron_rc.launch.weights.families import FAMILIES, find_family
from megatron_rc.launch.weights.family import Family
from tests.support.paths import ROOT
from tests.support.recorded_training import COMMON, flags, run_config

SIZES = """--from-scratch --num-layers=4 --hidden-size=32 --num-attention-heads=4 --num-query-groups=2
--moe-ffn-hidden-size=8""".split()
TABLE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([^|]+) \| `(\w+)` \|[^|]*\| ([^|]*--[^|]+) \|$", TABLE, re.MULTILINE)


# How the text of a row begins, and the row that it builds on.
BASES = {"Qwen3's": "Qwen3", "Qwen2's": "Qwen2, Qwen2.5", "Llama's": "Llama 1 to 3"}
BASES["DeepSeek"] = "DeepSeek-V3, Moonlight, Kimi-K2"


def test_every_family_stands_under_its_name_and_in_the_documents():
    assert {family.name: family for family in FAMILIES.values()} == FAMILIES
    assert all(family.embedding and family.layer and family.head for family in FAMILIES.values())
    assert {name for _, name, _ in ROWS} == FAMILIES.keys()
    with pytest.raises(TypeError, match="'fields'"):
        Family(name="half")


def test_a_transformers_that_would_take_another_rotary_base_is_refused(tmp_path, monkeypatch):
    """Before a run begins, and by the export, which begins none."""
    config = run_config(flags(tmp_path))
    monkeypatch.setattr(metadata, "version", lambda name: "4.57.6")
    message = r"^transformers 4.57.6 is installed, which .*: pip install 'transformers>=5'$"
    with pytest.raises(ConfigurationError, match=message):
        check_architecture(config, samples=True)
    with pytest.raises(ConfigurationError, match=message):
        FAMILIES["llama"].hugging_face_config(config)
    check_architecture(config, samples=False)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_what_is_never_written_is_the_default_of_transformers(family):
    rows = [row for row in family.fields if row.write is Row.write]
    assert rows
    for row in rows:
        row.read(getattr(transformers, family.config_class)().to_dict())


def words_of_row(words):
    """The flags of a row of docs/models.md, with those of the row that it builds on."""
    results = re.findall("`(--[^`]+)`", words)[0].split()
    for base, model in BASES.items():
        if words.startswith(base):
            results = [*words_of_row({name: rest for name, _, rest in ROWS}[model]), *results]
    return results


@pytest.mark.parametrize(("model", "name", "words"), ROWS, ids=lambda row: row.split()[0])
def test_the_flags_in_the_documents_are_the_family(tmp_path, model, name, words):
    given = words_of_row(words)
    experts = "--num-experts" in given
    groups = "--group-query-attention" in given
    sizes = [word for word in SIZES if experts >= word.startswith("--moe") and groups >= ("groups" in word)]
    config = run_config([*sizes, *given, *COMMON, f"--runs-dir={tmp_path}"])
    assert find_family(config).name == name
    assert config.model.rope_scaling == ("3.1" in model)


@pytest.mark.parametrize("dtype", ["", "--moe-router-dtype=fp32"])
def test_vllm_is_told_the_dtype_of_deepseeks_router(tmp_path, dtype):
    """It reads it from the model's ``config.json``; transformers has no such entry, and keeps it."""
    given = words_of_row({name: rest for name, _, rest in ROWS}[BASES["DeepSeek"]])
    sizes = [word for word in SIZES if "groups" not in word]
    config = run_config([*sizes, *given, *COMMON, *dtype.split(), f"--runs-dir={tmp_path}"])
    written = FAMILIES["deepseek_v3"].hugging_face_config(config).to_dict()
    assert written.get("moe_router_dtype") == ("float32" if dtype else None)
