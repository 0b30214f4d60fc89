"""Rewards in a run: components and errors over all ranks, ends of runs, responses without an end."""

import json
import math
from dataclasses import replace

import pytest
import torch

from megatron_rc.records.rollout import FINISH_REASONS, load_rollouts, save_rollouts
from tests.support.ranks import Layout, RankFailure
from tests.support.recorded_training import SEQUENCES, flags, make_trainer, recorded_batch
from tests.support.training_runs import LIVE, agreed, rows, run_training, said_by_training

USER = "python:tests.support.user_rewards"


def test_components_are_logged_and_errors_cost_their_sample(ranks, tmp_path):
    layout = Layout(tp=2, dp=2)
    arguments = flags(tmp_path, *LIVE, *layout.flags(), "--train-iters=1", f"--save-rollouts={tmp_path}/records")
    more = [f"--reward={USER}:short_ones", "--reward-on-error=-2", "--reward-workers=1"]
    (error, message), *_ = ranks.run(said_by_training, layout, [*arguments, *more])
    assert error is None
    (row,) = rows(tmp_path)
    batches = [load_rollouts(path) for path in sorted((tmp_path / "records").iterdir())]
    rewards = torch.cat([batch.rewards for batch in batches])
    failed = rewards == -2
    assert 0 < failed.sum() < SEQUENCES
    assert row["reward/errors"] == failed.sum()
    assert row["reward/mean"] == pytest.approx(rewards.double().mean().item())
    assert 0 <= row["reward/short"] <= 3
    lines = [json.loads(line) for line in (tmp_path / "run" / "reward-errors.jsonl").read_text().splitlines()]
    assert len(lines) == failed.sum()
    end = f"{failed.sum()} of {SEQUENCES} responses could not be scored, see {tmp_path}/run/reward-errors.jsonl"
    assert end in message
    assert {line["replica"] for line in lines} <= {0, 1}
    for line in lines:
        assert line["error"] == f"raised ValueError: too long: {line['response']}"
        assert line["traceback"].splitlines()[-1] == f"ValueError: too long: {line['response']}"
        assert (line["rule"], line["step"], line["held_out"]) == (f"--reward {USER}:short_ones", 0, False)
        assert len(line["prompt"]) == 2


def test_the_first_error_can_end_the_run_and_a_batch_without_any_score_does(ranks, tmp_path):
    arguments = flags(tmp_path, *LIVE, f"--reward={USER}:refuse", "--reward-workers=1")
    with pytest.raises(RankFailure, match="the rollout of step 0 failed: RewardError: its traceback:") as failure:
        ranks.run(run_training, Layout(), [*arguments, "--reward-errors=stop"])
    said = str(failure.value)
    assert "in refuse" in said
    assert f"--reward {USER}:refuse raised ValueError: none is good enough, on response '" in said
    assert "reward-errors.jsonl; mend the rule, or go on with --reward-errors continue" in said
    assert (tmp_path / "run" / "reward-errors.jsonl").is_file()
    message = agreed(ranks.run(run_training, Layout(dp=2), arguments))
    said = f"RunError: the rollout of step 0 failed: none of its {SEQUENCES} responses could be scored by --reward "
    assert message.startswith(said)
    assert "reward-errors.jsonl: " in message


def cut_off(batch, which):
    finish = torch.zeros(batch.num_sequences, dtype=torch.int64)
    finish[which] = FINISH_REASONS.index("length")
    return replace(batch, finish_reasons=finish)


def train_recorded(words):
    """One update on the records; its metrics and those of the plan."""
    trainer = make_trainer(words)
    folder = trainer.config.rollouts.load_rollouts
    batch = load_rollouts(f"{folder}/step-0000000-replica-0000.safetensors")
    rank = torch.distributed.get_rank(trainer.groups.dp)
    size = trainer.config.data_parallel_size
    share = batch.num_sequences // size
    prepared = trainer.prepare(batch.rows(slice(rank * share, (rank + 1) * share)))
    metrics = trainer.update(prepared, 0).metrics
    return metrics, prepared.plan.metrics()


def test_masking_is_the_same_as_records_without_these_tokens(ranks, tmp_path):
    """Their mask is emptied by hand in the records that the other run reads; both keep their place in the baseline."""
    layout = Layout(cp=2)
    more = ["--rl-use-sequence-packing", "--micro-batch-size=8"]
    batch = cut_off(recorded_batch(0), [0, 5, 9, 10, 11])
    mask = batch.response_mask.clone()
    mask[[0, 5, 9, 10, 11]] = False
    results = []
    for name, records, flag in (("flag", batch, "mask"), ("hand", replace(batch, response_mask=mask), "keep")):
        folder = tmp_path / name
        folder.mkdir()
        save_rollouts(records, folder / "step-0000000-replica-0000.safetensors")
        arguments = [f"--load-rollouts={folder}", "--train-iters=2", f"--overlong={flag}", *more, *layout.flags()]
        results.append(ranks.run(train_recorded, layout, flags(tmp_path, *arguments))[0])
    assert results[0] == results[1]
    assert results[0][0]["grad_norm"] > 0


def test_a_batch_of_overlong_responses_makes_no_step(ranks, tmp_path):
    """One token at most: nothing ends in time but what ends at once."""
    layout = Layout(tp=2)
    arguments = flags(tmp_path, *LIVE, *layout.flags(), "--max-response-length=1", "--train-iters=2", "--overlong=mask")
    assert ranks.run(run_training, layout, [*arguments, "--seed=3"]) == [None, None]
    for row in rows(tmp_path):
        assert row["rollout/tokens"] == SEQUENCES, "they are counted where they were sampled"
        assert all(math.isfinite(value) for value in row.values())


def test_the_punishment_is_part_of_the_reward_and_logged(ranks, tmp_path):
    arguments = flags(tmp_path, *LIVE, "--train-iters=1", f"--save-rollouts={tmp_path}/records")
    more = ["--overlong=penalise", "--overlong-buffer=6", "--overlong-penalty-factor=0.5"]
    assert ranks.run(run_training, Layout(), [*arguments, *more]) == [None]
    (row,) = rows(tmp_path)
    (batch,) = [load_rollouts(path) for path in (tmp_path / "records").iterdir()]
    taken = [0.5 * max(0, length - 4) / 6 for length in batch.response_mask.sum(1).tolist()]
    assert row["reward/overlong_penalty"] == pytest.approx(sum(taken) / SEQUENCES)
    assert row["reward/mean"] == pytest.approx(batch.rewards.double().mean().item())
    assert min(batch.rewards.tolist()) < 0 < max(taken)
