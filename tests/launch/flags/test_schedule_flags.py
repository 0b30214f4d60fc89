"""The learning rate and the weight decay over the steps, by Megatron-LM's flags."""

import pytest

from tests.support.ranks import Layout
from tests.support.recorded_training import flags, make_trainer, run_config

SAMPLES = "--train-samples=100 --lr-decay-samples=64 --lr-warmup-samples=32 --lr-decay-style=cosine"
WSD = "--lr-decay-style=WSD --lr-wsd-decay-iters=4 --lr-wsd-decay-style=linear --train-iters=10"


def words(tmp_path, more):
    """The tiny run's flags, without its number of steps where sequences are counted."""
    return [word for word in flags(tmp_path) if "samples" not in more or "train-iters" not in word] + more.split()


def test_samples_are_steps_and_parts_of_a_step_count(tmp_path):
    config = run_config(words(tmp_path, SAMPLES))
    schedule = config.schedule
    assert (config.training.train_iters, schedule.lr_decay_iters, schedule.lr_warmup_iters) == (6, 4, 2)
    schedule = run_config(words(tmp_path, "--train-samples=100 --lr-decay-samples=60 --lr-warmup-samples=5")).schedule
    assert (schedule.lr_decay_iters, schedule.warmup_steps) == (3.75, 0.3125)


def rates(words, steps):
    """The learning rate and the weight decay of each step."""
    trainer = make_trainer(words)
    found = []
    for _ in range(steps):
        group = max(trainer.optimizer.param_groups, key=lambda group: group["weight_decay"])
        found.append((group["lr"], group["weight_decay"]))
        trainer.scheduler.step(increment=1)
    return found


def test_megatron_follows_them(ranks, tmp_path):
    more = f"{WSD} --lr-warmup-fraction=0.25 --lr-warmup-init=0.01 --weight-decay-incr-style=linear "
    more += "--start-weight-decay=0 --end-weight-decay=0.1"
    (found,) = ranks.run(rates, Layout(), words(tmp_path, more), 10)
    assert [rate for rate, _ in found] == pytest.approx(
        [0.01, 0.014, 0.018, 0.02, 0.02, 0.02, 0.02, 0.015, 0.01, 0.005]
    )
    assert [decay for _, decay in found] == pytest.approx([step / 100 for step in range(10)])
