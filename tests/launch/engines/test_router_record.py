"""The experts that the transformers engine reports are those that its layers used."""

import pytest
import torch

from megatron_rc.launch.engines.transformers_engine import TransformersEngine
from megatron_rc.launch.tasks.ends import ResponseEnds
from megatron_rc.records.rollout import SamplingParams
from tests.support.published_models import MODELS

PAD = 0
ENDS = ResponseEnds((1,))
WITH_EXPERTS = [name for name, config in MODELS.items() if getattr(config, "num_experts_per_tok", None)]
PROMPTS = [[5], [3, 4, 5, 6], [7, 8], [9, 10, 11], [5], [12, 13]] * 4


def used_experts(model, tokens):
    """[tokens, layers with experts, top_k] experts that the layers' experts are called with, in one pass."""
    results = []
    layers = [module for name, module in model.named_modules() if name.endswith(".experts")]
    hooks = [layer.register_forward_pre_hook(lambda _, given: results.append(given[1])) for layer in layers]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(results, dim=1)


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_reported_experts_are_used(name):
    torch.manual_seed(0)
    engine = TransformersEngine(MODELS[name], "fp32", ENDS, PAD, torch.device("cpu"), reports_experts=True)
    for parameter in engine.model.parameters():
        parameter.mul_(8 if parameter.dim() > 1 else 1)
    samples = engine.sample(PROMPTS, SamplingParams(), 16, seed=3)
    assert len({len(sample.token_ids) for sample in samples}) > 1, "responses end at different lengths"
    differing = choices = 0
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        tokens = [*prompt, *sample.token_ids]
        expected = used_experts(engine.model, tokens)[:-1].sort(dim=-1).values
        results = sample.routed_experts
        assert results.dtype == torch.int16
        assert results.shape == expected.shape
        differing += int((results.sort(dim=-1).values != expected).any(dim=-1).sum())
        choices += expected[..., 0].numel()
    # A choice between two experts of nearly equal scores depends on the last digits.
    assert differing <= 0.005 * choices
    engine.sample(PROMPTS[:2], SamplingParams(), 2, seed=1)
    assert not any(module._forward_hooks for module in engine.model.modules())


def test_experts_of_a_dense_model_are_refused():
    with pytest.raises(ValueError, match="LlamaForCausalLM"):
        TransformersEngine(MODELS["llama"], "fp32", ENDS, PAD, torch.device("cpu"), reports_experts=True)
