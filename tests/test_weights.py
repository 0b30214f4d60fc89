"""Hugging Face directories in and out of sharded models: the same logits, and every bit back again."""

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_rc.launch.arguments import parse_args
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.weights import from_gguf
from megatron_rc.launch.weights.architecture import read_architecture
from megatron_rc.launch.weights.from_gguf import unpack
from tests.ranks import Layout
from tests.scenario import COMMON, make_trainer, recorded_batch

GATED = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 30,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
MODELS = {
    "llama": transformers.LlamaConfig(**GATED, tie_word_embeddings=True),
    "llama-untied": transformers.LlamaConfig(**GATED, tie_word_embeddings=False, rms_norm_eps=1e-4),
    "qwen2": transformers.Qwen2Config(**GATED, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**GATED, head_dim=16, tie_word_embeddings=False),
    "gpt2": transformers.GPT2Config(
        n_embd=32, n_layer=4, n_head=4, n_positions=64, vocab_size=30, activation_function="gelu"
    ),
}
CASES = [(name, layout) for name in MODELS for layout in (Layout(tp=2, sp=True), Layout(pp=2, vpp=True))]
CASES += [("llama", Layout()), ("gpt2", Layout(tp=2, pp=2, cp=2))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A random model of each family, with norms and biases that are neither 1 nor 0, as transformers saves it."""
    found = {}
    for name, config in MODELS.items():
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        found[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(found[name], max_shard_size="20KB" if name == "qwen3" else "5GB")
    return found


def load_and_export(words):
    """Logits of the recorded tokens on the last stage, and the weights that come out again."""
    from megatron_rc.launch.batches import cut_batch
    from megatron_rc.launch.weights.export import export_weights
    from megatron_rc.parallel.groups import group_rank

    trainer = make_trainer(words)
    with torch.no_grad():
        batch = cut_batch(recorded_batch(0), trainer.args, trainer.groups)
        logits = trainer._run(
            trainer.model, batch, batch.cuts[0], lambda _model, local, output, non_loss_data: output, forward_only=True
        )
    first = group_rank(trainer.groups.cp) == 0
    weights = dict(export_weights(trainer.chunks, trainer.args, trainer.groups)) if first else {}
    return torch.cat(logits) if logits else None, weights, batch.local.positions[0], group_rank(trainer.groups.cp)


def words_of(folder, layout, *more):
    return [
        *COMMON,
        f"--load-hf={folder}",
        "--tokenizer-type=CharacterTokenizer",
        f"--runs-dir={folder}/runs",
        "--micro-batch-size=8",
        *layout.flags(),
        *more,
    ]


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_logits_and_round_trip(ranks, folders, name, layout):
    found = ranks.run(load_and_export, layout, words_of(folders[name], layout))
    model = transformers.AutoModelForCausalLM.from_pretrained(folders[name])
    with torch.no_grad():
        expected = model(recorded_batch(0).tokens).logits
    got = torch.zeros_like(expected)
    for cp in range(layout.cp):
        shards = [(logits, positions) for logits, _, positions, rank in found if logits is not None and rank == cp]
        got[:, shards[0][1]] = torch.cat([logits for logits, _ in shards], dim=-1)[..., : expected.shape[-1]]
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
    saved = {key: value for path in folders[name].glob("*.safetensors") for key, value in load_file(path).items()}
    assert found[0][1].keys() == saved.keys()
    for key, value in found[0][1].items():
        assert torch.equal(value, saved[key]), key


def start(words):
    from megatron_rc.launch.distributed import AgreedError

    try:
        make_trainer(words)
    except AgreedError as error:
        return str(error)


def spoilt(folder, target, change):
    """The directory with other tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text((folder / "config.json").read_text())
    return target


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.3.mlp.down_proj.weight"), "holds no tensor model.layers.3.mlp.down_proj.weight"),
        (
            lambda t: t.update({"model.layers.3.mlp.down_proj.weight": torch.zeros(32, 50)}),
            "model.layers.3.mlp.down_proj.weight (32, 50) does not fit",
        ),
        (
            lambda t: t.update({"model.layers.3.self_attn.q_proj.weight": torch.zeros(33, 32)}),
            "model.layers.3.self_attn.q_proj.weight (33, 32), model.layers.3.self_attn.k_proj.weight",
        ),
    ],
    ids=["missing", "shape", "uncut"],
)
def test_weights_that_do_not_fit_are_one_error_on_all_ranks(ranks, folders, tmp_path, change, message):
    """Only the last stage reads the tensor that is wrong."""
    folder = spoilt(folders["llama"], tmp_path, change)
    messages = ranks.run(start, Layout(pp=2), words_of(folder, Layout(pp=2)))
    assert set(messages) == {messages[0]}
    assert messages[0].startswith("--load-hf: ")
    assert message in messages[0]


