"""Process groups of the correction."""

from unittest import mock

import pytest
import torch

from megatron_rc import (
    PlanInputs,
    PolicyLossConfig,
    RolloutCorrection,
    RolloutCorrectionConfig,
    aggregate_loss,
    correct_rollouts,
    policy_loss,
    whiten,
)
from megatron_rc.parallel import ParallelGroups, SequenceLayout
from megatron_rc.parallel.groups import group_device


@pytest.mark.parametrize(("backend", "device"), [("gloo", "cpu"), ("cpu:gloo,cuda:nccl", "cuda:3")])
def test_what_a_group_sends_lies_where_its_backend_reads(backend, device):
    """Stages without log-probs make a header on the group's device; nccl takes no CPU tensor."""
    with (
        mock.patch("torch.distributed.get_backend", return_value=backend),
        mock.patch("torch.cuda.current_device", return_value=3),
    ):
        assert group_device(mock.sentinel.group) == torch.device(device)
        assert group_device(None) == torch.device("cpu")


TOKENS = -torch.ones(2, 4)
MASK = torch.ones(2, 4, dtype=torch.bool)
ONE_A_SEQUENCE = torch.ones(2)
HALF = SequenceLayout.padded(2, 4, cp_rank=1, cp_size=2)
USES = {
    "correct_rollouts": lambda layout, groups: correct_rollouts(
        TOKENS, TOKENS, MASK, RolloutCorrectionConfig(), layout, groups
    ),
    "aggregate_loss": lambda layout, groups: aggregate_loss(TOKENS, MASK, layout=layout, groups=groups),
    "whiten": lambda layout, groups: whiten(TOKENS, MASK, layout=layout, groups=groups),
    "gspo": lambda layout, groups: policy_loss(
        TOKENS, TOKENS, ONE_A_SEQUENCE, MASK, algorithm="gspo", layout=layout, groups=groups
    ),
}


@pytest.mark.parametrize("name", USES)
def test_slices_without_their_group_are_refused(name):
    with pytest.raises(ValueError, match=r"rank 1 of 2.*groups\.cp"):
        USES[name](HALF, None)


@pytest.mark.parametrize("name", USES)
def test_rows_that_are_no_slices_are_refused(name):
    """Rows without a layout are cut over the group; twelve tokens do not divide into eight chunks."""
    with (
        mock.patch("torch.distributed.get_world_size", return_value=4),
        mock.patch("torch.distributed.get_rank", return_value=1),
        mock.patch("tests.parallel.test_groups.TOKENS", TOKENS[:, :3]),
        mock.patch("tests.parallel.test_groups.MASK", MASK[:, :3]),
        pytest.raises(ValueError, match=r"12 tokens.*8 chunks"),
    ):
        USES[name](None, ParallelGroups(cp=mock.sentinel.cp, dp_cp=mock.sentinel.cp))


def plan(layout, groups, **mode):
    correction = RolloutCorrection(RolloutCorrectionConfig(**mode), groups, loss=PolicyLossConfig())
    return correction.plan(PlanInputs(None if mode else TOKENS, TOKENS, MASK, layout))


SUMS = {name: use for name, use in USES.items() if name != "gspo"} | {
    "plan": plan,
    "plan in bypass mode": lambda layout, groups: plan(layout, groups, bypass_mode=True, loss_type="reinforce"),
}
TOO_SMALL = {
    "dp without dp_cp": {"dp": 2},
    "cp alone": {"cp": 2, "dp_cp": 1},
    "dp for dp_cp": {"cp": 2, "dp": 2, "dp_cp": 2},
    "no multiple of cp": {"cp": 2, "dp_cp": 3},
}


def standing_in(sizes):
    """Stand-ins of groups of these sizes."""
    return ParallelGroups(**{name: getattr(mock.sentinel, name) for name in sizes})


def size_among(sizes):
    return mock.patch("torch.distributed.get_world_size", side_effect=lambda group: sizes[group.name])


@pytest.mark.parametrize(
    ("name", "use"), [*((name, "whiten") for name in TOO_SMALL), *(("dp for dp_cp", use) for use in SUMS)]
)
def test_a_dp_cp_that_does_not_hold_cp_times_dp_is_refused(name, use):
    """Each rank would divide by a part of the batch's tokens, without a sign of it."""
    sizes = TOO_SMALL[name]
    layout = SequenceLayout.padded(2, 4, cp_rank=0, cp_size=sizes.get("cp", 1))
    with (
        size_among(sizes),
        mock.patch("torch.distributed.get_rank", return_value=0),
        pytest.raises(ValueError, match=f"groups.dp_cp {sizes.get('dp_cp', 1)}"),
    ):
        SUMS[use](layout, standing_in(sizes))
