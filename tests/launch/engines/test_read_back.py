"""Weights read back from rollout servers: each one is the server's, and what cannot be read is refused.

``tests/vllm/check_read_back.py`` reads them from vLLM itself.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from megatron_rc.launch.engines import EngineError
from megatron_rc.launch.engines.read_back import read_back
from tests.support.read_back import ReadableServer
from tests.support.rollout_servers import running

ENGINES = ("sglang-server", "vllm-server")


def make_weights(*, tied=False):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=29,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    return {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.fixture
def server():
    with running(kind=ReadableServer) as started:
        started.weights = make_weights()
        yield started


def shapes_of(weights):
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def read(engine, server, shapes=None):
    return dict(read_back(engine, server.url, shapes or shapes_of(server.weights)))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("engine", ENGINES)
def test_all_weights_are_the_servers(server, engine, tied):
    server.weights = make_weights(tied=tied)
    weights = read(engine, server)
    assert weights.keys() == server.weights.keys()
    for name, weight in weights.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, server.weights[name].float()), name


@pytest.mark.parametrize("engine", ENGINES)
def test_another_model_is_refused(server, engine):
    shapes = shapes_of(server.weights)
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(EngineError, match=rf"{name} is \(16, 24\), expected \(16, 48\)"):
        read(engine, server, shapes | {name: (16, 48)})


@pytest.mark.parametrize(
    ("setting", "value"), [("tp_size", 2), ("pp_size", 2), ("dp_size", 4), ("quantization", "fp8")]
)
def test_shards_and_quantised_weights_of_sglang_are_refused(server, setting, value):
    server.settings[setting] = value
    with pytest.raises(EngineError, match=f"{setting} {value}"):
        read("sglang-server", server)


def test_answers_of_sglang_that_are_no_weight_are_refused(server):
    server.always["/get_weights_by_name"] = lambda _: [[1.0, 2.0], [3.0]]
    with pytest.raises(EngineError, match="no numbers"):
        read("sglang-server", server)


@pytest.mark.parametrize(
    ("file_name", "match"),
    [(None, "wrote no weights"), ("model-rank-1-part-0.safetensors", "several processes")],
    ids=["elsewhere", "tensor-parallel"],
)
def test_files_that_are_not_the_whole_model_are_refused(server, file_name, match):
    server.file_name = file_name
    with pytest.raises(EngineError, match=match):
        read("vllm-server", server)


def test_weights_that_vllm_quantised_are_refused(server):
    name = "model.layers.0.self_attn.o_proj.weight"
    shapes = shapes_of(server.weights)
    server.weights[name] = server.weights[name].to(torch.float8_e4m3fn)
    with pytest.raises(EngineError, match=rf"{name} to float8_e4m3fn"):
        read("vllm-server", server, shapes)


def test_layers_that_vllm_stores_otherwise_are_refused(server):
    shapes = shapes_of(server.weights)
    name = "model.layers.0.mlp.down_proj.weight"
    del server.weights[name]
    with pytest.raises(EngineError, match=rf"no {name}: .*CPU"):
        read("vllm-server", server, shapes)
