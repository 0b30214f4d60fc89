"""DeepSeek-V3's layers train as transformers differentiates them, and alike under every layout."""

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron_rc.launch.weights.checkpoint_names import checkpoint_tensors, is_expert
from megatron_rc.launch.weights.named_weights import kept_buffers
from tests.support.published_models import MODELS, save_random, words_of
from tests.support.ranks import Layout
from tests.support.recorded_training import make_trainer, share

SGD = ["--optimizer=sgd", "--sgd-momentum=0", "--lr=0.01", "--clip-grad=0", "--moe-token-dispatcher-type=alltoall"]
BALANCED = ["--moe-router-load-balancing-type=seq_aux_loss", "--moe-aux-loss-coeff=0.5"]
BIAS = "e_score_correction_bias"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model, whose experts' bias is not 0."""
    return save_random(MODELS["deepseek_v3"], tmp_path_factory.mktemp("deepseek"), 5)


def gradients(words, tokens, upstream):
    """Of Σ upstream · logits by every weight, under the names of files; one process."""
    from megatron_rc.launch.weights.converter import export_model

    trainer = make_trainer(words)
    (chunk,) = trainer.chunks
    logits = chunk(tokens, torch.arange(tokens.shape[1]).unsqueeze(0), None)
    # Megatron's DDP takes the gradients into its buffers.
    (logits[..., : upstream.shape[-1]] * upstream).sum().backward()
    for parameter in chunk.parameters():
        parameter.data.copy_(parameter.main_grad)
    for buffer in kept_buffers(chunk).values():
        buffer.zero_()
    return dict(export_model(trainer.chunks, trainer.config, trainer.groups))


def test_gradients_are_those_of_transformers(ranks, folder):
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 30, (2, 16), generator=generator)
    upstream = torch.randn(2, 16, 30, generator=generator)
    (results,) = ranks.run(gradients, Layout(), words_of(folder, Layout()), tokens, upstream)
    # The faster kernels of its experts have no float64.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, experts_implementation="eager", dtype=torch.float64
    )
    (model(tokens).logits * upstream).sum().backward()
    for parameter in model.parameters():
        parameter.data.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    expected = checkpoint_tensors(model)
    assert results.keys() == expected.keys()
    for name, value in results.items():
        if BIAS not in name:
            scale = float(expected[name].abs().max())
            assert scale > 0 or is_expert(name), name
            torch.testing.assert_close(
                value.double(), expected[name], rtol=0, atol=max(1e-4 * scale, 1e-7), msg=lambda m, n=name: n
            )


def train(words):
    """Two steps on recorded rollouts: how far the two passes differ, and the weights that an engine would get."""
    from megatron_rc.launch.weights.converter import export_model

    trainer = make_trainer(words)
    prepared = trainer.prepare(share(trainer, 0))
    steps = [trainer.update(prepared, 0).metrics for _ in range(2)]
    return steps[0]["policy/noise_floor"], dict(export_model(trainer.chunks, trainer.config, trainer.groups))


@pytest.fixture(scope="module")
def single(ranks, folder):
    """The weights after the steps of one process, by the flags of the router's loss."""
    return {
        more: ranks.run(train, Layout(), [*words_of(folder, Layout()), "--micro-batch-size=8", *SGD, *more])[0][1]
        for more in ((), tuple(BALANCED))
    }


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        (Layout(tp=2, sp=True), BALANCED),
        (Layout(cp=2, ep=2), ["--rl-use-sequence-packing"]),
    ],
    ids=str,
)
def test_layouts_take_the_steps_of_one_process(ranks, folder, single, layout, more):
    before = load_file(folder / "model.safetensors")
    arguments = [*words_of(folder, layout), "--micro-batch-size=8", *SGD, *more]
    results = ranks.run(train, layout, arguments)
    assert {floor for floor, _ in results} <= {0, None}, "what is scored is what is trained"
    expected = single[tuple(more) if more == BALANCED else ()]
    for weights in (weights for _, weights in results if weights):
        assert weights.keys() == expected.keys()
        for name, value in weights.items():
            if BIAS in name:
                assert torch.equal(value, before[name]), name
            scale = float((expected[name] - before[name]).abs().max())
            # To some experts no token goes.
            assert scale > 0 or BIAS in name or is_expert(name), name
            torch.testing.assert_close(value, expected[name], rtol=0, atol=max(1e-3 * scale, 1e-7))
