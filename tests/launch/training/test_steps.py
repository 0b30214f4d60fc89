"""Steps that are not whole, in Megatron's schedule on two pipeline stages: the same error on both, and no hang."""

from unittest import mock

import torch

from megatron_rc import StepError
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
