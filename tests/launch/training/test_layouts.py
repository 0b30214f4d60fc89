"""The same recorded rollouts take the same optimizer steps, one after the other, under different parallel layouts.

One step in every layout, parameter by parameter, is the matrix's matter (``test_matrix.py``). Here: float32, one
checkpoint that every layout reads; loss differences are relative to Σ|m'wℓ|/G, since a loss may lie near zero. Later
steps are compared with SGD, whose steps are linear in the gradient, and loosely with Adam, whose first step divides
each gradient by its own size and so amplifies rounding.
"""

import functools

import pytest

from tests.support.ranks import Layout
from tests.support.recorded_training import GPT2, LLAMA, flags, save_initial, train_recorded

MODELS = {"llama": LLAMA, "gpt2": GPT2, "untied": [*LLAMA, "--untie-embeddings-and-output-weights"]}
SINGLE = Layout()
BATCHES = 2
# Two micro-batches of a batch.
CUT = ["--micro-batch-size=8"]
# A reference policy and an entropy bonus.
TERMS = ("--grpo-kl-beta=0.1", "--grpo-entropy-term-weight=0.05")
SAME = ("rollout_corr/kl", "rollout_corr/rollout_is_eff_sample_size", "rollout_corr/rollout_rs_masked_fraction")


@pytest.fixture(scope="module")
def start(ranks, tmp_path_factory):
    """The steps that flags make from one checkpoint of their model, in a layout."""
    folder = tmp_path_factory.mktemp("layouts")
    for name, model in MODELS.items():
        ranks.run(save_initial, SINGLE, flags(folder, f"--save={folder}/{name}", model=model))

    @functools.cache
    def steps(*more: str, model: str = "llama", layout: Layout = SINGLE, batches: int = BATCHES):
        load = [f"--load={folder}/{model}", "--finetune"]
        arguments = flags(folder, *load, *CUT, *more, *layout.flags(), model=MODELS[model])
        return ranks.run(train_recorded, layout, arguments, batches)

    return steps


def assert_same(got, expected, tolerances):
    """Every rank's steps against the single process's; the first on a batch scores as the forward-only pass did."""
    for rank in got:
        assert [step.get("policy/noise_floor") for step in rank] == [0, None] * (len(tolerances) // 2)
    for step, (want, tolerance) in enumerate(zip(expected[0][: len(tolerances)], tolerances, strict=True)):
        tokens = want["rollout_corr/num_tokens"] * (1 - want["rollout_corr/rollout_rs_masked_fraction"])
        size = sum(rank[step]["size"] for rank in got) / tokens
        assert size == pytest.approx(want["size"] / tokens, rel=1e-4), "the layout saw other tokens"
        for rank in got:
            assert abs(rank[step]["loss/total"] - want["loss/total"]) <= tolerance * size, f"loss at step {step + 1}"
            assert rank[step]["grad_norm"] == pytest.approx(want["grad_norm"], rel=tolerance), f"step {step + 1}"
            for name in SAME:
                assert rank[step][name] == pytest.approx(want[name], rel=10 * tolerance, abs=1e-7), name


def test_sgd_takes_the_same_steps(start):
    """In a layout of every dimension, with activations that are computed again."""
    more = ["--optimizer=sgd", "--sgd-momentum=0.5"]
    full = ["--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1"]
    got = start(*more, *full, layout=Layout(tp=2, pp=2, cp=2, sp=True))
    assert_same(got, start(*more), [1e-5, 1e-5, 1e-5, 1e-5])


def test_adam_takes_the_same_steps(start):
    more = ["--lr=1e-3", "--grpo-kl-beta=0"]
    got = start(*more, "--use-distributed-optimizer", layout=Layout(cp=2, dp=2))
    assert_same(got, start(*more), [1e-5, 1e-3, 1e-3, 1e-3])


def test_gpt2_with_penalties_takes_the_same_steps(start):
    """Learned positions of packed sequences that are cut over CP ranks."""
    more = ["--optimizer=sgd", *TERMS, "--ppo-dual-clip=1.01"]
    layout = Layout(tp=2, cp=2, sp=True)
    got = start(*more, "--rl-use-sequence-packing", model="gpt2", layout=layout, batches=1)
    assert_same(got, start(*more, model="gpt2", batches=1), [1e-5] * 2)


@pytest.mark.parametrize(
    ("layout", "model", "more", "form"),
    [
        (Layout(tp=2, cp=2, sp=True), "llama", (), ("--rl-use-sequence-packing",)),
        (Layout(tp=2, pp=2, sp=True), "untied", TERMS, ()),
    ],
    ids=["tp2-cp2-sp-packed", "tp2-pp2-sp-untied"],
)
def test_log_probs_without_logits_take_the_same_steps(start, layout, model, more, form):
    more = ("--optimizer=sgd", "--sgd-momentum=0.5", *more)
    got = start(*more, "--fused-linear-log-probs", *form, model=model, layout=layout, batches=1)
    assert_same(got, start(*more, model=model), [1e-5] * 2)


def test_the_recorded_batches_are_not_vacuous(start):
    """Weights are truncated, tokens and sequences rejected, and the second pass over a batch clips on both sides."""
    steps = start("--optimizer=sgd", "--sgd-momentum=0.5")[0]
    for metrics in steps:
        assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] >= 0.1
        assert 0.1 < metrics["rollout_corr/rollout_rs_token_k1_masked_fraction"] < 0.5
        assert 0.1 < metrics["rollout_corr/rollout_rs_seq_mean_k3_masked_fraction"] < 0.8
    assert steps[0]["policy/approx_kl"] == 0, "the first pass scores with the weights that made log π_old"
    assert steps[1]["policy/clip_fraction_low"] >= 0.1
    assert steps[1]["policy/clip_fraction_high"] >= 0.1


def test_the_reference_policy_of_a_bfloat16_run_is_one_too(start):
    """Learned positions are made in float32: a LayerNorm takes no sum of them and bfloat16 embeddings."""
    metrics = start("--bf16", "--grpo-kl-beta=0.05", model="gpt2")[0]
    assert all(step["policy/reference_kl"] == step["policy/reference_kl"] for step in metrics)
    assert metrics[0]["policy/reference_kl"] == 0
