"""gpt-oss as it is published: experts in MXFP4, which are read as bfloat16, and what their biases need."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.weights.contents import check_contents
from megatron_rc.parallel import ParallelGroups
from tests.launch.weights.test_weights import load_and_export
from tests.support.published_models import GPT_OSS, save_random, words_of
from tests.support.ranks import Layout
from tests.support.recorded_training import run_config

# MXFP4 has blocks of 32 numbers.
CONFIG = transformers.GptOssConfig(**GPT_OSS | {"intermediate_size": 64, "sliding_window": 3})
EXPERTS = ("gate_up_proj", "down_proj")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A random model whose experts are in MXFP4."""
    folder = save_random(CONFIG, tmp_path_factory.mktemp("mxfp4"), 11)
    generator = torch.Generator().manual_seed(12)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith(EXPERTS):
            experts, width_in, width_out = tensor.shape
            blocks = (experts, width_out, width_in // 32, 16)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, blocks, generator=generator, dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(120, 126, blocks[:-1], generator=generator, dtype=torch.uint8)
        else:
            tensors[name] = tensor.bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    entries = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    not_quantized = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    entries["quantization_config"] = {"modules_to_not_convert": not_quantized, "quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(entries))
    return folder


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2, ep=2, dp=2)], ids=str)
def test_experts_in_mxfp4_are_read_as_transformers_reads_them(ranks, published, layout):
    words = [*words_of(published, layout), "--bf16"]
    found = ranks.run(load_and_export, layout, words)
    weights = next(weights for _, weights, _, _ in found if weights)
    quantization = transformers.Mxfp4Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(published, quantization_config=quantization)
    expected = model.state_dict()
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, expected[name].bfloat16()), name


def test_both_parts_of_a_tensor_in_mxfp4_are_known(published, caplog):
    check_contents(published, "--load-hf", run_config(words_of(published, Layout())), ParallelGroups())
    assert not caplog.messages


def test_experts_with_biases_are_not_split(published):
    layout = Layout(tp=2, sp=True)
    message = "--num-experts 4 with --tensor-model-parallel-size 2 .*--expert-tensor-parallel-size 1"
    with pytest.raises(ConfigurationError, match=message):
        run_config(words_of(published, layout), world_size=2)
    run_config([*words_of(published, layout), "--expert-tensor-parallel-size=1"], world_size=2)


def test_ranks_that_hold_some_experts_do_not_send_them_alone(published):
    words = [
        *words_of(published, Layout(dp=2, ep=2)),
        "--rollout-engine=vllm-server",
        "--rollout-url=http://a http://b",
    ]
    with pytest.raises(ConfigurationError, match="--rollout-weight-transfer gloo with --expert-model-parallel-size 2"):
        run_config([*words, "--rollout-weight-transfer=gloo"], world_size=2)
