"""Steps that are left out, what is written down of them, and runs whose steps change nothing."""

import contextlib
import dataclasses
import io
import json
import math
import re
import shlex
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_rc.launch.errors import RunError
from megatron_rc.launch.rollouts.recorded import write_rollouts
from megatron_rc.launch.training.bad_steps import BadSteps
from megatron_rc.launch.training.checks.step_checks import BadStepError, LeftOut, StepChecks
from megatron_rc.launch.training.trainer import Outcome
from megatron_rc.records.rollout import load_rollouts
from tests.support.paths import ROOT
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, recorded_batch, run_config
from tests.support.training_runs import LIVE, agreed, logged, rows, run_training, tensors_of

# No gradient is 0, even where all rewards are alike.
MOVING = ["--grpo-entropy-term-weight=0.01"]
ONE_PROCESS = ["--tensor-model-parallel-size=1", "--pipeline-model-parallel-size=1", "--no-sequence-parallel", "--cpu"]
ONE_PROCESS += ["--grpo-prompts-per-step=8", "--global-batch-size=64", "--micro-batch-size=64"]


# Steps whose gradient is 0 are made.
MADE = ["--no-skip-steps-without-signal"]


@contextlib.contextmanager
def faults(steps=(), batches=()):
    """A gradient that is infinite on the last rank alone, and log-probs that are no numbers, before some steps.

    Yields, by number of the step, whether it left weights, optimizer and learning rate as they were.
    """
    from megatron_rc.launch.training.trainer import Trainer

    accumulate = Trainer.accumulate
    inputs = Trainer._plan_inputs
    skip = Trainer.skip
    left = {}
    is_last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1

    def spoilt(trainer, *args):
        metrics = accumulate(trainer, *args)
        trainer.before = state_of(trainer)
        if is_last and trainer.iteration in steps:
            next(iter(trainer.chunks[0].parameters())).main_grad.fill_(math.inf)
        return metrics

    def no_numbers(trainer, batch, cut):
        local = inputs(trainer, batch, cut)
        is_spoilt = is_last and trainer.iteration in batches
        return dataclasses.replace(local, train_log_probs=local.train_log_probs * math.nan) if is_spoilt else local

    def watched(trainer, *args):
        left[trainer.iteration] = all(map(torch.equal, trainer.before, state_of(trainer)))
        return skip(trainer, *args)

    with contextlib.ExitStack() as stack:
        for name, function in {"accumulate": spoilt, "_plan_inputs": no_numbers, "skip": watched}.items():
            stack.enter_context(mock.patch.object(Trainer, name, function))
        yield left


def state_of(trainer):
    rate = torch.tensor(trainer.optimizer.param_groups[0]["lr"])
    parameters = [parameter.detach().clone() for chunk in trainer.chunks for parameter in chunk.parameters()]
    return [rate, *parameters, *(tensor.clone() for tensor in tensors_of(trainer.optimizer.state_dict()))]


def train_with_faults(words, steps, batches=()):
    with faults(steps, batches) as left, contextlib.redirect_stderr(io.StringIO()) as message, logged() as lines:
        return run_training(words), left, message.getvalue() + "\n".join(lines)


