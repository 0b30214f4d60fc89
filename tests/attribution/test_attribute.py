"""Attribution in one process: exact parts, complete sums, planted faults, and weights that are back afterwards.

The model is a small Llama of ``transformers`` that has learned to count, so that its log-probs lie far apart.
"""

import copy
import functools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.attribution import ROUNDINGS, int4_per_channel
from megatron_rc.attribution import (
    Shard,
    attribute,
    bf16,
    fp8_per_channel,
    quantized,
    shards_of,
)
from megatron_rc.attribution.midpoint import gauss_legendre
from megatron_rc.attribution.quantization import INT8_MAX
from tests.support import training_oracle
from tests.support.paths import ROOT
from tests.test_site import blocks

VOCABULARY = 48
LENGTH = 20
# One node is too few for int4.
FINE = [name for name in ROUNDINGS if not name.startswith("int4")]


def counting(rows, seed):
    """Rows that count on by a step of their own, with some tokens at random."""
    generator = torch.Generator().manual_seed(seed)
    start, step = (torch.randint(1, 7, (rows, 1), generator=generator) for _ in range(2))
    tokens = (start + step * torch.arange(LENGTH)) % VOCABULARY
    noise = torch.randint(0, VOCABULARY, tokens.shape, generator=generator)
    return torch.where(torch.rand(tokens.shape, generator=generator) < 0.1, noise, tokens)


