"""Process groups as the correction sees them."""

from unittest import mock

import pytest
import torch

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