def test_bad_steps_and_batches_are_left_out_on_all_ranks_and_written_down(ranks, tmp_path):
    layout = Layout(pp=2, dp=2)
    bad = tmp_path / "run" / "bad"
    arguments = flags(
        tmp_path, *LIVE, *layout.flags(), "--grpo-iterations=2", "--train-iters=6", "--micro-batch-size=4"
    )
    arguments += ["--lr-decay-style=linear", f"--save-rollouts={tmp_path}/records"]
    results = ranks.run(train_with_faults, layout, [*arguments, "--bad-steps=skip"], [1], [2])
    assert [error for error, *_ in results] == [None] * 4
    # The second step, and both of the second batch.
    assert [left for _, left, _ in results] == [{1: True, 2: True, 3: True}] * 4
    written = rows(tmp_path)
    assert [row["skipped_steps"] for row in written] == [0, 1, 2, 3, 3, 3]
    assert [row["bad_steps"] for row in written] == [0, 1, 2, 3, 3, 3]
    assert (
        ["grad_norm" in row for row in written]
        == ["loss/total" in row for row in written]
        == [*(True, False, False, False, True, True)]
    )
    assert all(math.isfinite(value) for row in written for value in row.values())
    message = results[0][2]
    assert "the gradient norm of step 2 is inf: the step was not made; lower --lr" in message
    assert "finished at step 6 (3 steps left out) after" in message
    names = [f"step-000000{step}-replica-000{replica}.safetensors" for step in (0, 2) for replica in (0, 1)]
    assert sorted(path.name for path in bad.glob("*.safetensors")) == names
    for name in names:
        kept = load_rollouts(bad / name)
        sampled = load_rollouts(tmp_path / "records" / name)
        for field, value in sampled.tensors().items():
            assert torch.equal(value, kept.tensors()[field]), field
    reasons = [json.loads(line) for path in sorted(bad.glob("*.jsonl")) for line in path.read_text().splitlines()]
    assert [reason["step"] for reason in reasons] == [2, 3]
    assert "the gradient norm of step 2 is inf" in reasons[0]["error"]
    assert "NaN" in reasons[1]["error"]
    # They train again as they are; a new run leaves those of the old one.
    arguments = flags(
        tmp_path, *LIVE, *layout.flags(), "--micro-batch-size=4", f"--load-rollouts={bad}", "--run-name=again"
    )
    assert ranks.run(run_training, layout, [*arguments, "--train-iters=2"]) == [None] * 4


def test_a_bad_step_ends_the_run_unless_it_may_be_left_out(ranks, tmp_path):
    arguments = flags(tmp_path, *LIVE, "--train-iters=6", "--pipeline-model-parallel-size=2", *MOVING)
    (first, left, _), second = ranks.run(train_with_faults, Layout(pp=2), arguments, [1])
    assert first == second[0]
    assert first.startswith("BadStepError: the gradient norm of step 2 is inf: the step was not made")
    assert left == {}
    assert [row["step"] for row in rows(tmp_path)] == [1]
    assert [path.name for path in sorted((tmp_path / "run" / "bad").iterdir())] == [
        *("step-0000001-replica-0000.safetensors", "step-0000001.jsonl")
    ]
    # A new run of that name sets them aside.
    more = ["--bad-steps=skip", "--max-skipped-steps=2", "--bypass-mode"]
    (first, left, _), second = ranks.run(train_with_faults, Layout(pp=2), [*arguments, *more], [1, 2, 3])
    assert first == second[0]
    assert first.startswith(
        "RunError: the last 2 steps left the model as it was (the gradient norm of step 3 is inf: the step was not"
    )
    assert first.endswith("--max-skipped-steps 2 allows no more")
    assert left == {1: True, 2: True}
    assert [row["bad_steps"] for row in rows(tmp_path)] == [0, 1, 2]
    assert len(list((tmp_path / "run").glob("bad*"))) == 2


def test_steps_that_were_left_out_are_counted_over_a_resume(ranks, tmp_path):
    """The last before the checkpoint and the first after it are two in a row."""
    save = [f"--save={tmp_path}/save", f"--load={tmp_path}/save"]
    arguments = flags(tmp_path, *LIVE, *MOVING, *save, "--bad-steps=skip", "--max-skipped-steps=2")
    ((error, *_),) = ranks.run(train_with_faults, Layout(), [*arguments, "--train-iters=2"], [1])
    assert error is None
    ((error, _, message),) = ranks.run(train_with_faults, Layout(), [*arguments, "--train-iters=4"], [2])
    assert error.startswith("RunError: the last 2 steps left the model as it was (the gradient norm of step 3 is inf")
    assert [row["bad_steps"] for row in rows(tmp_path)] == [0, 1, 2]
    # The steps after the last checkpoint are made again.
    ((error, _, message),) = ranks.run(train_with_faults, Layout(), [*arguments, "--train-iters=4"], [])
    assert error is None
    assert "finished at step 4 (1 steps left out), saved to" in message


@pytest.mark.parametrize(
    ("end", "steps", "message"), [(8, 6, "no token was accepted, or none"), (3, 3, "3 of the run's 3 steps, the")]
)
def test_a_run_whose_steps_are_all_left_out_has_not_finished(ranks, tmp_path, end, steps, message):
    arguments = flags(tmp_path, *LIVE, "--grpo-kl-beta=0", "--no-skip-steps-without-signal", f"--train-iters={end}")
    arguments += ["--rollout-rs=token_k2", "--rollout-rs-threshold=1e-12"]
    (error,) = ranks.run(run_training, Layout(), arguments)
    assert error.startswith("RunError: ")
    assert message in error
    assert len(rows(tmp_path)) == steps


