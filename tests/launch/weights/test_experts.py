"""A mixture of experts and its rollout engine: names of files in and out, rounded weights, runs that learn."""

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron_rc.launch.engines.model_directory import ModelDirectory
from megatron_rc.launch.engines.rounding import Rounding, round_weight
from megatron_rc.launch.engines.transformers_engine import TransformersEngine
from megatron_rc.launch.tasks.ends import ResponseEnds
from megatron_rc.launch.weights import find_family
from megatron_rc.launch.weights.checkpoint_names import checkpoint_tensors, is_expert
from tests.support.ranks import Layout
from tests.support.recorded_training import LLAMA, flags, run_config
from tests.support.training_runs import LIVE, rows, run_training

EXPERTS = ["--num-experts=4", "--moe-ffn-hidden-size=24", "--untie-embeddings-and-output-weights"]
QWEN3_MOE = [*LLAMA, *EXPERTS, "--qk-layernorm", "--kv-channels=16"]
FAMILIES = {"qwen3_moe": QWEN3_MOE, "mixtral": [*LLAMA, *EXPERTS]}
PAD = 0
ENDS = ResponseEnds((1,))


@pytest.fixture(params=FAMILIES)
def engine(request, tmp_path):
    config = run_config(flags(tmp_path, model=FAMILIES[request.param]))
    torch.manual_seed(0)
    return TransformersEngine(find_family(config).hugging_face_config(config), "fp32", ENDS, PAD, torch.device("cpu"))


def weights_of(engine):
    return {name: torch.randn_like(tensor) for name, tensor in checkpoint_tensors(engine.model).items()}


def test_what_is_loaded_is_what_a_saved_model_computes(engine, tmp_path):
    """Names are those of the saved model; it is written as vLLM reads it, and read by transformers."""
    weights = weights_of(engine)
    assert sum(map(is_expert, weights)) == 4 * 4 * 3
    engine.load_weights(weights.items(), 1)
    engine.model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert weights.keys() == saved.keys()
    assert all(torch.equal(weights[name], saved[name]) for name in saved)
    path = ModelDirectory(tmp_path / "weights", engine.model.config, 1).write(weights.items())
    written = transformers.AutoModelForCausalLM.from_pretrained(path)
    tokens = torch.tensor([[3, 4, 5, 6, 7]])
    with torch.no_grad():
        torch.testing.assert_close(engine.model(tokens).logits, written(tokens).logits)
    assert load_file(path / "model.safetensors").keys() == weights.keys()


def test_experts_are_rounded_and_their_router_is_not(engine):
    weights = weights_of(engine)
    engine._rounded = Rounding(engine.model, "fp8-e4m3")
    engine.load_weights(weights.items(), 1)
    for name, tensor in checkpoint_tensors(engine.model).items():
        linear = name.endswith("_proj.weight") or is_expert(name)
        assert torch.equal(tensor, round_weight(weights[name], "fp8-e4m3", linear)), name


def test_a_mixture_learns_from_the_default_engine(ranks, tmp_path):
    """With the weights of every step: in float32 the engine's policy is the trainer's."""
    layout = Layout(dp=2, ep=2)
    more = ["--rollout-dtype=fp32", "--train-iters=3", "--moe-aux-loss-coeff=0.01", *layout.flags()]
    assert ranks.run(run_training, layout, flags(tmp_path, *LIVE, *more, model=QWEN3_MOE)) == [None, None]
    steps = rows(tmp_path)
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(row["rollout_corr/k3_kl"] < 1e-9 for row in steps)
    assert all(row["grad_norm"] > 0 for row in steps)
