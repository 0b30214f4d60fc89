"""--save-log-probs: the trainer's log-probs in the records, whatever layout computed them."""

from unittest import mock

import pytest
import torch

from megatron_rc.records.rollout import RolloutBatch, load_rollouts
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, run_config
from tests.support.training_runs import LIVE, rows, run_training

pytestmark = pytest.mark.ranks
# The engine's weights are the trainer's: it is another program that computes the same log-probs.
EXACT = ["--rollout-dtype=fp32", "--train-iters=2", "--lr=0.02", "--save-log-probs"]


def records(folder):
    """The batch of all replicas, and which of its rows the first of two steps trained on."""
    batches = [load_rollouts(path) for path in sorted(folder.glob("step-0000000-*.safetensors"))]
    first = torch.cat([torch.arange(len(one.tokens)) < len(one.tokens) // 2 for one in batches])
    return RolloutBatch.concatenate(batches), first


def train(ranks, folder, layout, *more):
    arguments = flags(folder, *LIVE, *EXACT, *layout.flags(), f"--save-rollouts={folder}/records", *more)
    assert set(ranks.run(run_training, layout, arguments)) == {None}
    batch, first = records(folder / "records")
    batch.validate()
    return batch, first


# No response is right yet: the entropy alone moves the weights.
TWO_STEPS = ("--global-batch-size=8", "--micro-batch-size=4", "--grpo-entropy-term-weight=1")


@pytest.mark.parametrize("layout", [Layout(cp=2, pp=2), Layout(dp=2)], ids=str)
def test_old_and_current_log_probs_are_written_token_by_token(ranks, tmp_path, layout):
    packed = ["--rl-use-sequence-packing"] * (layout.cp == 2)
    batch, first = train(ranks, tmp_path, layout, *TWO_STEPS, *packed)
    mask = batch.response_mask
    torch.testing.assert_close(batch.old_log_probs[mask], batch.rollout_log_probs[mask], atol=1e-4, rtol=0)
    moved = (batch.log_probs - batch.old_log_probs).abs()
    assert moved[first][mask[first]].max() < 1e-5, "the first step saw the policy that scored them"
    second = moved[~first][mask[~first]]
    _, step = rows(tmp_path)
    assert second.mean().item() == pytest.approx(step["policy/abs_log_ratio"], rel=1e-3)
    assert second.mean() > 0.01
    assert batch.old_log_probs[~mask].isnan().all()


def test_one_step_has_one_policy_and_masked_responses_have_no_log_probs(ranks, tmp_path):
    batch, _ = train(ranks, tmp_path, Layout(pp=2), "--train-iters=1", "--overlong=mask")
    assert batch.log_probs is None
    cut = batch.finish_reasons == 1
    assert cut.any()
    assert not cut.all()
    scored = ~batch.old_log_probs.isnan() & batch.response_mask
    assert torch.equal(scored.any(dim=1), ~cut)


def test_bypass_mode_has_no_old_policy(ranks, tmp_path):
    bypass = "--rollout-correction-preset=bypass_ppo_clip"
    batch, first = train(ranks, tmp_path, Layout(), *TWO_STEPS, bypass)
    mask = batch.response_mask
    assert batch.old_log_probs is None
    apart = (batch.log_probs - batch.rollout_log_probs).abs()
    assert apart[first][mask[first]].max() < 1e-4
    assert apart[~first][mask[~first]].mean() > 0.01


def test_a_step_that_was_left_out_has_none(ranks, tmp_path):
    arguments = flags(tmp_path, *LIVE, *EXACT, *TWO_STEPS, f"--save-rollouts={tmp_path}/records", "--bad-steps=skip")
    assert ranks.run(train_with_a_bad_step, Layout(), arguments) == [None]
    batch, first = records(tmp_path / "records")
    unscored = batch.log_probs.isnan()
    assert not (unscored & batch.response_mask)[first].any()
    assert unscored[~first].all()


def train_with_a_bad_step(words):
    """The second step fails before its pass, as where the critic's loss is not finite."""
    from megatron_rc.launch.training.checks.step_checks import BadStepError
    from megatron_rc.launch.training.trainer import Trainer

    update = Trainer._update_policy

    def failing(trainer, prepared, mini_batch):
        if trainer.iteration == 1:
            raise BadStepError("the critic's loss is not finite")
        return update(trainer, prepared, mini_batch)

    with mock.patch.object(Trainer, "_update_policy", failing):
        return run_training(words)


def test_a_record_that_is_gone_is_one_sentence(ranks, tmp_path):
    arguments = flags(tmp_path, *LIVE, *EXACT, f"--save-rollouts={tmp_path}/records")
    (message,) = ranks.run(train_without_records, Layout(), arguments)
    assert message.startswith("RunError: --save-log-probs: ")
    assert "replica-0000.safetensors is missing: expected a file of rollouts" in message


def train_without_records(words):
    from megatron_rc.launch.rollouts import collector

    with mock.patch.object(collector, "write_rollouts"):
        return run_training(words)


def test_the_flag_needs_the_last_step_on_a_batch(tmp_path, caplog):
    arguments = [f"--save-rollouts={tmp_path}/records", "--save-log-probs", "--grpo-iterations=3"]
    config = run_config(flags(tmp_path, *arguments, "--train-iters=100"))
    steps = config.updates_per_rollout
    assert run_config(flags(tmp_path, *arguments, f"--train-iters={steps}")).rollouts.save_log_probs
    assert not caplog.text

    fewer = run_config(flags(tmp_path, *arguments, f"--train-iters={steps - 1}"))
    assert not fewer.rollouts.save_log_probs
    assert "--save-log-probs (needs --train-iters of a whole rollout batch)" in caplog.text
