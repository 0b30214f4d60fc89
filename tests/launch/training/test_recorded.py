"""Runs on recorded rollouts: the steps of the run that sampled them, and recordings that cannot serve."""

from dataclasses import replace

import pytest
import torch

from megatron_rc.records.rollout import load_rollouts, save_rollouts
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, save_initial
from tests.support.training_runs import LIVE, rows, run_training


@pytest.fixture
def record(ranks, tmp_path):
    """The file with the rollouts of a run of one step."""
    words = flags(tmp_path, *LIVE, "--train-iters=1", f"--save-rollouts={tmp_path}/rollouts")
    ranks.run(run_training, Layout(), words)
    (path,) = (tmp_path / "rollouts").glob("*.safetensors")
    return path


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


def test_recorded_rollouts_of_other_dtypes_reach_every_rank(ranks, tmp_path, record):
    """What other programs' records become may hold int32 ids and float64 log-probs."""
    batch = load_rollouts(record)
    kinds = {torch.int64: torch.int32, torch.int32: torch.int16, torch.float32: torch.float64}
    save_rollouts(replace(batch, **{n: v.to(kinds.get(v.dtype, v.dtype)) for n, v in batch.tensors().items()}), record)
    words = flags(tmp_path, *LIVE, "--train-iters=1", f"--load-rollouts={record.parent}")
    for layout in (Layout(tp=2), Layout(pp=2)):
        assert set(ranks.run(run_training, layout, [*words, *layout.flags()])) == {None}
        (row,) = rows(tmp_path)
        assert row["rollout/tokens"] == int(batch.response_mask.sum())
        assert row["reward/mean"] == pytest.approx(float(batch.rewards.mean()))


def test_recorded_rollouts_that_do_not_fit_are_named(ranks, tmp_path, record):
    def run(*more):
        words = flags(tmp_path, *LIVE, f"--load-rollouts={record.parent}", "--train-iters=1", *more)
        return ranks.run(run_training, Layout(), words)[0]

    assert "16 sequences, the flags ask for 32" in run("--grpo-prompts-per-step=8")
    assert "--seq-length 8 is too short: sample " in run("--seq-length=8", "--max-response-length=4")
    assert "--rl-default-temperature is 0.5: set it alike" in run("--rl-default-temperature=0.5")
    record.write_bytes(record.read_bytes()[:-20])
    assert "the rollout of step 0 failed: ValueError" in run()
