"""Process groups as the correction sees them."""

from unittest import mock

import pytest
import torch

from megatron_rc import RolloutCorrectionConfig, aggregate_loss, correct_rollouts, policy_loss, whiten
from megatron_rc.parallel import ParallelGroups, SequenceLayout
from megatron_rc.parallel.groups import group_device


@pytest.mark.parametrize(("backend", "device"), [("gloo", "cpu"), ("nccl", "cuda:3"), ("cpu:gloo,cuda:nccl", "cuda:3")])
def test_what_a_group_sends_lies_where_its_backend_reads(backend, device):
    """Pipeline stages without log-probs make a header of their own; nccl takes no tensor on the CPU."""
    with (
        mock.patch("torch.distributed.get_backend", return_value=backend),
        mock.patch("torch.cuda.current_device", return_value=3),
    ):
        assert group_device(mock.sentinel.group) == torch.device(device)


def test_no_group_sends_from_the_cpu():
    assert group_device(None) == torch.device("cpu")


TOKENS, MASK, ONE_A_SEQUENCE = -torch.ones(2, 4), torch.ones(2, 4, dtype=torch.bool), torch.ones(2)
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


@pytest.mark.parametrize("name", ["correct_rollouts", "aggregate_loss", "whiten"])
def test_sums_over_cp_ranks_alone_are_refused(name):
    """Their tokens would be missing in what is divided by, on every rank another part of them."""
    with (
        mock.patch("torch.distributed.get_world_size", return_value=2),
        mock.patch("torch.distributed.get_rank", return_value=1),
        pytest.raises(ValueError, match=r"groups\.cp has 2 ranks, .*groups\.dp_cp 1: dp_cp"),
    ):
        USES[name](HALF, ParallelGroups(cp=mock.sentinel.cp))


@pytest.mark.parametrize("name", USES)
def test_slices_without_their_group_are_refused(name):
    with pytest.raises(ValueError, match=r"the layout is that of rank 1 of 2 .* this is rank 0 of 1 of groups\.cp"):
        USES[name](HALF, None)


@pytest.mark.parametrize("name", USES)
def test_rows_that_are_no_slices_are_refused(name):
    """Rows without a layout are cut as the group says, and twelve tokens make no eight chunks."""
    with (
        mock.patch("torch.distributed.get_world_size", return_value=4),
        mock.patch("torch.distributed.get_rank", return_value=1),
        mock.patch("tests.parallel.test_groups.TOKENS", TOKENS[:, :3]),
        mock.patch("tests.parallel.test_groups.MASK", MASK[:, :3]),
        pytest.raises(ValueError, match="a sequence of 12 tokens does not divide into 8 chunks"),
    ):
        USES[name](None, ParallelGroups(cp=mock.sentinel.cp, dp_cp=mock.sentinel.cp))


@pytest.mark.parametrize("wrong", ["tp", {}, 0])
@pytest.mark.parametrize("name", USES)
def test_what_are_no_groups_is_named(name, wrong):
    with pytest.raises(ValueError, match=rf"groups is a {type(wrong).__name__}: pass ParallelGroups"):
        USES[name](None, wrong)
