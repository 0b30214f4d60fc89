"""What is said of memory that a device does not have: the largest part, and the flag that makes it smaller."""

import pytest

from megatron_rc.launch.dry_run.memory import KINDS, StageMemory
from megatron_rc.launch.dry_run.memory_report import GIB, check_fit
from megatron_rc.launch.errors import ConfigurationError
from tests.support.recorded_training import flags, run_config

SPLIT = "raise --tensor-model-parallel-size or --pipeline-model-parallel-size"
FULL = ["--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1"]
CRITIC = ["--advantage-estimator=gae"]


def needs(large, stage=0):
    """A rank whose one part is of 3 GiB, and the others of half a GiB together."""
    parts = {name: (3 * GIB if name == large else GIB // 2 // len(KINDS)) for name in KINDS}
    return StageMemory(stage=stage, parameters=1, in_flight=1, **parts)


@pytest.mark.parametrize(
    ("part", "more", "remedy"),
    [
        ("weights", [], SPLIT),
        ("optimizer", [], "give --use-distributed-optimizer"),
        ("optimizer", ["--use-distributed-optimizer"], f"start more data-parallel ranks, or {SPLIT}"),
        ("reference", [], f"give --grpo-kl-beta 0, or {SPLIT}"),
        ("critic", CRITIC, f"give --critic-offload, use an --advantage-estimator that needs none, or {SPLIT}"),
        ("critic", [*CRITIC, "--critic-offload"], f"use an --advantage-estimator that needs none, or {SPLIT}"),
        ("teacher", [], f"use a smaller teacher, --teacher-url, or {SPLIT}"),
        ("batch", [], "lower --grpo-prompts-per-step"),
        ("activations", [], "lower --micro-batch-size, or give --recompute-granularity full"),
        ("activations", FULL, "lower --micro-batch-size, or raise --context-parallel-size"),
        ("logits", [], "give --fused-linear-log-probs, or lower --micro-batch-size"),
    ],
)
def test_the_largest_part_is_named_with_what_makes_it_smaller(tmp_path, part, more, remedy):
    config = run_config(flags(tmp_path, *more))
    check_fit(config, [needs("nothing"), needs(part, stage=1)], None, 4.0)
    with pytest.raises(ConfigurationError) as error:
        check_fit(config, [needs("nothing"), needs(part, stage=1)], None, 3.0)
    arguments = {"batch": "the rollout batch", "critic": "the critic's", "teacher": "the teacher's"}.get(part, part)
    message = (
        f"--device-memory-gib 3 is less than the 3.4 GiB of a rank of stage 1, of which 3.0 are {arguments}: {remedy}"
    )
    assert str(error.value) == message


def test_the_engine_counts_on_the_first_stage_alone(tmp_path):
    config = run_config(flags(tmp_path))
    check_fit(config, [needs("nothing"), needs("nothing", stage=1)], 2 * GIB, 3.0)
    remedy = "of which 2.0 are the engine's: use --rollout-engine vllm-server or sglang-server"
    with pytest.raises(ConfigurationError, match=f"less than the 2.5 GiB of a rank of stage 0, {remedy}"):
        check_fit(config, [needs("nothing")], 2 * GIB, 2.0)
    check_fit(config, [needs("nothing", stage=1)], 2 * GIB, 1.0)
