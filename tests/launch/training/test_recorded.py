"""Runs on recorded rollouts: the steps of the run that sampled them, and recordings that cannot serve."""

from dataclasses import replace

import pytest
import torch

from megatron_rc.records.rollout import load_rollouts, save_rollouts
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, save_initial
from tests.support.training_runs import LIVE, rows, run_training


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(pp=2)], ids=str)
def test_recorded_rollouts_train_as_the_sampled_ones_did(ranks, tmp_path, layout):
    """Written by one process, read by two; at float32's distance, since the layouts differ."""
    first, again = tmp_path / "first", tmp_path / "again"
    written = flags(first, *LIVE, "--train-iters=2", f"--save-rollouts={tmp_path}/rollouts")
    assert ranks.run(run_training, Layout(), written) == [None]
    assert len(list((tmp_path / "rollouts").glob("*.safetensors"))) == 2
    words = flags(again, *LIVE, "--train-iters=2", f"--load-rollouts={tmp_path}/rollouts", *layout.flags())
    # One seed gives each layout weights of its own: start from the same ones.
    start = [f"--load={tmp_path}/start", "--finetune"]
    ranks.run(save_initial, Layout(), flags(tmp_path, *LIVE, f"--save={tmp_path}/start"))
    assert set(ranks.run(run_training, layout, [*words, *start])) == {None}
    for one, other in zip(rows(first), rows(again), strict=True):
        for name in ("reward/mean", "rollout/tokens", "rollout_corr/kl", "loss/total"):
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name


def test_recorded_rollouts_of_other_dtypes_reach_every_rank(ranks, tmp_path):
    """What other programs' records become may hold int32 ids and float64 log-probs."""
    folder = tmp_path / "rollouts"
    ranks.run(run_training, Layout(), flags(tmp_path, *LIVE, "--train-iters=1", f"--save-rollouts={folder}"))
    (path,) = folder.glob("*.safetensors")
    batch = load_rollouts(path)
    kinds = {torch.int64: torch.int32, torch.int32: torch.int16, torch.float32: torch.float64}
    save_rollouts(replace(batch, **{n: v.to(kinds.get(v.dtype, v.dtype)) for n, v in batch.tensors().items()}), path)
    words = flags(tmp_path, *LIVE, "--train-iters=1", f"--load-rollouts={folder}")
    for layout in (Layout(tp=2), Layout(pp=2)):
        assert set(ranks.run(run_training, layout, [*words, *layout.flags()])) == {None}
        (row,) = rows(tmp_path)
        assert row["rollout/tokens"] == int(batch.response_mask.sum())
        assert row["reward/mean"] == pytest.approx(float(batch.rewards.mean()))


def test_recorded_rollouts_that_do_not_fit_are_named(ranks, tmp_path):
    folder = tmp_path / "rollouts"
    ranks.run(run_training, Layout(), flags(tmp_path, *LIVE, "--train-iters=1", f"--save-rollouts={folder}"))
    (path,) = folder.glob("*.safetensors")

    def run(*more):
        (message,) = ranks.run(run_training, Layout(), flags(tmp_path, *LIVE, f"--load-rollouts={folder}", *more))
        return message

    assert "16 sequences, the flags ask for 32" in run("--train-iters=1", "--grpo-prompts-per-step=8")
    assert "--seq-length 8 is too short: sample " in run("--train-iters=1", "--seq-length=8", "--max-response-length=4")
    assert "--rl-default-temperature is 0.5: set it alike" in run("--train-iters=1", "--rl-default-temperature=0.5")
    path.write_bytes(path.read_bytes()[:-20])
    assert "the rollout of step 0 failed: ValueError" in run("--train-iters=1")
