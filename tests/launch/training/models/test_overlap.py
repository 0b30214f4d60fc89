"""Flags that change when Megatron's ranks exchange gradients and weights take the same steps.

Buckets cut the optimizer's shares elsewhere, so sums come in another order; a large epsilon keeps Adam from dividing
rounding by itself.
"""

from unittest import mock

import pytest
import torch

from megatron_rc.launch.training.trainer import Trainer
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, make_trainer, share
from tests.support.training_runs import weights_of

OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size=2000")


def steps_and_weights(words):
    """The metrics of four steps on two recorded batches, and the weights behind them."""
    trainer = make_trainer(words)
    steps = []
    for index in range(2):
        prepared = trainer.prepare(share(trainer, index))
        steps += [trainer.update(prepared, 0).metrics for _ in range(2)]
    return steps, weights_of(trainer.chunks)


def forgetful(words):
    """The same without gathering the weights that a step has left in shares."""
    with mock.patch.object(Trainer, "gather_weights"):
        return steps_and_weights(words)


def test_overlapping_takes_the_same_steps(ranks, tmp_path):
    layout = Layout(pp=2, dp=2, vpp=True)
    arguments = flags(tmp_path, *layout.flags(), "--use-distributed-optimizer", "--lr=1e-2", "--adam-eps=1e-2")
    plain = ranks.run(steps_and_weights, layout, arguments)
    overlapped = ranks.run(steps_and_weights, layout, [*arguments, *OVERLAP])
    for (steps, weights), (expected, wanted) in zip(overlapped, plain, strict=True):
        for step, want in zip(steps, expected, strict=True):
            assert step == pytest.approx(want, rel=1e-4, abs=1e-7)
        for weight, other in zip(weights, wanted, strict=True):
            # The gradient's norm is summed by buckets, so a weight may differ by two float32 steps of its size.
            torch.testing.assert_close(weight, other, rtol=2.4e-7, atol=1e-7)
    _, weights = ranks.run(forgetful, layout, [*arguments, *OVERLAP])[0]
    assert max(float((one - other).abs().max()) for one, other in zip(weights, plain[0][1], strict=True)) > 1e-4
