"""The learning rate and the weight decay over the steps, by Megatron-LM's flags."""

import pytest

from tests.support.ranks import Layout
from tests.support.recorded_training import flags, make_trainer

WSD = "--lr-decay-style=WSD --lr-wsd-decay-iters=4 --lr-wsd-decay-style=linear --train-iters=10"


def rates(words, steps):
    """The learning rate and the weight decay of each step."""
    trainer = make_trainer(words)
    results = []
    for _ in range(steps):
        group = max(trainer.optimizer.param_groups, key=lambda group: group["weight_decay"])
        results.append((group["lr"], group["weight_decay"]))
        trainer.scheduler.step(increment=1)
    return results


def test_megatron_follows_them(ranks, tmp_path):
    more = f"{WSD} --lr-warmup-fraction=0.25 --lr-warmup-init=0.01 --weight-decay-incr-style=linear "
    more += "--start-weight-decay=0 --end-weight-decay=0.1"
    (results,) = ranks.run(rates, Layout(), flags(tmp_path, *more.split()), 10)
    assert [rate for rate, _ in results] == pytest.approx(
        [0.01, 0.014, 0.018, 0.02, 0.02, 0.02, 0.02, 0.015, 0.01, 0.005]
    )
    assert [decay for _, decay in results] == pytest.approx([step / 100 for step in range(10)])