def test_files_that_cannot_be_read_are_named(ranks, folders, tmp_path):
    config = (folders["llama"] / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    (message,) = ranks.run(start, Layout(), words_of(tmp_path, Layout()))
    assert "holds neither model.safetensors nor model.safetensors.index.json" in message
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    (message,) = ranks.run(start, Layout(), words_of(tmp_path, Layout()))
    assert "model.safetensors cannot be read as safetensors" in message
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    (message,) = ranks.run(start, Layout(), words_of(tmp_path, Layout()))
    assert "is no index of safetensors files" in message


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--rotary-base=10000", "--rotary-base 10000 contradicts --load-hf"),
        ("--num-layers=8", "--num-layers 8 contradicts --load-hf"),
        ("--untie-embeddings-and-output-weights", "--untie-embeddings-and-output-weights True contradicts"),
        ("--norm-epsilon=1e-3", r"--norm-epsilon 0\.001 contradicts"),
        ("--no-swiglu", "--swiglu False contradicts"),
    ],
)
def test_flags_that_contradict_the_directory_are_refused(folders, word, message):
    with pytest.raises(ConfigurationError, match=message):
        parse_args(words_of(folders["llama"], Layout(), word))
    assert parse_args(words_of(folders["llama"], Layout(), "--rotary-base=500")).rotary_base == 500


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not known; known are gpt2, llama, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', not 'silu'"),
        ({"attention_bias": True}, "attention_bias is True, not False"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rotary embeddings of type 'llama3'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}}, "embeddings of type 'linear'"),
        ({"rope_parameters": {"rope_theta": 0.5}}, r"rope_theta 0\.5 is no whole number"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"num_hidden_layers": ...}, "lacks 'num_hidden_layers'"),
    ],
)
def test_models_that_would_be_computed_differently_are_refused(folders, tmp_path, change, message):
    config = json.loads((folders["llama"] / "config.json").read_text())
    config.update(change)
    kept = {key: value for key, value in config.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    with pytest.raises(ConfigurationError, match=message):
        read_architecture(tmp_path)


def test_older_directories_are_read(tmp_path):
    """Before transformers 5 the base of the rotary frequencies stood by itself."""
    config = {**GATED, "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e6}
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_architecture(tmp_path)["rotary-base"] == "1000000"


def test_a_directory_that_is_not_there_is_named():
    with pytest.raises(ConfigurationError, match=r"--load-hf nowhere: config\.json cannot be read"):
        read_architecture(Path("nowhere"))


def test_a_gguf_file_that_cannot_be_unpacked_is_named(tmp_path, monkeypatch):
    with pytest.raises(ConfigurationError, match=r"none\.gguf: no such file; give a model in the GGUF format"):
        unpack(tmp_path / "none.gguf", tmp_path / "out")
    (tmp_path / "a.gguf").write_bytes(b"not one")
    right = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "gguf" else right(name, *a))
    monkeypatch.setitem(sys.modules, "accelerate", types.ModuleType("accelerate"))
    with pytest.raises(
        ConfigurationError, match=r"a GGUF file needs .*, which is not installed: .*megatron-rc\[gguf\]"
    ):
        unpack(tmp_path / "a.gguf", tmp_path / "out")
    with pytest.raises(SystemExit, match=r"usage: python -m megatron_rc\.launch\.weights\.from_gguf"):
        from_gguf.main(["a.gguf"])
    with pytest.raises(SystemExit, match=r"error: .*no such file"):
        from_gguf.main([str(tmp_path / "none.gguf"), str(tmp_path / "out")])


def test_a_folder_that_holds_a_model_is_not_unpacked_again(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    unpack(tmp_path / "gone.gguf", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
