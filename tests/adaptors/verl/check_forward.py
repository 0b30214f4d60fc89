"""The ``output_processor`` beside verl's Megatron engine on one model, in float64: values and gradients of all weights.

verl's fused output processor needs Triton and a GPU, so its own forward step with logits is the reference: its batches,
its call of the model, and its log-probs and entropies of vocabulary shards.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from megatron_rc.parallel import ParallelGroups, log_prob_processor
from tests.parallel.test_processor import VOCABULARY, build, words_of
from tests.support import training_cases
from tests.support.fixtures import ranks
from tests.support.ranks import Layout

__all__ = ["ranks"]

# verl holds the temperature in float32
LENGTHS = (8, 5, 3)
PADDED = 8
TEMPERATURE = 0.75
OF_FLOAT32 = 2e-6  # Megatron's cross entropy, which verl calls for log-probs, computes in float32


def data():
    """(tokens of each sequence, coefficients of log-probs and entropies in the loss [2, tokens])."""
    generator = torch.Generator().manual_seed(7)
    tokens = [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in LENGTHS]
    return tokens, torch.randn(2, sum(LENGTHS), generator=generator, dtype=torch.float64)


def of_verl(chunk):
    """[2, tokens], log-probs and entropies by verl's forward step."""
    from verl.models.mcore import get_mcore_engine_forward_fn
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    from megatron_rc.parallel.processor import forward_of

    engine = SimpleNamespace(engine_config=SimpleNamespace(entropy_from_logits_with_chunking=False))
    processor = partial(
        MegatronEngineWithLMHead._lm_head_logits_processor,
        engine,
        calculate_sum_pi_squared=False,
        calculate_entropy=True,
        distillation_use_topk=False,
        distillation_only=False,
        logits_processor_func=None,
        batch=None,
        data_format="bshd",
    )
    tokens = torch.nested.as_nested_tensor(data()[0], layout=torch.jagged)
    temperatures = torch.nested.as_nested_tensor(
        [torch.full((length,), TEMPERATURE) for length in LENGTHS], layout=torch.jagged
    )
    forward = get_mcore_engine_forward_fn(SimpleNamespace(architectures=["LlamaForCausalLM"]))
    forward_of_model = chunk.forward
    # verl passes a mask of padding, which causal attention of Transformer Engine does not read, but local layers do.
    with forward_of(chunk, lambda **options: forward_of_model(**options | {"attention_mask": None})):
        outputs = forward(
            chunk,
            tokens,
            {},
            logits_processor=processor,
            logits_processor_args={"label": tokens, "temperature": temperatures},
            data_format="bshd",
        )
    return torch.stack([outputs["log_probs"].values(), outputs["entropy"].values()])


def of_processor(chunk, fused):
    """[2, tokens], log-probs and entropies by the processor, on verl's padded batch."""
    from megatron_rc.launch.training.models.output import processed

    tokens = torch.nn.utils.rnn.pad_sequence(data()[0], batch_first=True)
    positions = torch.arange(PADDED).expand_as(tokens)
    mask = positions < torch.tensor(LENGTHS).unsqueeze(1)
    processor = log_prob_processor(ParallelGroups.from_megatron().tp, fused=fused, temperature=TEMPERATURE)
    labels = tokens.roll(-1, dims=1)
    outputs = processed(chunk, processor, tokens, positions, None, labels=labels, loss_mask=mask.float())
    return torch.stack([values[mask] for values in outputs])


def results_of(call, chunk):
    """For log-probs and for entropies: their values, and the gradients of all weights."""
    results = []
    for number, coefficients in enumerate(data()[1]):
        chunk.zero_grad()
        values = call(chunk)[number]
        (values * coefficients).sum().backward()  # Megatron's and verl's backward passes write over their inputs
        results.append([values.detach(), *(parameter.grad.clone() for _, parameter in training_cases.named([chunk]))])
    return results


def compare(arguments, tied):
    """The largest difference of values and gradients, for each way of the processor, of log-probs and of entropies."""
    import torch._dynamo

    torch._dynamo.config.disable = True  # verl compiles one product, for which a machine may lack a compiler
    chunk = build(arguments, tied)
    expected = results_of(of_verl, chunk)
    assert all(values.any() for results in expected for values in results)
    return [
        [
            max(float((value - counterpart).abs().max()) for value, counterpart in zip(*pair, strict=True))
            for pair in zip(results_of(partial(of_processor, fused=fused), chunk), expected, strict=True)
        ]
        for fused in (True, False)
    ]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(tp=2, sp=True)], ids=str)
def test_the_processor_finds_the_values_and_gradients_of_verls_forward(ranks, tmp_path, layout, tied):
    for differences in ranks.run(compare, layout, words_of(tmp_path, layout, tied), tied):
        for log_probs, entropies in differences:
            assert log_probs < OF_FLOAT32
            assert entropies < 1e-12
