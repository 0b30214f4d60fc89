"""The correction alone, with all its metrics, beside one as verl has it: a tensor and a wait of the host a metric."""

from functools import partial

import pytest

from benchmarks import naive
from megatron_rc import correct_rollouts
from tests.gpu import measure
from tests.gpu.check_correction import CONFIGS, large_batch

SHAPES = {"2^20": (512, 2048), "2^24": (512, 32768)}
MILLISECONDS = 3.0  # of the GPU's work, eager, 2²⁰ tokens


def ours(*batch, compile=False):
    result = correct_rollouts(*batch, CONFIGS["token"], compile=compile)
    result.check()
    return result.metrics()


CONTENDERS = {"eager": ours, "compiled": partial(ours, compile=True), "as verl": naive.correct}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CONTENDERS)
def test_whole_correction(device, on_gpu, figures, target, name, shape):
    """``milliseconds`` until the metrics are on the host, of which the GPU works ``busy_ms``."""
    batch = [tensor.to(device) for tensor in large_batch(SHAPES[shape] if on_gpu else (8, 128))]

    def work(lap=lambda: None):
        CONTENDERS[name](*batch)
        lap()

    figures(milliseconds=measure.milliseconds(work, device)[0])
    if on_gpu:
        costs = measure.costs(work)
        figures(peak_in_tensors=costs.pop("peak_bytes") / (4 * batch[0].numel()), **costs)
        if name == "eager" and shape == "2^20":
            target("busy_ms", costs["busy_ms"], most=MILLISECONDS)
