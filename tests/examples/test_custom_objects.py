"""A reward, an objective and a criterion of one's own, read from the launcher's flags."""

from unittest import mock

import pytest
import torch

from megatron_rc import PlanInputs, RolloutCorrection
from megatron_rc.launch.rewards.rewarder import Rewarder
from megatron_rc.launch.tasks import Problem
from megatron_rc.loss.objectives import OBJECTIVES
from megatron_rc.parallel import ParallelGroups, SequenceLayout
from megatron_rc.parallel.groups import group_rank
from megatron_rc.settings.criteria import CRITERIA
from tests.support import one_step
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, run_config

OBJECTIVE = "python:examples.custom_objective:GOOD_ONLY"
CRITERION = "python:examples.custom_criterion:SEQ_MIN"
WORDS = (
    f"--policy-loss={OBJECTIVE}",
    f"--rollout-rs=token_k1,{CRITERION}",
    "--rollout-rs-threshold=0.6_1.8,0.7_10",
    "--grpo-kl-beta=0",
)
BYPASS = ("--bypass-mode", f"--loss-type={OBJECTIVE}", *WORDS[1:])
ROWS = 8
LENGTH = 16


@pytest.fixture(autouse=True)
def _tables():
    """Restore the tables afterwards."""
    with mock.patch.dict(OBJECTIVES), mock.patch.dict(CRITERIA):
        yield


def draw():
    """(log π_old, log π_rollout, advantages [ROWS], response mask) in float64, [ROWS, LENGTH]."""
    dice = torch.Generator().manual_seed(3)
    old = -2 * torch.rand(ROWS, LENGTH, generator=dice, dtype=torch.float64) - 1
    rollout = old - 0.2 * torch.randn(ROWS, LENGTH, generator=dice, dtype=torch.float64)
    mask = torch.rand(ROWS, LENGTH, generator=dice) < 0.8
    return old, rollout, torch.randn(ROWS, generator=dice, dtype=torch.float64), mask


def trained(arguments):
    """The gradient of the whole batch's loss at this rank's log-probs; π_θ is π_old."""
    config = run_config(arguments, torch.distributed.get_world_size(), engine=False)
    groups = ParallelGroups.from_megatron()
    size = torch.distributed.get_world_size(groups.cp)
    layout = SequenceLayout.padded(ROWS, LENGTH // size, cp_rank=group_rank(groups.cp), cp_size=size)
    old, rollout, mask = (layout.cut(draw()[index]) for index in (0, 1, 3))
    correction = RolloutCorrection(config.correction, groups, loss=config.loss)
    in_loss = config.correction.bypass_mode
    new = old.clone().requires_grad_()
    inputs = PlanInputs(None if in_loss else old, rollout, mask, layout, advantages=draw()[2])
    one_step.made(correction, inputs, new)
    return new.grad * (correction.step.factor if in_loss else 1) / size


def by_hand():
    """-w · max(A, 0) / (accepted tokens) at accepted tokens, else 0."""
    old, rollout, advantages, mask = draw()
    ratio = (old - rollout).exp()
    smallest = torch.where(mask, ratio, 9).amin(1)
    accepted = mask & (ratio > 0.6) & (ratio < 1.8) & (smallest > 0.7).unsqueeze(1)
    assert min((smallest - 0.7).abs().min(), (ratio - 0.6)[mask].abs().min(), (ratio - 1.8)[mask].abs().min()) > 1e-3
    assert 1 <= (smallest < 0.7).sum() < ROWS - 1
    return torch.where(accepted, -ratio.clamp(max=1.5) * advantages.clamp(min=0).unsqueeze(1) / accepted.sum(), 0.0)


@pytest.mark.parametrize("layout", [Layout(), Layout(cp=2)], ids=str)
@pytest.mark.parametrize("arguments", [WORDS, BYPASS], ids=["decoupled", "bypass"])
def test_objective_and_criterion_give_what_the_formula_says(ranks, tmp_path, arguments, layout):
    arguments = [word for word in flags(tmp_path, *layout.flags(), *arguments) if "clamp-eps" not in word]
    gradients = ranks.run(trained, layout, arguments)
    whole = SequenceLayout.padded(ROWS, LENGTH // layout.cp, cp_size=layout.cp).restore(gradients)
    torch.testing.assert_close(whole, by_hand(), rtol=1e-9, atol=1e-12)


def test_the_reward_scores_in_its_own_process(tmp_path):
    arguments = ["--reward=python:examples.custom_reward:last_number", "--reward-workers=1", "--run-name=run"]
    rewarder = Rewarder(run_config(flags(tmp_path, *arguments)), 0)
    responses = ["It is 4", "5, or 4" + " perhaps" * 9, "4, or 5", ""]
    rewards = rewarder.score([Problem("2 + 2 = ?", label=4)] * 4, responses, step=0)
    rewarder.close()
    assert rewards.values == pytest.approx([1, 0.9, 0.1, 0.1])
    assert rewards.errors == 0
    assert rewards.sums() == {"right": (2, 4), "short": (3, 4)}
