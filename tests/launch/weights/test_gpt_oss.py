"""gpt-oss: published experts in MXFP4, what their biases need, and a run that learns from its engine."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_rc.launch import export
from megatron_rc.launch.engines.rounding import Rounding, round_weight
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.weights.contents import check_contents
from megatron_rc.parallel import ParallelGroups
from tests.launch.weights.test_weights import load_and_export
from tests.support.published_models import GPT_OSS, save_random, words_of
from tests.support.ranks import Layout
from tests.support.recorded_training import run_config
from tests.support.training_runs import LIVE, rows, run_training

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


def test_experts_in_mxfp4_are_read_as_transformers_reads_them(ranks, published):
    layout = Layout(ep=2, dp=2)
    arguments = [*words_of(published, layout), "--bf16"]
    results = ranks.run(load_and_export, layout, arguments)
    weights = next(weights for _, weights, _, _ in results if weights)
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
    arguments = [
        *words_of(published, Layout(dp=2, ep=2)),
        "--rollout-engine=vllm-server",
        "--rollout-url=http://a http://b",
    ]
    with pytest.raises(ConfigurationError, match="--rollout-weight-transfer gloo with --expert-model-parallel-size 2"):
        run_config([*arguments, "--rollout-weight-transfer=gloo"], world_size=2)


def test_stacked_experts_are_rounded_row_by_row():
    model = transformers.AutoModelForCausalLM.from_config(CONFIG)
    rounded = Rounding(model, "fp8-e4m3")
    generator = torch.Generator().manual_seed(0)
    stack = torch.randn(4, 32, 128, generator=generator)
    expected = torch.stack([round_weight(expert.t(), "fp8-e4m3", True).t() for expert in stack])
    assert torch.equal(rounded("model.layers.0.mlp.experts.gate_up_proj", stack), expected)
    assert torch.equal(rounded("model.layers.0.mlp.experts.gate_up_proj_bias", stack[0]), stack[0].bfloat16().float())


def test_a_run_learns_from_the_default_engine(ranks, tmp_path):
    """In float32 the engine's policy is the trainer's at every step; the checkpoint is the exported model."""
    folder = save_random(transformers.GptOssConfig(**GPT_OSS | {"vocab_size": 103}), tmp_path / "model", 3)
    layout = Layout(tp=2, sp=True, etp=1)
    arguments = [*words_of(folder, layout), *LIVE, "--num-layers=4", f"--runs-dir={tmp_path}", "--train-iters=2"]
    arguments += ["--rl-use-sequence-packing", "--rollout-dtype=fp32", "--moe-enable-routing-replay"]
    arguments += [f"--save={tmp_path}/checkpoints", f"--save-hf={tmp_path}/hf"]
    assert set(ranks.run(run_training, layout, arguments)) == {None}
    steps = rows(tmp_path)
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["rollout_corr/k3_kl"] < 1e-9 for row in steps)
    assert all(row["grad_norm"] > 0 for row in steps)

    export.main(["--load", f"{tmp_path}/checkpoints", "--save-hf", f"{tmp_path}/exported"])
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    written = load_file(tmp_path / "hf" / "step-2" / "model.safetensors")
    before = load_file(folder / "model.safetensors")
    assert exported.keys() == written.keys() == before.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, written[name]), name
        assert not torch.equal(tensor, before[name]), name
