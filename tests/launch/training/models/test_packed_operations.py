"""Packed micro-batches ask for about as many operations as padded ones."""

import pytest

from tests.support.made_rollouts import short_responses
from tests.support.operations import Operations
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, make_trainer

RESPONSES = 256
LENGTH = 16


def update(words):
    """(operations of a forward-only pass with a plan, of an update)."""
    trainer = make_trainer(words)
    with Operations() as prepare:
        prepared = trainer.prepare(short_responses(RESPONSES, LENGTH))
    with Operations() as step:
        trainer.accumulate(prepared, 0)
    return prepare.total, step.total


@pytest.mark.parametrize("layout", [Layout(), Layout(cp=2)], ids=str)
def test_a_packed_update_asks_for_few_operations_more(ranks, tmp_path, layout):
    arguments = flags(tmp_path, *layout.flags(), "--num-layers=2", f"--micro-batch-size={RESPONSES}", "--always-score")
    arguments += [
        f"--grpo-prompts-per-step={RESPONSES // 4}",
        f"--global-batch-size={RESPONSES}",
        "--grpo-iterations=1",
    ]
    packed = [*arguments, "--rl-use-sequence-packing", f"--rl-sequence-packing-bin-size={RESPONSES * LENGTH}"]
    padded, packed = (ranks.run(update, layout, given)[0] for given in (arguments, packed))
    for of_packed, of_padded in zip(packed, padded, strict=True):
        assert of_packed <= 2 * of_padded
