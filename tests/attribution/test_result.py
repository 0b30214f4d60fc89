"""Layers, kinds and experts of parameters, and the views and metrics of an attribution."""

import pytest

from megatron_rc.attribution import Attribution
from megatron_rc.attribution.names import model_order, place_of

PLACES = {
    "embedding.word_embeddings.weight": (None, "embedding", None),
    "embedding.position_embeddings.weight": (None, "embedding", None),
    "decoder.layers.11.input_layernorm.weight": (11, "norms", None),
    "decoder.layers.2.self_attention.linear_qkv.weight": (2, "attention", None),
    "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight": (2, "norms", None),
    "decoder.layers.2.self_attention.q_layernorm.weight": (2, "norms", None),
    "decoder.layers.2.self_attention.linear_kv_down_proj.weight": (2, "attention", None),
    "decoder.layers.2.mlp.linear_fc1.weight": (2, "mlp", None),
    "decoder.layers.2.mlp.router.weight": (2, "router", None),
    "decoder.layers.2.mlp.experts.local_experts.13.linear_fc2.weight": (2, "experts", 13),
    "decoder.layers.2.mlp.experts.linear_fc1.weight7": (2, "experts", 7),
    "decoder.layers.2.mlp.shared_experts.linear_fc1.weight": (2, "mlp", None),
    "decoder.layers.4.mixer.in_proj.weight": (4, "other", None),
    "decoder.final_layernorm.weight": (None, "norms", None),
    "output_layer.weight": (None, "head", None),
    "model.embed_tokens.weight": (None, "embedding", None),
    "model.layers.10.self_attn.k_proj.weight": (10, "attention", None),
    "model.layers.10.post_attention_layernorm.weight": (10, "norms", None),
    "model.layers.10.mlp.gate_proj.weight": (10, "mlp", None),
    "model.layers.10.mlp.gate.weight": (10, "router", None),
    "model.layers.10.mlp.experts.3.up_proj.weight": (10, "experts", 3),
    "model.layers.10.mlp.experts.gate_up_proj": (10, "experts", None),
    "model.layers.10.block_sparse_moe.gate.weight": (10, "router", None),
    "model.layers.10.block_sparse_moe.experts.0.w1.weight": (10, "experts", 0),
    "model.norm.weight": (None, "norms", None),
    "lm_head.weight": (None, "head", None),
    "transformer.wte.weight": (None, "embedding", None),
    "transformer.wpe.weight": (None, "embedding", None),
    "transformer.h.3.ln_1.weight": (3, "norms", None),
    "transformer.h.3.attn.c_attn.weight": (3, "attention", None),
    "transformer.h.3.mlp.c_fc.weight": (3, "mlp", None),
    "transformer.ln_f.weight": (None, "norms", None),
    "of_another_program": (None, "other", None),
}


@pytest.mark.parametrize("name", PLACES)
def test_the_place_of_a_parameter(name):
    assert place_of(name) == PLACES[name]


def test_names_in_the_order_of_the_model():
    names = [
        "embedding.word_embeddings.weight",
        "decoder.layers.2.mlp.experts.local_experts.2.linear_fc1.weight",
        "decoder.layers.2.mlp.experts.local_experts.10.linear_fc1.weight",
        "decoder.layers.10.mlp.linear_fc1.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    ]
    assert sorted(reversed(names), key=model_order) == names


RESULT = Attribution(
    parts={
        "model.embed_tokens.weight": 1.0,
        "model.layers.0.self_attn.q_proj.weight": 2.0,
        "model.layers.0.mlp.experts.0.up_proj.weight": 0.5,
        "model.layers.0.mlp.experts.0.down_proj.weight": 0.25,
        "model.layers.1.self_attn.q_proj.weight": -1.5,
        "model.layers.1.mlp.experts.0.up_proj.weight": 3.0,
    },
    measured=10.0,
    of_weights=5.0,
)


def test_views_are_sums_of_parts():
    assert RESULT.total == 5.25
    assert RESULT.by_layer() == {0: 2.75, 1: 1.5}
    assert RESULT.by_kind() == {"embedding": 1.0, "attention": 0.5, "experts": 3.75}
    assert RESULT.by_expert() == {(0, 0): 0.75, (1, 0): 3.0}
    assert RESULT.by_layer_and_kind()[1, "attention"] == -1.5
    assert sum(RESULT.by_layer_and_kind().values()) == RESULT.total
    assert RESULT.largest(2) == [
        ("model.layers.1.mlp.experts.0.up_proj.weight", 0.3),
        ("model.layers.0.self_attn.q_proj.weight", 0.2),
    ]


def test_metrics_are_shares_of_the_measured_sum():
    metrics = RESULT.metrics()
    assert metrics == {
        "attribution/explained": 0.525,
        "attribution/rest": 0.475,
        "attribution/completeness": 1.05,
        "attribution/layer_0": 0.275,
        "attribution/layer_1": 0.15,
        "attribution/embedding": 0.1,
        "attribution/attention": 0.05,
        "attribution/experts": 0.375,
    }
    kinds = [value for name, value in metrics.items() if name.rpartition("/")[2] in RESULT.by_kind()]
    assert sum(kinds) + metrics["attribution/rest"] == pytest.approx(1)


def test_the_largest_excess_has_either_sign_and_leaves_out_weights_as_intended():
    result = Attribution(parts=dict.fromkeys("abc", 1.0), measured=4.0, excess={"a": 0.5, "b": 0.0, "c": -2.0})
    assert result.largest_excess() == [("c", -0.5), ("a", 0.125)]
    assert result.largest_excess(1) == [("c", -0.5)]
    assert RESULT.largest_excess() == []


def test_the_metrics_have_the_excess_of_layers_and_of_kinds_outside_of_them():
    excess = {
        "model.embed_tokens.weight": -0.5,
        "model.layers.0.self_attn.q_proj.weight": 0.25,
        "model.layers.0.mlp.up_proj.weight": -0.75,
        "model.layers.1.mlp.up_proj.weight": 0.0,
    }
    metrics = Attribution(parts=dict.fromkeys(excess, 1.0), measured=4.0, excess=excess).metrics()
    of_excess = {name: share for name, share in metrics.items() if "excess" in name}
    assert of_excess == {
        "attribution/excess": 0.375,
        "attribution/excess_embedding": 0.125,
        "attribution/excess_layer_0": 0.25,
    }
    as_intended = Attribution(parts=dict.fromkeys(excess, 1.0), measured=4.0, excess=dict.fromkeys(excess, 0.0))
    assert as_intended.metrics()["attribution/excess"] == 0
    assert "attribution/excess" not in RESULT.metrics()


def test_nothing_measured_is_no_division_by_zero():
    nothing = Attribution(parts={"lm_head.weight": 0.0}, measured=0.0)
    assert nothing.metrics() == {"attribution/explained": 0.0, "attribution/rest": 0.0, "attribution/head": 0.0}
    assert nothing.completeness is None
