"""Layers with other norms, positions and biases than Llama's train as transformers differentiates them.

And they train alike under every layout.
"""

import functools

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron_rc.launch.weights.checkpoint_names import checkpoint_tensors
from tests.support.published_models import MODELS, enlarge_gates, save_random, words_of
from tests.support.ranks import Layout
from tests.support.recorded_training import make_trainer, share

SGD = ["--optimizer=sgd", "--sgd-momentum=0", "--lr=0.01", "--clip-grad=0", "--micro-batch-size=8"]
# These models are so far from the recorded policy that the usual bounds would reject all tokens.
SGD += ["--rollout-rs-threshold=1e-9_1e9,1e9", "--grpo-kl-beta=0"]
# YaRN and biases of the attention; norms around and interleaved halves of heads; norms behind and over all heads;
# sinks, windows and biases of experts.
NAMES = ("llama-yarn", "glm4", "olmo2", "gpt_oss")
# gpt-oss with activations that pass the clamp. Its larger weights round a step more than the layouts' tolerance.
CLAMPED = "gpt_oss-clamped"
# Positions alone, as of llama-yarn, are the same in every layout.
CASES = [(name, Layout(tp=2, sp=True), ()) for name in ("glm4", "olmo2")]
# Experts that are not split: the ranks of a TP group have other experts, or the same ones with other tokens.
CASES += [
    ("gpt_oss", Layout(tp=2, sp=True, pp=2, etp=1), ()),
    ("gpt_oss", Layout(tp=2, sp=True, ep=2, etp=1), ()),
    ("gpt_oss", Layout(cp=2, ep=2), ()),
    ("gpt_oss", Layout(cp=2), ("--rl-use-sequence-packing",)),
    ("qwen3_moe", Layout(tp=2, sp=True, etp=1), ()),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A random model of each architecture, and one of gpt-oss whose activations pass the clamp."""
    results = {name: save_random(MODELS[name], tmp_path_factory.mktemp(name), 5) for name in (*NAMES, "qwen3_moe")}
    results[CLAMPED] = save_random(MODELS["gpt_oss"], tmp_path_factory.mktemp(CLAMPED), 5)
    enlarge_gates(results[CLAMPED])
    return results


def gradients(words, tokens, upstream):
    """Gradients of Σ upstream · logits by every weight, under the names of files; one process."""
    from megatron_rc.launch.weights.converter import export_model

    trainer = make_trainer(words)
    (chunk,) = trainer.chunks
    logits = chunk(tokens, torch.arange(tokens.shape[1]).unsqueeze(0), None)
    # Megatron's DDP takes the gradients into its buffers.
    (logits[..., : upstream.shape[-1]] * upstream).sum().backward()
    for parameter in chunk.parameters():
        parameter.data.copy_(parameter.main_grad)
    return dict(export_model(trainer.chunks, trainer.config, trainer.groups))


@pytest.mark.parametrize("name", [*NAMES, CLAMPED])
def test_gradients_are_those_of_transformers(ranks, folders, name):
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 30, (2, 16), generator=generator)
    upstream = torch.randn(2, 16, 30, generator=generator)
    (results,) = ranks.run(gradients, Layout(), words_of(folders[name], Layout()), tokens, upstream)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folders[name],
        dtype=torch.float64,
        # PyTorch has no grouped product of float64.
        experts_implementation="eager" if name in ("gpt_oss", CLAMPED) else None,
    )
    (model(tokens).logits * upstream).sum().backward()
    for parameter in model.parameters():
        parameter.data.copy_(parameter.grad)
    expected = checkpoint_tensors(model)
    assert results.keys() == expected.keys()
    for tensor, value in results.items():
        scale = float(expected[tensor].abs().max())
        assert scale > 0, tensor
        # The gradient of the keys' bias is 0 without rotation: rounding alone is left of it.
        torch.testing.assert_close(value.double(), expected[tensor], rtol=0, atol=1e-4 * scale, msg=tensor)


def train(words):
    """Take two steps on recorded rollouts; return the weights that an engine would get."""
    from megatron_rc.launch.weights.converter import export_model

    trainer = make_trainer(words)
    prepared = trainer.prepare(share(trainer, 0))
    for _ in range(2):
        trainer.update(prepared, 0)
    return dict(export_model(trainer.chunks, trainer.config, trainer.groups))


@pytest.fixture(scope="module")
def trained_alone(ranks, folders):
    """The weights of a model after the steps of one process, which are made once."""

    def on_one_process(name):
        (weights,) = ranks.run(train, Layout(), [*words_of(folders[name], Layout()), *SGD])
        return weights

    return functools.cache(on_one_process)


@pytest.mark.parametrize(("name", "layout", "more"), CASES, ids=str)
def test_layouts_take_the_steps_of_one_process(ranks, folders, trained_alone, name, layout, more):
    before = load_file(folders[name] / "model.safetensors")
    expected = trained_alone(name)
    (results,) = filter(None, ranks.run(train, layout, [*words_of(folders[name], layout, *more), *SGD]))
    assert results.keys() == expected.keys()
    for tensor, value in results.items():
        scale = float((expected[tensor] - before[tensor]).abs().max())
        assert scale > 0, tensor
        torch.testing.assert_close(value, expected[tensor], rtol=0, atol=max(1e-3 * scale, 1e-7), msg=tensor)
