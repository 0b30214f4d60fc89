"""Weights read back from vLLM itself; with linear layers that keep their weights, as on a GPU."""

import importlib

import pytest
import torch
from transformers import LlamaForCausalLM

from megatron_rc.launch.engines import EngineError
from megatron_rc.launch.engines.read_back import weights_of_vllm
from tests.support.partial_rollouts import CONFIG
from tests.vllm.check_vllm import CPU_DEFAULTS


def written(folder, monkeypatch, *, keeps_weights):
    """The weights of a model, and the folder with those that vLLM has of it."""
    for name, value in {**CPU_DEFAULTS, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    vllm = importlib.import_module("vllm")
    if keeps_weights:
        # Without kernels that pack weights, a CPU computes with the weights themselves.
        monkeypatch.setattr("vllm._custom_ops._supports_onednn", False)
        monkeypatch.setattr("vllm.model_executor.layers.utils.check_cpu_sgl_kernel", lambda *_: False)
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    model.save_pretrained(folder / "model")
    engine = vllm.LLM(
        model=str(folder / "model"),
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        skip_tokenizer_init=True,
        enable_chunked_prefill=False,
    )
    (folder / "held").mkdir()
    engine.collective_rpc("save_sharded_state", kwargs={"path": str(folder / "held")})
    engine.llm_engine.engine_core.shutdown()
    return {name: weight.detach() for name, weight in model.named_parameters()}, folder / "held"


def shapes_of(weights):
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def test_weights_are_those_of_the_directory(tmp_path, monkeypatch):
    weights, folder = written(tmp_path, monkeypatch, keeps_weights=True)
    read = dict(weights_of_vllm(folder, shapes_of(weights)))
    assert read.keys() == weights.keys()
    for name, weight in read.items():
        assert torch.equal(weight, weights[name]), name


def test_packed_layers_of_a_cpu_are_refused(tmp_path, monkeypatch):
    weights, folder = written(tmp_path, monkeypatch, keeps_weights=False)
    with pytest.raises(EngineError, match="linear layers on a CPU"):
        dict(weights_of_vllm(folder, shapes_of(weights)))
