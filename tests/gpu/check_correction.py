"""The correction on the device: the numbers of the CPU, and what it costs."""

import pytest
import torch

from megatron_rc import RolloutCorrectionConfig, correct_rollouts
from megatron_rc.parallel import SequenceLayout
from tests.gpu import measure
from tests.support.correction_cases import CASES, clear_batch
from tests.support.correction_comparison import correct, moved, pack
from tests.support.errors import largest_error

CONFIGS = {
    "token": RolloutCorrectionConfig(rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="0.5_2"),
    "sequence": RolloutCorrectionConfig(rollout_is="sequence", rollout_rs="seq_mean_k3", rollout_rs_threshold=0.043),
}
MOST_LAUNCHES = 400


def large_batch(shape):
    """(train, rollout, mask), float32, no log-ratio near a bound of the configurations above."""
    generator = torch.Generator().manual_seed(0)
    rollout = -3 * torch.rand(shape, generator=generator) - 0.01
    noise = 0.3 * torch.randn(shape, generator=generator)
    bound = torch.tensor(2.0).log()
    noise = torch.where((noise.abs() - bound).abs() < 1e-3, 0.5, noise)
    return (rollout + noise).clamp(max=0), rollout, torch.rand(shape, generator=generator) > 0.25


def assert_near(got, want, figures):
    """The same mask, and metrics and weights with a relative difference of 1e-4 at most."""
    mine = got.metrics()
    theirs = want.metrics()
    assert mine.keys() == theirs.keys()
    of_metrics = largest_error(abs(mine[name] - theirs[name]) / (1e-3 + abs(theirs[name])) for name in mine)
    apart = (got.weights.cpu() - want.weights.cpu()).abs() / (1e-6 + want.weights.cpu().abs())
    figures(metric_error=of_metrics, weight_error=float(apart.max()))
    assert torch.equal(got.mask.cpu(), want.mask.cpu())
    assert of_metrics <= 1e-4
    assert apart.max() <= 1e-4


@pytest.mark.timeout(90)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_every_case_is_that_of_the_cpu(device, figures, packed):
    """In float64, which no rounding can hide behind."""
    errors = []
    wrong = []
    for name in CASES:
        batch = clear_batch(name)[0]
        layout = None
        if packed:
            batch, layout, _ = pack(batch)
        on_cpu = correct(name, batch, layout=layout)
        there = correct(name, moved(batch, device), layout=layout)
        mine = there.metrics()
        theirs = on_cpu.metrics()
        assert mine.keys() == theirs.keys()
        apart = largest_error(abs(mine[key] - theirs[key]) / (1 + abs(theirs[key])) for key in theirs)
        same = torch.equal(there.mask.cpu(), on_cpu.mask) and (
            on_cpu.weights is None or torch.allclose(there.weights.cpu(), on_cpu.weights, rtol=1e-10, atol=1e-12)
        )
        errors.append(apart)
        if not same or not apart <= 1e-9:
            wrong.append(name)
    figures(cases=len(CASES), metric_error=largest_error(errors))
    assert not wrong


@pytest.mark.parametrize("name", CONFIGS)
def test_float32(device, on_gpu, figures, name):
    """2²⁴ + 1 tokens: several blocks, the last of one token."""
    batch = large_batch((673, 24929) if on_gpu else (17, 129))
    result = correct_rollouts(*(tensor.to(device) for tensor in batch), CONFIGS[name])
    result.check()
    assert_near(result, correct_rollouts(*batch, CONFIGS[name]), figures)


@pytest.mark.parametrize(("name", "packed"), [("token", False), ("sequence", False), ("sequence", True)])
def test_cost(device, counts, figures, name, packed):
    """2²⁰ tokens: one wait of the host, few hundred kernels; lengths of packed sequences are sent without a wait."""
    bounds = [0, *torch.tensor([1 + 37 * index % 4001 for index in range(512)]).cumsum(0).tolist()]
    batch = [tensor.to(device) for tensor in large_batch((bounds[-1],) if packed else (512, 2048))]

    def work(lap=lambda: None):
        layout = SequenceLayout.packed(bounds) if packed else None
        correct_rollouts(*batch, CONFIGS[name], layout).check()
        lap()

    costs = measure.costs(work)
    peak = costs.pop("peak_bytes") / (4 * batch[0].numel())
    figures(**costs, peak_in_tensors=peak, milliseconds=measure.milliseconds(work, device)[0])
    assert costs["syncs"] == 1
    assert packed or costs["launches"] <= MOST_LAUNCHES


def test_errors_are_those_of_the_cpu(device):
    """One in the log-probs, and rollout log-probs that are a position late."""
    train, rollout, mask = large_batch((64, 256))
    mask[:] = True
    broken = train.clone()
    broken[3, 7] = torch.nan
    for tensors, message in (
        ((broken, rollout, mask), "sample 3 .*position 7 is NaN"),
        ((rollout, rollout.roll(1, 1), mask), "are shifted by"),
    ):
        messages = []
        for device_name in ("cpu", device):
            with pytest.raises(ValueError, match=message) as raised:
                correct_rollouts(*(tensor.to(device_name) for tensor in tensors), CONFIGS["token"]).check()
            messages.append(str(raised.value))
        assert messages[0] == messages[1]
