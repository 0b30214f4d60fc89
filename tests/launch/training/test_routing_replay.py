"""Runs with routing replay: the engine's experts in the trainer, from the engine's first token to the metrics."""

import pytest

from tests.support.ranks import Layout
from tests.support.recorded_training import LLAMA, flags
from tests.support.training_runs import LIVE, rows, run_training

EXPERTS = [*LLAMA, "--num-experts=8", "--moe-ffn-hidden-size=24", "--untie-embeddings-and-output-weights"]
QWEN3_MOE = [*EXPERTS, "--qk-layernorm", "--kv-channels=16"]
REPLAY = ["--moe-enable-routing-replay", "--moe-routing-replay-check-interval=1"]
RUN = [*LIVE, "--train-iters=2", "--rollout-is=token", "--rollout-rs=none", "--init-method-std=0.3"]
RUN += ["--rollout-check-tolerance=5"]


def last_rows(ranks, folder, layout, *more):
    arguments = flags(folder, *RUN, *more, *layout.flags(), model=QWEN3_MOE)
    arguments = [word for word in arguments if not word.startswith("--rollout-rs-threshold")]
    assert set(ranks.run(run_training, layout, arguments)) == {None}
    return rows(folder)


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        (Layout(pp=2), ["--grpo-iterations=2", "--rl-use-sequence-packing"]),
        (Layout(cp=2, dp=2, ep=2), ["--moe-token-dispatcher-type=alltoall"]),
        (Layout(tp=2, sp=True), ["--bypass-mode", "--loss-type=reinforce"]),
    ],
    ids=str,
)
def test_replay_takes_a_rounded_engines_choices(ranks, tmp_path, layout, more):
    """With fp8 weights in the engine, the routers would choose otherwise, and k3 is larger without replay."""
    results = last_rows(ranks, tmp_path, layout, *REPLAY, *more, "--rollout-dtype=fp8-e4m3")
    for row in results:
        assert 0.005 < row["routing/differing"] < 0.5
        assert row["routing/unknown"] == 0
        assert row["routing/k3"] < row["routing/k3_without"]
        assert {name for name in row if "_layer_" in name} == {f"routing/differing_layer_{layer}" for layer in (0, 1)}


def test_recorded_experts_train_as_the_sampled_ones_did(ranks, tmp_path):
    """The records hold the experts of every response; a run that reads them takes the same steps."""
    first = tmp_path / "first"
    again = tmp_path / "again"
    record = [f"--save-rollouts={tmp_path}/rollouts", "--rollout-dtype=fp8-e4m3"]
    written = last_rows(ranks, first, Layout(), *REPLAY, *record)
    read = last_rows(ranks, again, Layout(), *REPLAY, f"--load-rollouts={tmp_path}/rollouts")
    for one, other in zip(written, read, strict=True):
        for name in ("loss/total", "grad_norm", "routing/differing", "routing/k3", "routing/k3_without"):
            assert other[name] == pytest.approx(one[name], rel=1e-5, abs=1e-9), name
