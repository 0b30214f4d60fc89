"""Many experts on a rank are counted by three: the same bytes, and as much work for any number of them."""

import pytest

from megatron_rc.launch.dry_run import many_experts
from megatron_rc.launch.dry_run.memory import stage_memories
from tests.launch.dry_run.test_memory import words_of
from tests.support.recorded_training import run_config

MORE = {
    "kept": "",
    "recomputed, of few tokens": "--recompute-granularity=full --recompute-method=uniform --recompute-num-layers=1 "
    "--seq-length=36 --micro-batch-size=1 --moe-router-topk=1 --moe-router-pre-softmax --bf16",
}


def memories(experts, *more):
    layout, words = words_of("experts-fused", "--num-layers=1", f"--num-experts={experts}", *more)
    return stage_memories(run_config(words, layout.world, engine=False))


@pytest.mark.parametrize("more", MORE.values(), ids=MORE)
def test_they_are_the_bytes_of_all_experts_one_by_one(more, monkeypatch):
    """11 on each of two ranks, which do not get equally many of the tokens."""
    few = memories(22, *more.split())
    monkeypatch.setattr(many_experts, "_FEW_EXPERTS", 11)
    assert few == memories(22, *more.split())


def test_more_experts_are_no_more_work(monkeypatch):
    from megatron.core.transformer.mlp import MLP

    made, make = [], MLP.__init__

    def counted(self, *args, **kwargs):
        made.append(self)
        make(self, *args, **kwargs)

    monkeypatch.setattr(MLP, "__init__", counted)
    numbers, parameters = [], []
    for experts in (8, 512):
        (found,) = memories(experts)
        numbers.append(len(made))
        parameters.append(found.parameters)
    assert numbers[1] == 2 * numbers[0] == 4, "two each time"
    # An expert's three matrices, half of the experts on a rank, and the router's row of each expert.
    assert parameters[1] - parameters[0] == 252 * 3 * 128 * 192 + 504 * 128
