"""An update of packed micro-batches beside one of padded micro-batches with the same responses.

One micro-batch of 256 short responses, forward and backward: nearly all of the time is the host's, which asks for each
operation. ``launches`` and ``syncs`` of a packed update say whether anything is done sequence by sequence.
"""

import statistics
import time

import pytest
import torch

from tests.gpu import measure
from tests.gpu.packages import require
from tests.gpu.training import joined, words_for
from tests.support.made_rollouts import on_device, short_responses
from tests.support.recorded_training import flags, make_trainer

RESPONSES = 256
LENGTH = 16
TIMES = 9
TE = "transformer_engine.pytorch"
LAYERS = {
    "local": ("", ("--transformer-impl=local",)),
    "Transformer Engine": (TE, ("--transformer-impl=transformer_engine",)),
    "Transformer Engine, fused angles": (TE, ("--transformer-impl=transformer_engine", "--apply-rope-fusion")),
}


@pytest.fixture(scope="module", autouse=True)
def groups(request, tmp_path_factory):
    device = request.config.getoption("--device")
    with joined(words_for(device, flags(tmp_path_factory.mktemp("groups")))):
        yield


def wait():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def update_of(device, arguments):
    """A function that makes one update, up to its gradients."""
    trainer = make_trainer(words_for(device.type, arguments))
    prepared = trainer.prepare(on_device(short_responses(RESPONSES, LENGTH), trainer.device))
    return lambda: trainer.accumulate(prepared, 0)


def median_ms(update):
    seconds = []
    for _ in range(TIMES):
        wait()
        begun = time.perf_counter()
        update()
        wait()
        seconds.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(seconds)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", LAYERS)
def test_update(device, on_gpu, figures, target, tmp_path, name):
    package, layer_flags = LAYERS[name]
    if package:
        require(package)
    arguments = flags(
        tmp_path, "--num-layers=2", f"--micro-batch-size={RESPONSES}", "--always-score", "--bf16", *layer_flags
    )
    arguments += ["--grpo-iterations=1"]
    arguments += [f"--grpo-prompts-per-step={RESPONSES // 4}", f"--global-batch-size={RESPONSES}"]
    packing = ["--rl-use-sequence-packing", f"--rl-sequence-packing-bin-size={RESPONSES * LENGTH}"]
    padded, packed = (update_of(device, [*arguments, *more]) for more in ([], packing))
    for update in (padded, packed, padded, packed):
        update()
    times = median_ms(padded), median_ms(packed)
    figures(padded_ms=times[0], packed_ms=times[1])
    if on_gpu:
        for kind, update in (("padded", padded), ("packed", packed)):
            launches, busy = measure.count_launches(update)
            figures(**{f"{kind}_launches": launches, f"{kind}_busy_ms": busy})
            figures(**{f"{kind}_syncs": measure.count_syncs(update)})
        target("packed_of_padded", times[1] / times[0], most=1.2)
