"""Runs on recorded rollouts of other dtypes, and recordings that cannot serve."""

from dataclasses import replace

import pytest
import torch

from megatron_rc.launch.rollouts.recorded import write_rollouts
from megatron_rc.records.rollout import load_rollouts, save_rollouts
from tests.support.ranks import Layout, RankFailure
from tests.support.recorded_training import flags, recorded_batch
from tests.support.training_runs import LIVE, rows, run_training


@pytest.fixture
def record(tmp_path):
    write_rollouts(recorded_batch(0), tmp_path / "rollouts", 0, 0)
    (path,) = (tmp_path / "rollouts").glob("*.safetensors")
    return path


def test_recorded_rollouts_of_other_dtypes_reach_every_rank(ranks, tmp_path, record):
    """What other programs' records become may hold int32 ids and float64 log-probs."""
    batch = load_rollouts(record)
    kinds = {torch.int64: torch.int32, torch.int32: torch.int16, torch.float32: torch.float64}
    save_rollouts(replace(batch, **{n: v.to(kinds.get(v.dtype, v.dtype)) for n, v in batch.tensors().items()}), record)
    arguments = flags(tmp_path, *LIVE, "--train-iters=1", f"--load-rollouts={record.parent}")
    assert set(ranks.run(run_training, Layout(pp=2), [*arguments, *Layout(pp=2).flags()])) == {None}
    (row,) = rows(tmp_path)
    assert row["rollout/tokens"] == int(batch.response_mask.sum())
    assert row["reward/mean"] == pytest.approx(float(batch.rewards.mean()))


def test_recorded_rollouts_that_do_not_fit_are_named(ranks, tmp_path, record):
    def refuse(message, *more):
        arguments = flags(tmp_path, *LIVE, f"--load-rollouts={record.parent}", "--train-iters=1", *more)
        with pytest.raises(RankFailure, match=message):
            ranks.run(run_training, Layout(), arguments)

    refuse("16 sequences, the flags ask for 32", "--grpo-prompts-per-step=8")
    refuse("--seq-length 8 is too short: sample ", "--seq-length=8", "--max-response-length=4")
    refuse(r"--rl-default-temperature is 0\.5: set it alike", "--rl-default-temperature=0.5")
    record.write_bytes(record.read_bytes()[:-20])
    refuse(r"the rollout of step 0 failed: ValueError: .*\.safetensors is cut off, damaged")
