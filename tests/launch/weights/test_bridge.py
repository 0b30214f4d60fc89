"""mbridge in the place of our tables: when it is, and what it is asked for.

Where it is installed it converts a real model here, whose parameters are given the names that Transformer Engine's
layers have on a GPU.
"""

import importlib.util
import re
from dataclasses import replace

import pytest
import torch
import transformers

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.checks.weights import check_bridge
from megatron_rc.launch.weights.converter import bridge_export, bridge_load
from tests.support.published_models import GATED, MODELS, save_random, words_of
from tests.support.ranks import Layout
from tests.support.recorded_training import GPT2, LLAMA, flags, make_trainer, run_config

BRIDGE = "--weights-bridge=mbridge"
UNTIED = "--untie-embeddings-and-output-weights"


@pytest.fixture
def installed(monkeypatch):
    """A GPU, and the packages that are said to be there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    find = importlib.util.find_spec

    def pretend(*names):
        known = dict.fromkeys(("transformer_engine", "mbridge")) | dict.fromkeys(names, find("json"))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: known.get(name, find(name, *rest)))

    return pretend


def check(tmp_path, *more, model=LLAMA, engine=True):
    arguments = flags(tmp_path, "--no-cpu", BRIDGE, *more, model=model)
    return run_config(arguments, 1 + (PP2 in more), engine=engine)


def chosen(tmp_path, *more, model=LLAMA):
    return run_config(flags(tmp_path, "--no-cpu", *more, model=model), 1 + (PP2 in more)).checkpoints.weights_bridge


BOTH = ("transformer_engine", "mbridge")
PP2 = "--pipeline-model-parallel-size=2"
# Packages that are there, flags, the model, and parts of the reason.
REFUSED = {
    "local": (BOTH[1:], [], LLAMA, r"--transformer-impl transformer_engine.* local.*\[gpu\]'"),
    "no-mbridge": (BOTH[:1], [], LLAMA, r"needs mbridge, .*\[bridge\]'"),
    "local-asked-for": (BOTH, ["--transformer-impl=local"], LLAMA, "--transformer-impl .* local"),
    "experts": (BOTH, ["--num-experts=4"], LLAMA, "not mixtral"),
    "gpt2": (BOTH, [], GPT2, "llama, qwen2, qwen3.* not gpt2"),
    "mistral": (BOTH, ["--hf-model-type=mistral"], LLAMA, "not mistral"),
    "tied": (BOTH, [PP2], LLAMA, "--pipeline-model-parallel"),
}


@pytest.mark.parametrize(("there", "more", "model", "reason"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused_for_a_reason_for_which_the_tables_convert(
    tmp_path, installed, caplog, there, more, model, reason
):
    installed(*there)
    with pytest.raises(ConfigurationError, match=reason):
        check(tmp_path, *more, model=model)
    assert chosen(tmp_path, *more, model=model) == "none"
    assert caplog.messages[0].startswith(
        "this program's own tables convert the weights; --weights-bridge mbridge would"
    )
    assert re.search(reason, caplog.messages[0])


def test_it_is_refused_where_it_has_nothing_to_convert(tmp_path, installed):
    installed()
    with pytest.raises(ConfigurationError, match=r"needs transformer_engine, .*\[gpu\]'"):
        check(tmp_path, "--transformer-impl=transformer_engine")
    installed(*BOTH)
    with pytest.raises(ConfigurationError, match=r"--weights-bridge mbridge .*--load-hf or --save-hf"):
        check(tmp_path, engine=False)


@pytest.mark.parametrize(
    "more",
    [[], [UNTIED], ["--add-qkv-bias"], ["--qk-layernorm", UNTIED], [UNTIED, PP2], ["--add-qkv-bias", PP2]],
    ids=str,
)
def test_what_it_can_convert_is_let_pass(tmp_path, installed, more):
    installed(*BOTH)
    assert check(tmp_path, *more).checkpoints.weights_bridge == "mbridge"


def test_it_is_the_default_where_it_can_convert(tmp_path, installed, caplog):
    config = run_config(flags(tmp_path))  # a CPU has no bridge
    check_bridge(config, samples=True)
    assert config.checkpoints.weights_bridge == "none"
    assert not [text for text in caplog.messages if "weights" in text]
    caplog.clear()
    installed(*BOTH)
    assert chosen(tmp_path) == "mbridge"
    (line,) = caplog.messages
    assert "--weights-bridge none" in line
    caplog.clear()
    assert chosen(tmp_path, "--weights-bridge=none") == "none"
    assert not caplog.messages


class OfTransformerEngine(torch.nn.Module):
    """A model of local layers, whose parameters have the names of Transformer Engine's."""

    def __init__(self, chunk):
        super().__init__()
        object.__setattr__(self, "chunk", chunk)
        for name in ("config", "decoder", "share_embeddings_and_output_weights"):
            object.__setattr__(self, name, getattr(chunk, name))

    @staticmethod
    def renamed(name):
        name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        return name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")

    def named_parameters(self, *_, **__):
        yield from ((self.renamed(name), parameter) for name, parameter in self.chunk.named_parameters())

    def state_dict(self, *_, **__):
        return {self.renamed(name): value for name, value in self.chunk.state_dict().items() if value is not None}


