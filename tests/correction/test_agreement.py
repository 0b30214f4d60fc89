"""A configuration that differs between ranks is the same error on all of them, before anything is trained."""

import pytest
import torch
import torch.distributed as dist

from megatron_rc import PlanInputs, PolicyLossConfig, RolloutCorrection, RolloutCorrectionConfig, correct_rollouts
from megatron_rc.parallel import ParallelGroups, SequenceLayout
from tests.support.on_rank import cp_place, outcome
from tests.support.ranks import Layout


def messages(thresholds, kind):
    """What each rank says, in the order of its calls."""
    groups, threshold = ParallelGroups.from_megatron(), thresholds[dist.get_rank()]
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=threshold)
    layout = SequenceLayout.padded(2, 8, **cp_place())
    tokens = torch.full(layout.shape, -1.0), torch.full(layout.shape, -1.1), torch.ones(layout.shape, dtype=torch.bool)
    if kind == "correct_rollouts":
        return [outcome(correct_rollouts(*tokens, config, layout, groups).check)]
    correction = RolloutCorrection(config, groups, loss=PolicyLossConfig())
    plan = correction.plan(PlanInputs(*tokens, layout) if groups.is_last_stage else None)
    checked, scale = outcome(plan.check), outcome(plan.loss_scale, num_microbatches=1)
    return [checked, scale if isinstance(scale, str) else None]


@pytest.mark.parametrize("kind", ["correct_rollouts", "plan"])
@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(cp=2)], ids=str)
def test_configurations_that_differ_between_ranks_are_the_same_error_on_all(ranks, layout, kind):
    first, second = ranks.run(messages, layout, [2.0, 3.0], kind)
    assert first == second
    assert first[0].startswith("config: the RolloutCorrectionConfig differs between ranks")
    if kind == "plan":
        assert first[1].startswith("plan.loss_scale() before plan.check()")
    assert ranks.run(messages, layout, [3.0, 3.0], kind) == [[None] * len(first)] * 2