@functools.cache
def trained():
    """The model after a few dozen steps, and after some more."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    earlier = None
    for step in range(60):
        if step == 40:
            earlier = weights_of(model)
            for group in optimizer.param_groups:
                group["lr"] = 1e-4
        tokens = counting(16, step)
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    return model.eval(), earlier


def weights_of(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


class Batch:
    """Tokens, the mask of those that train, and log-probs of a model."""

    def __init__(self, seed=100):
        self.tokens = counting(12, seed)
        self.mask = torch.rand(12, LENGTH - 1, generator=torch.Generator().manual_seed(seed)) < 0.7

    def score(self, model):
        log_probs = model(self.tokens).logits[:, :-1].log_softmax(-1)
        return torch.where(self.mask, log_probs.gather(2, self.tokens[:, 1:].unsqueeze(2)).squeeze(2), 0.0)

    @torch.no_grad()
    def score_of(self, model, weights):
        other = copy.deepcopy(model)
        other.load_state_dict(weights, strict=False)
        return self.score(other)

    def attribute(self, model, engine, *, rollout=None, **more):
        """The attribution, with Δ_t of the same kernels for its completeness."""
        with torch.no_grad():
            train = self.score(model)
        weights = engine if isinstance(engine, dict) else {n: engine(n, w) for n, w in weights_of(model).items()}
        exact = self.score_of(model, weights)
        return attribute(
            shards_of(model),
            engine,
            lambda coefficients: (coefficients * self.score(model)).sum().backward(),
            train - (exact if rollout is None else rollout),
            differences_of_weights=lambda: train - exact,
            **more,
        )


class Exact:
    """A model in float64 throughout, the reference of the project's tests, with an engine that is a random step away.

    ``transformers`` computes norms in float32.
    """

    def __init__(self):
        self.trainer = {name: weight.double() for name, weight in training_oracle.make_weights(1).items()}
        self.engine = training_oracle.moved(self.trainer, 7, 0.002)
        self.middle = {name: (self.trainer[name] + self.engine[name]) / 2 for name in self.trainer}
        self.tokens = torch.randint(0, training_oracle.VOCABULARY, (3, 10), generator=torch.Generator().manual_seed(0))

    def score(self, weights):
        return training_oracle.score(weights, self.tokens)[0]

    def differences(self, engine=None):
        return self.score(self.trainer) - self.score(self.engine if engine is None else engine)

    def attribute(self, engine=None, **more):
        engine = self.engine if engine is None else engine
        parameters = {name: torch.nn.Parameter(weight.clone()) for name, weight in self.trainer.items()}
        return attribute(
            [Shard(name, parameter) for name, parameter in parameters.items()],
            engine,
            lambda coefficients: (coefficients * self.score(parameters)).sum().backward(),
            self.differences(engine),
            **more,
        )


@pytest.fixture(scope="module")
def exact():
    return Exact()


# Exactness


def test_parts_are_autograd_of_each_parameter_alone(exact):
    result = exact.attribute()
    differences = exact.differences()
    for name, part in result.parts.items():
        weight = exact.middle[name].clone().requires_grad_()
        (gradient,) = torch.autograd.grad((differences * exact.score(exact.middle | {name: weight})).sum(), weight)
        alone = float((gradient * (exact.trainer[name] - exact.engine[name])).sum())
        assert part == pytest.approx(alone, rel=1e-9, abs=1e-12), name


def test_the_excess_is_autograd_along_the_distance_to_the_intended_weights(exact):
    intended = training_oracle.moved(exact.engine, 9, 0.001)
    same = next(iter(intended))
    intended[same] = exact.engine[same]
    result = exact.attribute(intended_weights=intended, nodes=2)
    assert result.parts == exact.attribute(nodes=2).parts

    expected = dict.fromkeys(intended, 0.0)
    for position in ((1 - 3**-0.5) / 2, (1 + 3**-0.5) / 2):
        weights = {name: torch.lerp(exact.engine[name], exact.trainer[name], position) for name in exact.trainer}
        for weight in weights.values():
            weight.requires_grad_()
        total = (exact.differences() * exact.score(weights)).sum()
        gradients = torch.autograd.grad(total, list(weights.values()))
        for name, gradient in zip(weights, gradients, strict=True):
            expected[name] += float((gradient * (intended[name] - exact.engine[name])).sum()) / 2
    for name, excess in result.excess.items():
        assert excess == pytest.approx(expected[name], rel=1e-9, abs=1e-12), name
    assert result.excess[same] == 0
    assert exact.attribute().excess is None


def test_what_is_missing_falls_with_the_fourth_power_of_the_difference(exact):
    """The midpoint leaves the third order of Δ_t, times D_t."""
    missing = []
    for factor in (2.0, 1.0):
        nearer = {name: weight + factor * (exact.engine[name] - weight) for name, weight in exact.trainer.items()}
        result = exact.attribute(nearer)
        missing.append(abs(result.measured - result.total))
    assert missing[0] / missing[1] == pytest.approx(16, rel=0.3)


def test_signed_parts_add_up_to_the_signed_sum(exact):
    result = exact.attribute(signed=True)
    differences = exact.differences()
    assert result.measured == pytest.approx(float(differences.sum()), rel=1e-9)
    assert result.total == pytest.approx(result.measured, abs=0.01 * float(differences.abs().sum()))


def test_equal_weights_have_no_part():
    """All of the mismatch is then the kernels'."""
    model, _ = trained()
    batch = Batch()
    rollout = batch.score_of(model, weights_of(model)) - 0.01 * batch.mask
    result = batch.attribute(model, lambda name, weight: weight, rollout=rollout)
    assert set(result.parts.values()) == {0.0}
    assert result.explained == 0
    assert result.rest == 1
    assert result.completeness == 0
    assert result.measured == pytest.approx(1e-4 * int(batch.mask.sum()), rel=1e-3)


def test_the_example_of_the_page_runs(capsys):
    (block,) = blocks(ROOT / "docs" / "attribution.md", "python")
    torch.manual_seed(0)
    results = {}
    exec(compile(block, "docs/attribution.md", "exec"), results)
    assert results["result"].explained == pytest.approx(1, abs=0.01)
    assert "0.weight" in capsys.readouterr().out


# Completeness


@pytest.mark.parametrize("name", FINE)
def test_parts_add_up_to_the_measured_sum(name):
    model, _ = trained()
    result = Batch().attribute(model, quantized(weights_of(model), ROUNDINGS[name]))
    assert result.measured > 0
    assert result.explained == pytest.approx(1, abs=0.02)
    assert result.completeness == pytest.approx(1, abs=0.02)


