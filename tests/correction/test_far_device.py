"""The correction on a device that is not the CPU: the same numbers, and the host waits for it once."""

import pytest
import torch

from megatron_rc import PlanInputs, RolloutCorrection, RolloutCorrectionConfig
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.parallel import ParallelGroups, SequenceLayout
from tests.support.correction_cases import clear_batch
from tests.support.correction_comparison import correct, moved, pack
from tests.support.far_device import GPU, far_device


@pytest.mark.parametrize(("name", "packed"), [("token", False), ("turns", True)])
def test_the_host_waits_once(name, packed):
    batch, _ = clear_batch(name)
    layout = None
    if packed:
        batch, layout, _ = pack(batch)
    expected = correct(name, batch, layout=layout)
    with far_device() as device:
        there = moved(batch, GPU)
        device.waits.clear()
        result = correct(name, there, layout=layout)
        assert not device.waits
        result.check()
        metrics = result.metrics()
        assert sum(device.waits.values()) == 1
        near = [None if value is None else value.to("cpu") for value in (result.weights, result.mask)]
    assert metrics == pytest.approx(expected.metrics(), rel=1e-9, abs=1e-9)
    torch.testing.assert_close(near[0], expected.weights, rtol=1e-12, atol=1e-12)
    assert torch.equal(near[1], expected.mask)


def test_bypass_mode_waits_once_for_the_plan_and_once_a_step():
    batch, _ = clear_batch("nothing")
    config = RolloutCorrectionConfig(rollout_is="token", bypass_mode=True, loss_type="reinforce")
    metrics_by_device = []
    with far_device() as device:
        for batch_on_device in (batch, moved(batch, GPU)):
            correction = RolloutCorrection(config, ParallelGroups(), loss=PolicyLossConfig())
            device.waits.clear()
            plan = correction.plan(PlanInputs(None, batch_on_device.rollout, batch_on_device.mask))
            plan.check()
            assert sum(device.waits.values()) <= 1

            device.waits.clear()
            correction.in_loss(batch_on_device.train, batch_on_device.rollout, batch_on_device.mask)
            assert not device.waits
            correction.finish_step()
            correction.step.check()
            metrics_by_device.append(correction.step.metrics())
            assert sum(device.waits.values()) <= 1
    assert metrics_by_device[1] == pytest.approx(metrics_by_device[0], rel=1e-9, abs=1e-9)


def test_a_tensor_on_another_device_is_noticed():
    """What this file rests on."""
    with far_device() as device:
        there = torch.ones(3, device=GPU)
        with pytest.raises(RuntimeError, match="expected all tensors to be on one device"):
            there + torch.ones(3)
        assert not device.waits
        assert float(there.sum()) == 3
        assert sum(device.waits.values()) == 1
        there[there > 0] = 2.0
        assert sum(device.waits.values()) == 2
        assert torch.equal(there, there)
        assert len(there.unique().tolist()) == 1
        assert sum(device.waits.values()) == 5


def test_a_packed_layout_is_sent_once():
    """And as one number a sequence, not a token."""
    layout = SequenceLayout.packed([0, 3, 3, 8])
    with far_device() as device:
        values = torch.arange(8.0).to(GPU)
        per_sequence = torch.arange(3.0).to(GPU)
        device.waits.clear()
        work = []
        for _ in range(2):
            device.kernels = 0
            sums = layout.sum_sequences(values)
            spread = layout.expand(per_sequence)
            work.append(device.kernels)
        assert work[1] == work[0] - 1
        assert not device.waits
        assert sums.to("cpu").tolist() == [3, 0, 25]
        assert spread.to("cpu").tolist() == [0, 0, 0, 2, 2, 2, 2, 2]
