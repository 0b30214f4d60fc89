"""Runs of several turns: equal weights give equal log-probs at every sampled token, in every layout."""

import json

import pytest

from megatron_rc.launch.rollouts.recorded import find_rollouts
from megatron_rc.records.rollout import RolloutBatch, load_rollouts
from tests.support.ranks import Layout
from tests.support.recorded_training import LLAMA, flags
from tests.support.training_runs import LIVE, agreed, rows, run_training

RUN = [*LIVE, "--train-iters=2", "--init-method-std=0.3", "--rollout-dtype=fp32", "--seq-length=36"]
RUN += ["--max-turns=3", "--max-response-length=8", "--reply=python:tests.support.user_replies:again"]
RUN += ["--reward=python:tests.support.user_rewards:length"]
RUN += ["--rollout-is=turn", "--rollout-rs=turn_mean_k3", "--rollout-rs-threshold=0.2", "--reward-workers=1"]
RUN += ["--grpo-kl-beta=0"]
EXPERTS = ["--num-experts=4", "--moe-ffn-hidden-size=24", "--qk-layernorm", "--moe-enable-routing-replay"]
EXPERTS += ["--moe-routing-replay-check-interval=1"]


def trained(ranks, folder, layout, *more, model=LLAMA):
    arguments = flags(folder, *RUN, *more, *layout.flags(), model=model)
    return agreed(ranks.run(run_training, layout, arguments)), rows(folder)


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        (Layout(pp=2), ["--rollout-top-p=0.95", "--init-method-std=0.1", *EXPERTS]),
        (Layout(cp=2, dp=2), ["--rl-use-sequence-packing", "--rollout-staleness=1"]),
    ],
    ids=["kept tokens and experts", "packed"],
)
def test_equal_weights_give_equal_log_probs(ranks, tmp_path, layout, more):
    record = f"--save-rollouts={tmp_path}/records"
    error, results = trained(ranks, tmp_path, layout, *more, record)
    assert error is None
    batch = RolloutBatch.concatenate([load_rollouts(path) for path in find_rollouts(tmp_path / "records")[0]])
    turns = batch.turn_ids
    assert turns.max() >= 1
    assert not batch.response_mask[turns.cummax(dim=1).values > turns].any(), "observations stand between turns"
    first, second = results
    assert first["rollout/turns"] == (turns.amax(dim=1) + 1).float().mean()
    for turn in range(int(turns.max()) + 1):
        share = float((turns == turn).sum() / (turns >= 0).sum())
        assert first[f"rollout_corr/turn_{turn}_token_fraction"] == pytest.approx(share)
    assert first["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-3)
    assert first["rollout_corr/rollout_rs_turn_mean_k3_masked_fraction"] == 0
    assert first.get("routing/k3", 0) < 1e-6
    assert first["rollout/sync_error"] < 1e-4
    assert second["grad_norm"] > 0


def test_recorded_turns_train_alike_in_every_layout(ranks, tmp_path):
    """Turns are cut by context parallelism and by packing; the criterion on turns rejects some."""
    record = f"--save-rollouts={tmp_path}/records"
    load = f"--load-rollouts={tmp_path}/records"
    trained(ranks, tmp_path / "first", Layout(), record, "--rollout-dtype=fp8-e4m3")
    only = ["--max-turns", "--reply", "--rollout-dtype", "--reward", "--run-name"]
    results = []
    for layout in (Layout(), Layout(cp=2)):
        arguments = [word for word in RUN if not word.startswith(tuple(only))]
        arguments += ["--run-name=run", "--rollout-rs-threshold=5e-3", load, *layout.flags()]
        arguments += ["--rl-use-sequence-packing"] * (layout.cp > 1)
        assert agreed(ranks.run(run_training, layout, flags(tmp_path / str(layout), *arguments))) is None
        results.append(rows(tmp_path / str(layout)))
    for one, other in zip(*results, strict=True):
        assert 0 < one["rollout_corr/rollout_rs_turn_mean_k3_masked_fraction"] < 1
        for name in ("grad_norm", "rollout/turns", *(name for name in one if name.startswith("rollout_corr/"))):
            # χ² is a mean of squares near 1, minus 1: it has the error of that mean.
            nearest = 1e-5 if "chi2" in name else 1e-6
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=nearest), name


def test_a_reply_that_dies_costs_its_sample_on_all_ranks(ranks, tmp_path):
    layout = Layout(dp=2)
    more = ["--reply=python:tests.support.user_replies:dies_of_two", "--reward-timeout=20"]
    error, results = trained(ranks, tmp_path, layout, *more)
    assert error is None
    lines = [json.loads(line) for line in (tmp_path / "run" / "reward-errors.jsonl").read_text().splitlines()]
    assert results[0]["reward/errors"] == sum(line["step"] == 0 for line in lines) > 0
    assert {line["error"] for line in lines} <= {"raised SystemExit: 4", "ended its process with exit code 3"}
    assert all(row["grad_norm"] > 0 for row in results)
