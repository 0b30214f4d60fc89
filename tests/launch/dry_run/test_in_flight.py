"""The bytes of a stage's micro-batches in flight are those that PyTorch allocates when the same layers run on a CPU."""

import pytest

from megatron_rc.launch.dry_run.activations import ActivationSizes
from megatron_rc.launch.dry_run.memory import dynamic_bytes
from tests.launch.dry_run.test_memory import COMMON, EXPERTS, LATENT
from tests.support.fake_ranks import allocated_in_flight
from tests.support.recorded_training import GPT2, LLAMA, run_config

# The stage in the middle of three, whose two layers are all that it has.
STAGES = 3
STAGE = 1
LAYERS = ["--num-layers=6", f"--pipeline-model-parallel-size={STAGES}"]

MIXTURE = [*LLAMA, *COMMON, *EXPERTS]
# Small experts, so that copies of the routed tokens take most.
MANY = ["--num-experts=8", "--moe-ffn-hidden-size=64", "--moe-router-topk=8", "--moe-router-pre-softmax"]
MODELS = {
    "dense": [*LLAMA, *COMMON],
    "gpt2": [*GPT2, *COMMON],
    "alltoall": MIXTURE,
    "allgather": [*MIXTURE, "--moe-token-dispatcher-type=allgather"],
    "many alltoall": [*MIXTURE, *MANY],
    "many allgather": [*MIXTURE, *MANY, "--moe-token-dispatcher-type=allgather"],
    "latent": [*LATENT, *COMMON, *EXPERTS, "--moe-layer-freq=1"],
}
SELECTIVE = ["--recompute-granularity=selective", "--recompute-modules"]
FULL = ["--recompute-granularity=full", "--recompute-num-layers=1"]
RECOMPUTATION = {
    "none": [],
    "uniform": [*FULL, "--recompute-method=uniform"],
    "block": [*FULL, "--recompute-method=block"],
    "core_attn": [*SELECTIVE, "core_attn"],
    "mlp": [*SELECTIVE, "mlp"],
    "moe": [*SELECTIVE, "moe", "core_attn"],
    "shared_experts": [*SELECTIVE, "shared_experts"],
}
TP = "--tensor-model-parallel-size=2"
# Ranks of a stage, and flags.
LAYOUTS = {
    "one rank": (1, []),
    "tp": (2, [TP]),
    "sp": (2, [TP, "--sequence-parallel"]),
    "cp": (2, ["--context-parallel-size=2"]),
    "ep": (2, ["--expert-model-parallel-size=2"]),
}
# Every model, recomputation and layout.
CASES = [
    *(("dense", recomputed, "one rank") for recomputed in ("uniform", "block", "core_attn", "mlp")),
    *(("dense", "none", layout) for layout in ("tp", "sp", "cp")),
    ("gpt2", "none", "one rank"),
    *(("alltoall", "none", layout) for layout in ("sp", "cp")),
    *(("allgather", recomputed, "one rank") for recomputed in ("none", "moe")),
    *(("many alltoall", recomputed, "ep") for recomputed in ("none", "uniform", "moe")),
    *(("many allgather", recomputed, "ep") for recomputed in ("none", "moe")),
    *(("latent", recomputed, "one rank") for recomputed in ("none", "core_attn", "shared_experts")),
    ("latent", "none", "sp"),
]


@pytest.mark.parametrize(("model", "recomputed", "layout"), CASES, ids=["-".join(case) for case in CASES])
def test_the_bytes_are_those_that_pytorch_allocates(model, recomputed, layout):
    ranks, split = LAYOUTS[layout]
    arguments = [*MODELS[model], *LAYERS, *RECOMPUTATION[recomputed], *split]
    config = run_config(arguments, STAGES * ranks, engine=False)
    chunk = ActivationSizes(config).chunk([config.experts is not None] * 2, is_first=False, is_last=False)
    # Each further micro-batch adds the same: a deep pipeline's number, which takes longer, is looked at once.
    for in_flight in (1, 8) if (model, layout) == ("dense", "sp") else (1, 2):
        expected = allocated_in_flight(config, STAGE, in_flight)
        assert dynamic_bytes([chunk], [0] * in_flight) == pytest.approx(expected, rel=0.1), in_flight
