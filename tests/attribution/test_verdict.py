"""The sentence about an attribution: the layers that carry half, or that the weights do not explain it."""

import json

import pytest

from megatron_rc.attribution import Attribution
from megatron_rc.attribution.verdict import carriers, where_in_words
from megatron_rc.doctor.__main__ import main
from tests.support.commands import code_of


def metrics_of(shares, *, explained, of_weights=None):
    """Metrics of an attribution with these shares by layer; what is left of ``explained`` is the embedding's."""
    parts = {f"model.layers.{layer}.mlp.up_proj.weight": share for layer, share in shares.items()}
    parts["model.embed_tokens.weight"] = explained - sum(shares.values())
    return Attribution(parts, measured=1.0, of_weights=of_weights).metrics()


def test_the_fewest_layers_that_carry_half_are_named():
    metrics = metrics_of({0: 0.05, 1: 0.3, 2: 0.25, 3: 0.2, 10: 0.15}, explained=1.0)
    assert carriers(metrics) == ["layer 1 (30%)", "layer 2 (25%)"]
    assert "layer 1 (30%), layer 2 (25%);" in where_in_words(metrics)


def test_what_lies_outside_of_the_layers_is_named_too():
    assert carriers(metrics_of({0: 0.2, 1: 0.2}, explained=1.0)) == ["the embedding (60%)"]


def test_a_spread_mismatch_says_how_many_more_there_are():
    sentence = where_in_words(metrics_of(dict.fromkeys(range(20), 0.0499), explained=1.0))
    assert sentence.count("layer ") == 6
    assert "and 5 more" in sentence


@pytest.mark.parametrize(("explained", "of_weights"), [(0.02, 0.021), (0.0, 0.0), (-0.3, -0.3)])
def test_weights_that_explain_little_are_not_named(explained, of_weights):
    sentence = where_in_words(metrics_of({0: explained}, explained=explained, of_weights=of_weights))
    assert "the weights do not explain it" in sentence
    assert "layer" not in sentence


def test_parts_that_do_not_add_up_ask_for_more_nodes():
    sentence = where_in_words(metrics_of({0: 0.5}, explained=0.5, of_weights=1.0))
    assert "completeness 0.50" in sentence
    assert "--attribution-nodes" in sentence


def test_weights_that_are_not_as_intended_come_first():
    """However small their share beside the rounding of all weights."""
    parts = {f"model.layers.{layer}.mlp.up_proj.weight": 0.25 for layer in range(4)}
    excess = dict.fromkeys(parts, 0.0) | {"model.layers.2.mlp.up_proj.weight": -0.003, "lm_head.weight": 0.001}
    sentence = where_in_words(Attribution(parts, measured=1.0, excess=excess).metrics())
    assert sentence.startswith(
        "the engine's weights are not the trainer's in its format in layer 2 (0.3 % of the mismatch), the head (0.1 % "
        "of the mismatch); half of the mismatch is in"
    )
    everywhere = {f"model.layers.{layer}.mlp.up_proj.weight": 1e-7 for layer in range(24)}
    sentence = where_in_words(Attribution(everywhere, measured=1.0, excess=everywhere).metrics())
    assert "and 18 more, or its format is not exactly the given one; " in sentence
    as_intended = Attribution(parts, measured=1.0, excess=dict.fromkeys(parts, 0.0)).metrics()
    assert where_in_words(as_intended).startswith("half of the mismatch is in")


def test_the_parts_of_a_cancelled_sum_may_miss_its_completeness():
    """The kernels' noise makes Σ D Δ small beside Σ D²: its quotient then means little."""
    assert "do not explain" in where_in_words(metrics_of({0: 0.01}, explained=0.01, of_weights=0.03))


def test_equal_log_probs_blame_neither_weights_nor_kernels():
    metrics = Attribution({"model.embed_tokens.weight": 0.0}, measured=0.0, of_weights=0.0).metrics()
    assert "no mismatch to explain" in where_in_words(metrics)


def test_without_an_attribution_there_is_no_sentence():
    assert where_in_words({"step": 3.0, "rollout_corr/k3_kl": 0.1}) is None


@pytest.mark.parametrize(("name", "said"), [("metrics.jsonl", "layer 7 (90%)"), ("without.jsonl", None)])
def test_the_doctor_says_it_of_the_newest_attribution_of_a_run(tmp_path, capsys, name, said):
    """Which is older than the steps that its other numbers come from."""
    rows = [{"step": step, "rollout_corr/kl": 0.001, "rollout_corr/k3_kl": 0.001} for step in range(1, 41)]
    if said is not None:
        rows[0] |= metrics_of({3: 0.9}, explained=1.0)
        rows[20] |= metrics_of({7: 0.9}, explained=1.0)
    path = tmp_path / name
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    assert code_of(main, path) == 0
    text = capsys.readouterr().out
    assert code_of(main, path, "--json") == 0
    sentence = json.loads(capsys.readouterr().out)["attribution"]
    if said is None:
        assert sentence is None
        assert "mismatch is in the weights" not in text
    else:
        assert said in sentence
        assert sentence in text