def test_a_run_that_its_learning_rate_ruins_has_not_finished(ranks, tmp_path):
    """Weights of 10,000: all tokens are equally likely. The guards of docs/launching.md see nothing."""
    text = (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")
    (command,) = re.findall(
        r"^python -m megatron_rc.launch --nproc-per-node 4 (.* --stop-if [^`]*)", text, re.MULTILINE
    )
    arguments = [*shlex.split(command.replace("\\\n", " ")), *ONE_PROCESS, f"--runs-dir={tmp_path}", "--run-name=run"]
    arguments += ["--lr=1e4", "--train-iters=8"]
    (error,) = ranks.run(run_training, Layout(), arguments)
    assert error.startswith("RunError: the last 6 steps left the model as it was (their gradient was 0: a model")
    assert len(rows(tmp_path)) == 7


def test_a_mini_batch_whose_rewards_are_alike_changes_nothing_by_right(ranks, tmp_path):
    """One prompt of four has rewards that differ: the steps of the three others have a gradient of 0."""
    batch = recorded_batch(0)
    alike = torch.full((12,), 0.5)
    batch = dataclasses.replace(batch, rewards=torch.cat([batch.rewards[:4], alike]))
    write_rollouts(batch, tmp_path / "records", 0, 0)
    arguments = ["--run-name=run", f"--load-rollouts={tmp_path}/records", "--max-skipped-steps=2", "--train-iters=4"]
    arguments += [
        "--grpo-iterations=1",
        "--global-batch-size=4",
        "--rollout-rs-threshold=0.01_100,10",
        "--grpo-kl-beta=0",
    ]
    arguments += ["--grpo-entropy-term-weight=0"]
    assert ranks.run(run_training, Layout(), flags(tmp_path, *arguments, *MADE)) == [None]
    assert [row["grad_norm"] > 0 for row in rows(tmp_path)] == [True, False, False, False]
    assert [row["reward/nonzero_advantages"] for row in rows(tmp_path)] == [1, 0, 0, 0]
    assert ranks.run(run_training, Layout(), flags(tmp_path, *arguments)) == [None]
    assert ["grad_norm" in row for row in rows(tmp_path)] == [True, False, False, False]
    assert [row["steps_without_signal"] for row in rows(tmp_path)] == [0, 1, 2, 3]


def run_flat(words, flat, alone):
    """A run whose rewards are all alike in some batches, and in others on the first replica alone.

    Returns:
        (error, by step whether it left weights, optimizer and learning rate as they were).
    """
    from megatron_rc.launch.rollouts.collector import RolloutCollector
    from megatron_rc.launch.training.trainer import Trainer

    collect = RolloutCollector.collect
    update = Trainer.update
    left = {}

    def collected(self, step):
        result = collect(self, step)
        rewards = torch.arange(len(result.batch.rewards)).remainder(2).float()
        is_flat = step in flat or (step in alone and self.replica == 0)
        batch = dataclasses.replace(result.batch, rewards=torch.ones_like(rewards) if is_flat else rewards)
        return dataclasses.replace(result, batch=batch)

    def watched(self, prepared, mini_batch):
        before = state_of(self)
        step = self.iteration
        metrics = update(self, prepared, mini_batch)
        left[step] = all(map(torch.equal, before, state_of(self)))
        return metrics

    with mock.patch.object(RolloutCollector, "collect", collected), mock.patch.object(Trainer, "update", watched):
        return run_training(words), left


def test_a_step_without_an_advantage_on_any_rank_leaves_the_optimizer_alone(ranks, tmp_path):
    """It is counted over a resume, and is no step that may end the run."""
    layout = Layout(pp=2, dp=2)
    arguments = flags(tmp_path, *LIVE, *layout.flags(), "--lr-decay-style=linear", "--max-skipped-steps=1")
    arguments += ["--grpo-kl-beta=0", "--grpo-entropy-term-weight=0", "--micro-batch-size=4", f"--save={tmp_path}/save"]
    # One replica of two has rewards that differ in batch 2.
    for end, steps in ((2, (0, 1)), (5, (2, 3, 4))):
        results = ranks.run(
            run_flat, layout, [*arguments, f"--load={tmp_path}/save", f"--train-iters={end}"], {1, 3}, {2}
        )
        assert results == [(None, {step: step in (1, 3) for step in steps})] * layout.world
    written = rows(tmp_path)
    assert [row["steps_without_signal"] for row in written] == [0, 1, 1, 2, 2]
    assert [row["skipped_steps"] for row in written] == [0, 1, 1, 2, 2]
    assert [row["bad_steps"] for row in written] == [0] * 5
    assert ["grad_norm" in row for row in written] == [True, False, True, False, True]
    assert [row["reward/nonzero_advantages"] for row in written] == [1, 0, 0.5, 0, 1]
    assert written[1]["lr"] == written[2]["lr"] > written[3]["lr"] == written[4]["lr"]


@pytest.mark.parametrize("more", [MADE, ["--grpo-entropy-term-weight=0.01"], ["--grpo-kl-beta=0.01"]], ids=str)
def test_a_step_that_another_term_moves_is_made(ranks, tmp_path, more):
    arguments = flags(tmp_path, *LIVE, "--grpo-kl-beta=0", "--grpo-entropy-term-weight=0", "--train-iters=3", *more)
    # Adam's momentum moves the weights even if the gradient is 0.
    assert ranks.run(run_flat, Layout(), arguments, {1, 2}, ()) == [(None, {0: False, 1: False, 2: False})]
    assert ["grad_norm" in row for row in rows(tmp_path)] == [True] * 3
    assert rows(tmp_path)[-1]["steps_without_signal"] == 0


def test_steps_of_the_critic_alone_are_none_that_change_nothing(tmp_path):
    config = run_config(flags(tmp_path, "--grpo-iterations=1"))
    config = dataclasses.replace(config, critic=SimpleNamespace(num_critic_only_steps=8))
    trainer = SimpleNamespace(config=config, iteration=0, left_out=LeftOut())
    judge = BadSteps(config, trainer, None)
    for _ in range(13):
        trainer.iteration += 1
        judge.check(Outcome.CRITIC_ONLY if trainer.iteration <= 8 else Outcome.NOT_ACCEPTED, {"lr": 0.1})
    trainer.iteration += 1
    with pytest.raises(RunError, match="the last 6 steps left the model as it was"):
        judge.check(Outcome.NOT_ACCEPTED, {"lr": 0.1})


def checked(words, losses, norms):
    """What the checks say of steps with these losses and gradient norms, of which rank 1 sees another."""
    checks = StepChecks(run_config(words, 2))
    try:
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1):
            checks.loss(step, loss)
            checks.gradient(step, norm[torch.distributed.get_rank()])
    except BadStepError as error:
        return str(error)


