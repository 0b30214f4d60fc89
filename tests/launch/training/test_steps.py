"""Steps that are not whole or not made, in Megatron's schedule on two stages: the same error on both, and no hang."""

import dataclasses
import re
from unittest import mock

import pytest
import torch

from megatron_rc import StepError
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.groups import group_rank
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, make_trainer, recorded_batch


def accumulate_without_zeroing(words):
    """What a second schedule on gradients that were scaled says, and the gradients of a third after a reset."""
    trainer = make_trainer(words)
    prepared = trainer.prepare(recorded_batch(0))
    trainer.accumulate(prepared, 0)
    first = gradients(trainer)
    kind, message = type(trainer.model[0]), ""
    with mock.patch.object(kind, "zero_grad_buffer", return_value=None):
        try:
            trainer.accumulate(prepared, 0)
        except StepError as error:
            message = str(error)
    trainer.correction.reset_step()
    trainer.accumulate(prepared, 0)
    return message, all(torch.equal(one, other) for one, other in zip(first, gradients(trainer), strict=True))


def gradients(trainer):
    return [parameter.main_grad.clone() for chunk in trainer.chunks for parameter in chunk.parameters()]


def test_scaled_gradients_are_not_added_to_on_any_stage(ranks, tmp_path):
    words = flags(tmp_path, "--bypass-mode", "--loss-type=reinforce", *Layout(pp=2).flags())
    (first, first_is_same), (last, last_is_same) = ranks.run(accumulate_without_zeroing, Layout(pp=2), words)
    assert first == last
    assert first.startswith("two schedules without an optimizer step")
    assert first_is_same
    assert last_is_same


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
