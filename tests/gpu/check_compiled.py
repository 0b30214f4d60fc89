"""The compiled correction on the device: the numbers of the CPU, and its cost. Last of all, as compiling takes long."""

import time

import pytest

from megatron_rc import correct_rollouts
from tests.gpu import measure
from tests.gpu.check_correction import CONFIGS, assert_near, large_batch


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", CONFIGS)
def test_compiled(device, on_gpu, figures, name):
    batch = large_batch((512, 2048) if on_gpu else (8, 128))
    there = [tensor.to(device) for tensor in batch]
    begun = time.monotonic()
    compiled = correct_rollouts(*there, CONFIGS[name], compile=True)
    figures(compile_seconds=time.monotonic() - begun)
    assert_near(compiled, correct_rollouts(*batch, CONFIGS[name]), figures)
    if on_gpu:
        figures(**measure.costs(lambda: correct_rollouts(*there, CONFIGS[name], compile=True).check()))