SMALL = [(1.0, 1.0)] * 100


SPIKY = "--check-for-spiky-loss"
LARGE = "--check-for-large-grads"
# A flag, the losses, the gradient norms of the two ranks, and the sentence.
CHECKS = [
    ("", [math.inf], SMALL[:1], "the loss of step 1 is inf: the step was not made"),
    ("", [1.0], [(1.0, math.nan)], "the gradient norm of step 1 is nan: the step was not made"),
    ("--no-check-for-nan-in-loss-and-grad", [math.nan], [(math.nan, 1.0)], None),
    ("", [1.0] * 100 + [10.0], [*SMALL, (10.0, 10.0)], None),
    (SPIKY, [-1.0] * 100 + [9.9], [*SMALL, (50.0, 50.0)], None),
    (SPIKY, [1.0] * 100 + [-10.0], [*SMALL, (1.0, 1.0)], "the loss of step 101 is -10, the larg"),
    (SPIKY, [1.0] * 99 + [10.0], SMALL, None),
    (LARGE, [1.0] * 101, [*SMALL, (1.0, 10.0)], "the gradient norm of step 101 is 10, the large"),
]


@pytest.mark.parametrize(("more", "losses", "norms", "message"), CHECKS)
def test_megatrons_checks_of_a_step(ranks, tmp_path, more, losses, norms, message):
    arguments = flags(tmp_path, *more.split(), *Layout(dp=2).flags())
    said = agreed(ranks.run(checked, Layout(dp=2), arguments, losses, norms))
    assert said is message is None or said.startswith(message)
