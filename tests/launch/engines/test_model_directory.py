"""The directory from which rollout servers take their weights."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from megatron_rc.launch.engines import EngineError
from megatron_rc.launch.engines.model_directory import ModelDirectory
from megatron_rc.launch.engines.transformers_engine import TransformersEngine
from tests.support.rollout_servers import CONFIG, ENDS, EOS, random_weights, weights


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 600], ids=["one-file", "files"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_directory_is_a_model_with_an_output_layer_of_its_own(tmp_path, family, shard_bytes, tied):
    small = {"vocab_size": 13, "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 16}
    config = {"llama": LlamaConfig(**{**CONFIG.to_dict(), "tie_word_embeddings": tied})}.get(family) or GPT2Config(
        **small, tie_word_embeddings=tied
    )
    directory = ModelDirectory(tmp_path / "weights", config, EOS, shard_bytes=shard_bytes)
    for seed in (0, 1):
        given = random_weights(config, seed)
        path = directory.write(given.items())
    assert config.tie_word_embeddings == tied, "the caller's config is left alone"
    stored = json.loads((path / "config.json").read_text())
    assert stored["tie_word_embeddings"] is False
    assert stored["eos_token_id"] == EOS
    assert stored["architectures"] == [{"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}[family]]
    files = sorted(path.glob("*.safetensors"))
    assert (len(files) > 2) == (shard_bytes == 600)
    names = [name for file in files for name in safe_open(file, "pt").keys()]  # noqa: SIM118
    assert sorted(names) == sorted({*given, "lm_head.weight"})
    model = AutoModelForCausalLM.from_pretrained(path)
    assert all(torch.equal(parameter, given[name]) for name, parameter in model.named_parameters() if name in given)
    tokens = torch.tensor([[3, 4, 5]])
    want = AutoModelForCausalLM.from_config(config)
    want.load_state_dict(given, strict=not tied)
    want.tie_weights()
    torch.testing.assert_close(model.eval()(tokens).logits, want.eval()(tokens).logits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: [*w.items(), ("model.extra", torch.zeros(1))], "has no weight model.extra"),
        (lambda w: [*w.items(), ("lm_head.weight", torch.zeros(13, 8))], "has no weight lm_head.weight"),
        (lambda w: [*w.items(), *w.items()], "weight model.embed_tokens.weight came twice"),
        (lambda w: (w | {"model.norm.weight": torch.zeros(5)}).items(), r"model.norm.weight is \(8,\), got \(5,\)"),
        (lambda w: list(w.items())[:-1], "weight model.norm.weight never came"),
    ],
    ids=["unknown", "tied-head", "twice", "shape", "missing"],
)
def test_wrong_weights_leave_the_old_ones(engine, tmp_path, change, message):
    stored = (tmp_path / "weights" / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(ValueError, match=message):
        engine.load_weights(change(weights()), 4)
    assert (tmp_path / "weights" / "model.safetensors").stat().st_mtime_ns == stored
    inside = TransformersEngine(CONFIG, "fp32", ENDS, 0, torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        inside.load_weights(change(weights()), 4)
    assert engine.version == inside.version == -1


def test_a_directory_that_cannot_be_written_is_an_error_of_the_engine(engine, tmp_path):
    (tmp_path / "weights.part").write_text("in the way")
    with pytest.raises(EngineError, match=r"cannot be written to .*weights: .*File exists.*: make room there"):
        engine.load_weights(weights().items(), 4)
    assert engine.version == -1
