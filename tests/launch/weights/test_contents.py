"""Tensors of a Hugging Face directory beside those that the model reads: refused, or named in one line."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rc.launch.weights.contents import check_contents
from megatron_rc.parallel import ParallelGroups
from tests.support.published_models import MODELS, save_random, words_of
from tests.support.ranks import Layout, RankFailure
from tests.support.recorded_training import build_trainer, run_config

TIED = "llama"
UNTIED = "llama-untied"
HEAD = "lm_head.weight"
WORDS = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A random model of some families."""
    names = (TIED, UNTIED, "gpt2", "glm4_moe")
    return {name: save_random(MODELS[name], tmp_path_factory.mktemp(name), 3) for name in names}


@pytest.fixture
def changed_model(models, tmp_path):
    """Makes a directory with other tensors: added, replaced, or removed if they are None."""

    def change(name, changes):
        tensors = load_file(models[name] / "model.safetensors") | changes
        tensors = {key: tensor for key, tensor in tensors.items() if tensor is not None}
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "config.json").write_text((models[name] / "config.json").read_text())
        return tmp_path

    return change


def check(folder, groups=None, **more):
    """Check the directory as the flag --load-hf does; default: on one rank."""
    config = run_config(words_of(folder, Layout()))
    check_contents(folder, "--load-hf", config, groups or ParallelGroups(), **more)


def test_another_output_layer_than_the_tied_embeddings_is_refused(models, changed_model, caplog):
    embedding = load_file(models[TIED] / "model.safetensors")[WORDS]
    other = embedding.clone()
    # In the last row, which is compared on its own.
    other[-1, 5] += 0.25
    with pytest.raises(ValueError, match=rf"{HEAD} differs from {WORDS} \(by up to 0\.25\).* tie_word_embeddings"):
        check(changed_model(TIED, {HEAD: other}))
    with pytest.raises(ValueError, match=rf"{HEAD} .*\(31, 32\) is not \(30, 32\)"):
        check(changed_model(TIED, {HEAD: torch.zeros(31, 32)}))
    # A critic has a value head in its place.
    check(changed_model(TIED, {HEAD: other}), has_output_layer=False)
    # Equal ones are what many publishers ship, in whatever precision.
    check(changed_model(TIED, {HEAD: embedding.clone()}))
    rounded = embedding.bfloat16()
    check(changed_model(TIED, {HEAD: rounded.float(), WORDS: rounded}))
    assert not caplog.messages


def test_rows_are_compared_in_parts(models, changed_model, monkeypatch):
    monkeypatch.setattr("megatron_rc.launch.weights.load._COMPARED_ROWS", 7)
    other = load_file(models[TIED] / "model.safetensors")[WORDS].clone()
    other[3] += 0.5
    other[29] += 0.125
    with pytest.raises(ValueError, match=r"by up to 0\.5\)"):
        check(changed_model(TIED, {HEAD: other}))


def test_the_first_rank_refuses_it(ranks, changed_model):
    folder = changed_model(TIED, {HEAD: torch.ones(30, 32)})
    layout = Layout(tp=2, sp=True)
    with pytest.raises(RankFailure, match=rf"(?s)rank 0 of 2.*--load-hf: .*{HEAD} differs from {WORDS}"):
        ranks.run(build_trainer, layout, words_of(folder, layout))


def test_an_untied_model_without_an_output_layer_says_so(changed_model):
    with pytest.raises(ValueError, match=f"no {HEAD}, and config.json does not tie .*tie_word_embeddings to true"):
        check(changed_model(UNTIED, {HEAD: None}))


def test_tensors_that_nothing_reads_are_one_line(changed_model, caplog):
    biases = {f"model.layers.{layer}.self_attn.q_proj.bias": torch.zeros(32) for layer in range(4)}
    folder = changed_model(TIED, biases | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    check(folder)
    (line,) = caplog.messages
    assert line.startswith(f"--load-hf {folder}: ")
    assert "4 that this model does not have" in line
    shown = [f"model.layers.{layer}.self_attn.q_proj.bias" for layer in range(3)]
    assert f"({', '.join(shown)}, and 1 more)" in line
    assert "inv_freq" not in line


def test_one_rank_says_it(changed_model, caplog):
    class SecondReplica(ParallelGroups):
        """Groups of a rank that is not the first of a replica."""

        is_first_of_replica = False

    check(changed_model(TIED, {"x": torch.zeros(1)}), SecondReplica())
    assert not caplog.messages


def test_layers_that_predict_further_tokens_are_named_as_such(changed_model, caplog):
    """As GLM-4.5's layer behind the last one; nothing is said without them."""
    check(changed_model("glm4_moe", {}))
    assert not caplog.messages
    further = {"model.layers.4.eh_proj.weight": torch.zeros(1), "model.layers.4.enorm.weight": torch.zeros(1)}
    check(changed_model("glm4_moe", further))
    (line,) = caplog.messages
    assert line.endswith("not read: 2 of the layers from 4 on, which num_hidden_layers does not count")


def test_causal_masks_of_published_gpt2_files_are_not_named(models, changed_model, caplog):
    tensors = load_file(models["gpt2"] / "model.safetensors")
    published = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64).tril() for layer in range(4)}
    masks |= {"h.0.attn.masked_bias": torch.tensor(-1e4)}
    check(changed_model("gpt2", dict.fromkeys(tensors) | published | masks))
    assert not caplog.messages
    check(changed_model("gpt2", {"h.1.attn.scale": torch.ones(1)}))
    assert "h.1.attn.scale" in caplog.messages[0]


def test_weights_in_another_format_are_named(models, tmp_path):
    config = json.loads((models[TIED] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match=r"model\.gguf, but .*safetensors alone: .*from_gguf"):
        check(tmp_path)
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"holds pytorch_model-00001-of-00002\.bin, but .*safetensors .*save_pretrained"
    ):
        check(tmp_path)
