"""A loss that one replica cannot make, in Megatron's schedule on two stages: the same error on all, and no hang."""

import dataclasses
import re

import pytest

from megatron_rc import StepError
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.groups import group_rank
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, make_trainer, recorded_batch

BROKEN = {
    "decoupled": (
        lambda local: {"weights": None},
        r"a loss of this step was refused \(zero.*rollout_is='token' applies weights, and the micro-batch has none",
    ),
    "bypass": (
        lambda local: {"rollout_log_probs": local.rollout_log_probs.bfloat16()},
        r"refused \(zero the gradients and call reset_step\(\) .*\): rollout_log_probs is torch\.bfloat16",
    ),
}


def accumulate_what_one_replica_breaks(words, mode):
    """What a step says that one replica gives its loss wrongly, and whether it is made after a reset."""
    trainer = make_trainer(words)
    groups = ParallelGroups.from_megatron()
    prepared = trainer.prepare(recorded_batch(0, group_rank(groups.dp), 2))
    broken = prepared
    if group_rank(groups.dp) == 1 and groups.is_last_stage:
        batch = prepared.batch
        local = dataclasses.replace(batch.local, **BROKEN[mode][0](batch.local))
        broken = dataclasses.replace(prepared, batch=dataclasses.replace(batch, local=local))
    try:
        trainer.accumulate(broken, 0)
        message = ""
    except StepError as error:
        message = str(error)
    trainer.correction.reset_step()
    metrics = trainer.accumulate(prepared, 0)
    return message, metrics["loss/total"]


@pytest.mark.parametrize("mode", BROKEN)
def test_a_loss_that_cannot_be_made_is_the_same_error_on_all_stages_and_replicas(ranks, tmp_path, mode):
    layout = Layout(pp=2, dp=2)
    objective = ["--bypass-mode", "--loss-type=reinforce"] if mode == "bypass" else []
    words = flags(tmp_path, *objective, "--micro-batch-size=2", *layout.flags())
    found = ranks.run(accumulate_what_one_replica_breaks, layout, words, mode)
    assert len({message for message, _ in found}) == 1
    assert re.search(BROKEN[mode][1], found[0][0])
    assert len({loss for _, loss in found}) == 1
    assert found[0][1] != 0
