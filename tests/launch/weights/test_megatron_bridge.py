"""Megatron-Bridge makes and converts the models that no table has, here by a stand-in of its interface."""

import json
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.checks.weights import check_bridge
from megatron_rc.launch.flags.stored import stored_config
from megatron_rc.launch.weights import architecture, megatron_bridge
from megatron_rc.launch.weights.architecture import read_architecture
from megatron_rc.launch.weights.megatron_bridge import BRIDGE
from tests.support.bridge_stand_in import ARCHITECTURE, install
from tests.support.published_models import GATED, MODELS, changed, save_random, words_of
from tests.support.ranks import Layout
from tests.support.recorded_training import recorded_batch, run_config

UNPADDED = ["--make-vocab-size-divisible-by=1"]
OTHER = {"model_type": "mystery", "architectures": [ARCHITECTURE]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama, which other programs can read."""
    return save_random(MODELS["llama-untied"], tmp_path_factory.mktemp("llama"), 3)


@pytest.fixture
def installed(monkeypatch):
    """The stand-in in the place of the package."""
    monkeypatch.setattr(architecture, "is_installed", lambda: True)
    monkeypatch.setitem(sys.modules, "megatron.bridge", None)
    install()
    megatron_bridge.auto_bridge.cache_clear()


def test_without_it_the_reason_is_named(folder, tmp_path):
    with pytest.raises(ConfigurationError, match=r"'mystery' is not known; known are .*llama.* Megatron-Bridge with"):
        read_architecture(changed(folder, tmp_path, OTHER))
    with pytest.raises(ConfigurationError, match=r"'qwen3_next' is not known \(megatron-core 0\.19\.2 needs"):
        read_architecture(changed(folder, tmp_path, {"model_type": "qwen3_next"}))


def test_flags_are_those_of_the_provider(folder, tmp_path, installed):
    flags = read_architecture(changed(folder, tmp_path, OTHER))
    assert flags.pop("weights-bridge") == BRIDGE
    assert flags.pop("transformer-impl") == "transformer_engine"
    by_tables = read_architecture(folder)
    common = flags.keys() & by_tables.keys()
    assert common >= {"num-layers", "hidden-size", "num-query-groups", "swiglu", "disable-bias-linear", "norm-epsilon"}
    assert {name: flags[name] for name in common} == {name: by_tables[name] for name in common}
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    with pytest.raises(ConfigurationError, match=r"Megatron-Bridge does not read this model \(.*is not supported"):
        read_architecture(changed(folder, unknown, OTHER | {"architectures": ["OtherForCausalLM"]}))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({}, "makes Transformer Engine's layers"),
        ({"model": {"transformer_impl": "transformer_engine", "kind": "hybrid"}}, "drop --model hybrid"),
        (
            {"model": {"transformer_impl": "transformer_engine", "padded_vocab_size": 32}},
            "divides the 30 tokens, not 1",
        ),
        ({"checkpoints": {"load_hf": None}}, "is for a --load-hf whose model_type no table here has"),
    ],
)
def test_what_it_cannot_do_is_refused(folder, tmp_path, installed, sections, message):
    other = changed(folder, tmp_path, OTHER)
    config = run_config(words_of(folder, Layout()))
    config = config.changed(checkpoints={"weights_bridge": BRIDGE, "load_hf": str(other)})
    with pytest.raises(ConfigurationError, match=f"--weights-bridge megatron-bridge .*{message}"):
        check_bridge(config.changed(**sections), samples=False)
    (tmp_path / "settings.json").write_text(json.dumps({"checkpoints": {"weights_bridge": BRIDGE}}))
    with pytest.raises(ConfigurationError, match=r"settings\.json: Megatron-Bridge made this"):
        stored_config(tmp_path)


def through_the_bridge(words, folder):
    """Logits of the recorded tokens, and the weights that come out again, by the provider's model."""
    from megatron_rc.launch.training.models.build import build_chunks, transformer_config
    from megatron_rc.launch.weights.converter import export_model, load_model
    from megatron_rc.parallel.groups import ParallelGroups

    config = run_config(words, torch.distributed.get_world_size(), engine=False)
    install(config)
    megatron_bridge.auto_bridge.cache_clear()
    bridged = config.changed(checkpoints={"weights_bridge": BRIDGE, "load_hf": str(folder)})
    groups = ParallelGroups.from_megatron()
    transformer = transformer_config(bridged)
    assert (transformer.hidden_dropout, transformer.mtp_num_layers) == (0.0, None)
    assert transformer.tensor_model_parallel_size == config.parallel.tensor_model_parallel_size
    chunks = build_chunks(bridged, transformer)
    with torch.no_grad():
        load_model(chunks, bridged, groups, folder)
        tokens = recorded_batch(0).tokens
        logits = chunks[0](tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)
    del sys.modules["megatron.bridge"]
    return logits, dict(export_model(chunks, bridged, groups))


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
def test_weights_come_and_go(ranks, folder, tmp_path, layout):
    other = changed(folder, tmp_path, OTHER)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.layers.4.mtp.weight": torch.ones(2)}, other / "model.safetensors")
    results = ranks.run(through_the_bridge, layout, [*words_of(folder, layout), *UNPADDED], other)
    with torch.no_grad():
        expected = transformers.AutoModelForCausalLM.from_pretrained(folder)(recorded_batch(0).tokens).logits
    logits = torch.cat([shard for shard, _ in results], dim=-1)[..., : GATED["vocab_size"]]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
    exported = results[0][1]
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)
    assert all(not other_rank for _, other_rank in results[1:])


def load_partial(words, folder):
    """Load a directory that lacks a tensor."""
    with pytest.raises(ValueError, match=r"holds no tensor model\.norm\.weight"):
        through_the_bridge(words, folder)


def test_a_missing_tensor_is_named_before_the_bridge_begins(ranks, folder, tmp_path):
    other = changed(folder, tmp_path, OTHER)
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, other / "model.safetensors")
    ranks.run(load_partial, Layout(), [*words_of(folder, Layout()), *UNPADDED], other)


def test_the_directory_describes_an_export(folder):
    config = run_config(words_of(folder, Layout())).changed(checkpoints={"weights_bridge": BRIDGE})
    described = megatron_bridge.described_by_directory(config)
    assert described.to_dict()["hidden_size"] == json.loads((folder / "config.json").read_text())["hidden_size"]