def test_a_gross_error_needs_three_nodes():
    model, _ = trained()
    engine = quantized(weights_of(model), bf16)
    for name in engine:
        if name.startswith("model.layers.1."):
            engine[name] = engine[name.replace(".1.", ".2.")]
    completeness = [Batch().attribute(model, engine, nodes=nodes).completeness for nodes in (1, 2, 3)]
    errors = [abs(each - 1) for each in completeness]
    assert errors[0] > 0.2
    assert errors[2] < 0.02


@pytest.mark.parametrize("nodes", [1, 2, 3, 8])
def test_nodes_are_exact_for_polynomials(nodes):
    """Of a degree below twice the number of nodes; one node is exactly the midpoint."""
    points = gauss_legendre(nodes)
    for degree in range(2 * nodes):
        assert sum(weight * position**degree for position, weight in points) == pytest.approx(1 / (degree + 1))
    assert sum(weight * position ** (2 * nodes) for position, weight in points) != pytest.approx(
        1 / (2 * nodes + 1), rel=1e-12
    )
    assert gauss_legendre(1) == [(0.5, 1.0)]


def test_kernels_are_the_rest():
    """Of an engine with weights and kernels in bf16, the parts are the weights' alone."""
    model, _ = trained()
    batch = Batch()
    engine = quantized(weights_of(model), bf16)
    half = copy.deepcopy(model)
    half.load_state_dict(engine, strict=False)
    with torch.no_grad():
        rollout = batch.score(half.bfloat16()).float()
    result = batch.attribute(model, engine, rollout=rollout)
    assert result.completeness == pytest.approx(1, abs=0.02)
    assert result.explained + result.rest == pytest.approx(1)
    assert abs(result.rest) > 0.05


# Planted faults


# Names alone, because collecting the tests should not train a model.
FAULTS = (
    "one projection in int4",
    "one layer 20 steps old",
    "two layers exchanged",
    "a scale off by 5 %",
    "embedding in 8 bits",
)


def faults():
    """By name: (the parameters at fault, the engine's weights before it rounds, the nodes that it needs)."""
    model, earlier = trained()
    weights = weights_of(model)
    layer = "model.layers.{}."
    gate, out = (layer.format(2) + name for name in ("mlp.gate_proj.weight", "self_attn.o_proj.weight"))

    def of_layer(number):
        return [name for name in weights if name.startswith(layer.format(number))]

    def exchanged():
        return {name: weights[name.replace(".1.", ".2.")] for name in of_layer(1)} | {
            name: weights[name.replace(".2.", ".1.")] for name in of_layer(2)
        }

    embedding = "model.embed_tokens.weight"
    largest = weights[embedding].abs().amax()
    return {
        "one projection in int4": ([gate], {gate: int4_per_channel(weights[gate])}, 1),
        "one layer 20 steps old": (of_layer(1), {name: earlier[name] for name in of_layer(1)}, 1),
        "two layers exchanged": ([*of_layer(1), *of_layer(2)], exchanged(), 3),
        "a scale off by 5 %": ([out], {out: 1.05 * weights[out]}, 1),
        "embedding in 8 bits": (
            [embedding],
            {embedding: (weights[embedding] / largest * INT8_MAX).round() * largest / INT8_MAX},
            1,
        ),
    }


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_first_in_the_list(fault):
    model, _ = trained()
    names, wrong, nodes = faults()[fault]
    engine = quantized(weights_of(model) | wrong, bf16)
    result = Batch().attribute(model, engine, nodes=nodes)
    first, share = result.largest(1)[0]
    assert first in names
    assert sum(result.share(result.parts[name]) for name in names) > 0.5
    assert share > 0


@pytest.mark.parametrize("fault", FAULTS)
def test_beside_fp8_a_planted_fault_is_all_of_the_excess(fault):
    """Of the parts, fp8's own rounding has most."""
    model, _ = trained()
    weights = weights_of(model)
    names, wrong, nodes = faults()[fault]
    engine = quantized(weights | wrong, fp8_per_channel)
    intended = quantized(weights, fp8_per_channel)
    result = Batch().attribute(model, engine, nodes=nodes, intended_weights=intended)
    assert {name for name, _ in result.largest_excess(len(weights))} <= set(names)
    assert result.largest_excess(1)


