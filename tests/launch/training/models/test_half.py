"""--fp16 takes float32's steps to float16's precision; a step whose scaled gradients overflow is left out."""

import re
from types import SimpleNamespace

import pytest
import torch

from megatron_rc.launch.errors import RunError
from megatron_rc.launch.training.bad_steps import BadSteps
from megatron_rc.launch.training.checks.step_checks import LeftOut
from megatron_rc.launch.training.trainer import Outcome, StepResult
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, make_trainer, run_config, share

# Its products with the gradients here are no float16 numbers.
TOO_HIGH = 2**24


def steps(words, number):
    """The metrics of this many steps on a recorded batch."""
    trainer = make_trainer(words)
    prepared = trainer.prepare(share(trainer, 0))
    return [trainer.update(prepared, 0).metrics for _ in range(number)]


def settle(words):
    """The metrics of steps until one is made, whether the others changed a weight, and the scale after a restart."""
    trainer = make_trainer(words)
    weights = [weight.detach().clone() for weight in trainer.chunks[0].parameters()]
    prepared = trainer.prepare(share(trainer, 0))
    rows = []
    while not rows or "grad_norm" not in rows[-1]:
        same = all(map(torch.equal, trainer.chunks[0].parameters(), weights))
        rows.append(trainer.update(prepared, 0).metrics | {"same": same})
    trainer.save()
    again = make_trainer([*words, f"--load={trainer.config.checkpoints.save}"])
    return rows, float(again.optimizer.get_loss_scale())


def test_it_takes_the_steps_of_float32(ranks, tmp_path):
    layout = Layout(tp=2, sp=True)
    arguments = flags(tmp_path, *layout.flags(), "--lr=1e-3", "--adam-eps=1e-2")
    plain = ranks.run(steps, layout, arguments, 2)[0]
    half = ranks.run(steps, layout, [*arguments, "--fp16", "--initial-loss-scale=1024"], 2)[0]
    for step, want in zip(half, plain, strict=True):
        assert step.pop("loss_scale") == 1024
        assert step == pytest.approx(want, rel=4e-3, abs=2e-3)
    assert half[1]["grad_norm"] != plain[1]["grad_norm"]


def test_an_overflow_is_no_bad_step(ranks, tmp_path):
    """Each halves the scale, until a step is the one that float32 makes; a checkpoint keeps the scale."""
    arguments = flags(tmp_path, f"--save={tmp_path}/saved", "--lr=1e-3", "--use-distributed-optimizer")
    arguments += ["--overlap-param-gather"]
    ((plain,), _) = ranks.run(steps, Layout(dp=2), arguments, 1)
    scale = [f"--initial-loss-scale={TOO_HIGH}", "--hysteresis=1"]
    rows, kept = ranks.run(settle, Layout(dp=2), [*arguments, "--fp16", *scale])[0]
    *overflows, made = rows
    assert overflows
    assert all(row["same"] for row in rows)
    assert [row["loss_scale"] for row in overflows] == [TOO_HIGH / 2**number for number in range(1, len(rows))]
    assert [row["skipped_steps"] for row in rows] == [*range(1, len(rows)), len(overflows)]
    assert {row["bad_steps"] for row in rows} == {0}
    assert {row["policy/noise_floor"] for row in rows} == {0}
    assert made["grad_norm"] == pytest.approx(plain["grad_norm"], rel=4e-3)
    assert kept == made["loss_scale"] == overflows[-1]["loss_scale"]


FALLING = [128.0, 64.0, 32.0, 16.0, 8.0, 4.0, 2.0, 1.0]


@pytest.mark.parametrize(
    ("more", "scales"), [("", FALLING), ("--min-loss-scale=512", [512.0] * 3), ("--loss-scale=4", [4.0] * 3)]
)
def test_steps_in_a_row_end_a_run_whose_scale_cannot_fall(tmp_path, more, scales):
    config = run_config(flags(tmp_path, "--fp16", "--max-skipped-steps=3", *more.split()))
    trainer = SimpleNamespace(config=config, iteration=0, left_out=LeftOut())
    steps = BadSteps(config, trainer, None)

    def leave_out(scale):
        """Leave one step out, whose loss scale was this."""
        trainer.update = lambda *_: StepResult({"loss_scale": scale}, Outcome.OVERFLOW)
        result = steps.update(None, object(), 0, 0)
        trainer.iteration += 1
        trainer.left_out.steps += 1
        steps.check(result.outcome, result.metrics)

    for scale in scales[:-1]:
        leave_out(scale)
    name = "loss-scale" if "--loss-scale" in more else "initial-loss-scale"
    expected = f"scaled gradients were out of float16's range: give --{name} below {scales[-1]:g}"
    with pytest.raises(RunError, match=re.escape(expected)):
        leave_out(scales[-1])