def through_the_library(words):
    """What comes out after other weights were read in."""
    trainer = make_trainer(words)
    chunks = [OfTransformerEngine(chunk) for chunk in trainer.chunks]
    with torch.no_grad():
        for chunk in trainer.chunks:
            for parameter in chunk.parameters():
                parameter.zero_()
    bridge_load(chunks, trainer.config, trainer.config.checkpoints.load_hf)
    results = list(bridge_export(chunks, trainer.config, trainer.groups))
    own = {weight.data_ptr() for chunk in trainer.chunks for weight in chunk.parameters()}
    assert not any(tensor.requires_grad or tensor.data_ptr() in own for _, tensor in results)
    assert len(dict(results)) == len(results), "the library gives tied embeddings twice"
    return dict(results)


# Tied Qwens alone: in one process the library takes an untied one that follows a tied one for tied.
REAL = MODELS | {"qwen3": transformers.Qwen3Config(**GATED, head_dim=16, tie_word_embeddings=True)}
CONVERTED = [(name, layout) for name in ("llama-untied", "qwen2", "qwen3") for layout in (Layout(pp=2), Layout(tp=2))]
CONVERTED += [("llama3", Layout()), ("llama3", Layout(tp=2, sp=True))]


@pytest.mark.parametrize(("name", "layout"), sorted(CONVERTED, key=lambda case: str(case[1])), ids=str)
def test_the_library_itself_gives_every_bit_back(ranks, tmp_path, name, layout):
    arguments = words_of(save_random(REAL[name], tmp_path, 2), layout)
    (results,) = [weights for weights in ranks.run(through_the_library, layout, arguments) if weights]
    expected = dict(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    assert results.keys() == expected.keys()
    assert all(torch.equal(results[key], value) for key, value in expected.items())


def load_otherwise(words, name, value, message):
    """With other settings than the directory's, which the error names."""
    trainer = make_trainer(words)
    config = replace(trainer.config, transformer=replace(trainer.config.transformer, **{name: value}))
    with pytest.raises(ValueError, match=re.escape(message)):
        bridge_load(trainer.chunks, config, trainer.config.checkpoints.load_hf)


OTHER = {
    "missing": ("num_layers", 8, "holds no tensor model.layers.4.input_layernorm.weight"),
    "shape": ("ffn_hidden_size", 50, "model.layers.0.mlp.down_proj.weight (32, 48) is not the (32, 50)"),
}


@pytest.mark.parametrize("other", OTHER.values(), ids=OTHER)
def test_a_directory_of_another_model_is_named(ranks, tmp_path, other):
    ranks.run(load_otherwise, Layout(), words_of(save_random(MODELS["llama"], tmp_path, 2), Layout()), *other)