def test_an_engine_as_intended_has_no_excess():
    model, _ = trained()
    result = Batch().attribute(
        model, quantized(weights_of(model), bf16), intended_weights=lambda _, weight: bf16(weight)
    )
    assert set(result.excess.values()) == {0.0}
    assert result.largest_excess() == []


def test_a_lora_update_that_bf16_rounds_away_is_all_of_the_mismatch():
    """The base weights are bfloat16, as published ones are; only the merged projection differs."""
    model = copy.deepcopy(trained()[0])
    merged = "model.layers.2.self_attn.o_proj.weight"
    base = quantized(weights_of(model), bf16)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(64, 1, generator=generator) for _ in range(2))
    update = left @ right.T * base[merged].abs().mean() * 2**-10
    model.load_state_dict(base | {merged: base[merged] + update}, strict=False)

    engine = quantized(weights_of(model), bf16)
    assert (engine[merged] == base[merged]).float().mean() > 0.5
    result = Batch().attribute(model, engine)
    assert {name for name, part in result.parts.items() if part} == {merged}
    assert result.explained == pytest.approx(1, abs=0.02)


# Weights and gradients are back


class BrokenError(Exception):
    pass


def test_weights_and_gradients_are_back_after_an_exception():
    model = copy.deepcopy(trained()[0])
    batch = Batch()
    batch.score(model).sum().backward()
    weights = weights_of(model)
    gradients = {name: weight.grad for name, weight in model.named_parameters()}

    def broken(coefficients):
        assert not torch.equal(next(model.parameters()), next(iter(weights.values())))
        batch.score(model).sum().backward()
        raise BrokenError

    with pytest.raises(BrokenError):
        attribute(shards_of(model), lambda name, weight: 1.5 * weight, broken, torch.ones(1))
    for name, weight in model.named_parameters():
        assert torch.equal(weight, weights[name])
        assert weight.grad is gradients[name]


def test_no_gradient_is_left_and_the_bits_of_half_weights_are_back():
    """Also those of weights whose midpoint is no bfloat16."""
    model = copy.deepcopy(trained()[0]).bfloat16()
    weights = weights_of(model)
    engine = {name: weight.float() * (1 + 2**-9) for name, weight in weights.items()}
    Batch().attribute(model, engine, nodes=3)
    for name, weight in model.named_parameters():
        assert weight.grad is None
        assert torch.equal(weight.view(torch.int16), weights[name].view(torch.int16))


def test_a_gradient_of_zero_is_no_error_and_a_frozen_parameter_that_differs_is():
    used, unused, frozen = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
    frozen.requires_grad_(False)
    shards = [Shard("used", used), Shard("unused", unused), Shard("frozen", frozen)]

    def backward(coefficients):
        (coefficients * (used + frozen)).sum().backward()

    engine = {"used": torch.zeros(3), "unused": torch.zeros(3), "frozen": torch.ones(3)}
    result = attribute(shards, engine, backward, torch.ones(3))
    assert result.parts == {"frozen": 0.0, "unused": 0.0, "used": 3.0}
    with pytest.raises(ValueError, match=r"frozen .*requires_grad"):
        attribute(shards, engine | {"frozen": torch.zeros(3)}, backward, torch.ones(3))


@pytest.mark.parametrize(
    ("engine", "more", "match"),
    [
        ({}, {}, "engine_weights has no w"),
        ({"w": torch.zeros(2)}, {}, r"w is \(2,\), the trainer's \(3,\)"),
        ({"w": torch.zeros(3)}, {"nodes": 0}, "nodes is 0"),
        ({"w": torch.zeros(3)}, {"intended_weights": {}}, "intended_weights has no w"),
    ],
)
def test_wrong_arguments_are_told(engine, more, match):
    weight = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=match):
        attribute([Shard("w", weight)], engine, lambda a: (a * weight).sum().backward(), torch.ones(3), **more)
    assert torch.equal(weight, torch.ones(3))
