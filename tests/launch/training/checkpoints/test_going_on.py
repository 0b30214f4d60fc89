"""Runs that go on from a checkpoint: its schedule, other layouts, and what does not fit."""

import contextlib

import pytest
import torch

from megatron_rc.parallel.groups import group_rank
from tests.launch.training.checkpoints.test_saving import SMALL, steps
from tests.support.fused_adam import fused_adam
from tests.support.ranks import Layout
from tests.support.recorded_training import (
    GPT2,
    LENGTH,
    SEQUENCES,
    flags,
    make_trainer,
    refusal,
    save_initial,
    share,
)
from tests.support.training_runs import agreed

GOING_ON = ["--num-layers=2", "--micro-batch-size=8", "--lr-decay-style=linear", "--lr-decay-iters=10", "--min-lr=1e-4"]


@pytest.fixture(scope="module")
def stopped(ranks, tmp_path_factory):
    """A checkpoint after two steps of a schedule."""
    folder = tmp_path_factory.mktemp("stopped")
    words = flags(folder, *GOING_ON, "--lr=1e-3")
    ranks.run(steps, Layout(), [*words, f"--save={folder}/save"], 2)
    return folder / "save", words


OTHER = {
    "--lr=2e-3": "was written with --lr 0.001, this run has 0.002: give the same, or --override-opt-param-sched",
    "--min-lr=0": "was written with --min-lr 0.0001, this run has 0.0",
    "--lr-decay-iters=11": "was written with --lr-decay-iters 10, this run has 11 (by default --train-iters)",
    "--lr-warmup-iters=3": "was written with --lr-warmup-iters 0, this run has 3",
    "--lr-decay-style=cosine": "was written with --lr-decay-style linear, this run has cosine",
    "--weight-decay=0.1": "was written with --weight-decay 0.0, this run has 0.1",
    "--adam-beta2=0.9": "was written with --adam-beta2 0.999, this run has 0.9",
    "--adam-eps=1e-6": "was written with --adam-eps 1e-08, this run has 1e-06",
}


@pytest.mark.parametrize(("other", "message"), OTHER.items(), ids=list(OTHER))
def test_another_schedule_is_refused(ranks, stopped, other, message):
    folder, words = stopped
    (said,) = ranks.run(refusal, Layout(), [*words, f"--load={folder}", other])
    assert f"checkpoint 2 {message}" in said


def test_another_schedule_overrides_the_checkpoints_or_is_left_alone(ranks, stopped):
    """Overridden, the third step has the numbers of a run that had them from its beginning."""
    folder, words = stopped
    load, other = [*words, f"--load={folder}"], [*words, *OTHER]
    ((_, before),) = ranks.run(steps, Layout(), load, 1, False)
    ((_, from_the_start),) = ranks.run(steps, Layout(), other, 3, False)
    load = [*load, *OTHER]
    assert ranks.run(steps, Layout(), [*load, "--use-checkpoint-opt-param-scheduler"], 1, False) == [(3, before)]
    assert ranks.run(steps, Layout(), [*load, "--override-opt-param-scheduler"], 1, False) == [(3, from_the_start)]
    assert all(mine != theirs for mine, theirs in zip(from_the_start, before, strict=True))


def grad_norms(words, batches, fused):
    """The gradient norms of a step on each batch; the last is saved if asked for."""
    with fused_adam() if fused else contextlib.nullcontext():
        trainer = make_trainer(words)
        found = [trainer.update(trainer.prepare(share(trainer, index)), 0)["grad_norm"] for index in batches]
        if trainer.config.checkpoints.save:
            trainer.save()
    return found


@pytest.mark.parametrize("more", [[], ["--bf16", "--use-distributed-optimizer"]], ids=["plain", "distributed"])
def test_adam_of_a_gpu_and_of_torch_go_on_from_each_other(ranks, tmp_path, more):
    """The one has its step in groups, the other with each parameter; a step that starts anew moves weights further."""
    words = flags(tmp_path, *more, "--num-layers=2", "--lr=1e-2")
    (expected,) = ranks.run(grad_norms, Layout(), words, [0, 1, 2, 3], False)
    for before, others in ((True, (True, False)), (False, (True,))):
        save, load = (f"--{name}={tmp_path}/{before}" for name in ("save", "load"))
        (first,) = ranks.run(grad_norms, Layout(), [*words, save], [0, 1], before)
        for after in others:
            (later,) = ranks.run(grad_norms, Layout(), [*words, load], [2, 3], after)
            assert first + later == pytest.approx(expected, rel=1e-2 if more else 1e-5), (before, after)


def test_the_schedule_goes_on_without_the_optimizer(ranks, stopped):
    folder, words = stopped
    words = [*words, f"--load={folder}"]
    with_optimizer, without = (
        ranks.run(steps, Layout(), [*words, *more], 1, False) for more in ([], ["--no-load-optim"])
    )
    assert with_optimizer == without
    ((_, (lr, *_)),) = ranks.run(steps, Layout(), [*words, "--finetune"], 1, False)
    assert lr == pytest.approx(1e-3 - 1 / 10 * (1e-3 - 1e-4))


def test_the_default_of_the_decay_is_the_run(ranks, tmp_path):
    words = flags(tmp_path, *SMALL, "--lr-decay-style=linear", "--train-iters=4")
    ranks.run(save_initial, Layout(), [*words, f"--save={tmp_path}/save"])
    words += [f"--load={tmp_path}/save", "--train-iters=8"]
    (said,) = ranks.run(refusal, Layout(), words)
    assert "with --lr-decay-iters 4, this run has 8 (by default --train-iters): add --lr-decay-iters 4," in said
    assert ranks.run(refusal, Layout(), [*words, "--lr-decay-iters=4"]) == [None]


def test_a_constant_rate_goes_on_for_longer_unless_its_warm_up_is_a_share_of_the_run(ranks, tmp_path):
    words, share_of_run = flags(tmp_path, *SMALL, "--lr-decay-style=constant"), "--lr-warmup-fraction=0.5"
    for more in ([], [share_of_run]):
        ranks.run(save_initial, Layout(), [*words, *more, f"--save={tmp_path}/save{len(more)}"])
    longer = [*words, "--train-iters=200"]
    assert ranks.run(refusal, Layout(), [*longer, f"--load={tmp_path}/save0"]) == [None]
    longer += [f"--load={tmp_path}/save1"]
    (said,) = ranks.run(refusal, Layout(), [*longer, share_of_run])
    assert "was written with --lr-warmup-iters 50.0, this run has 100.0: give --lr-warmup-iters 50.0 in" in said
    assert ranks.run(refusal, Layout(), [*longer, "--lr-warmup-iters=50"]) == [None]


EXPERTS = ["--num-experts=4", "--moe-ffn-hidden-size=32", "--qk-layernorm", "--grpo-kl-beta=0", *SMALL]
TWO, SPREAD, DISTRIBUTED = Layout(dp=2), Layout(dp=2, ep=2), ["--use-distributed-optimizer"]
# Layout and flags of the run that writes, of the run that reads, and the difference with its remedy.
FORMS = {
    "to-plain": (TWO, DISTRIBUTED, TWO, [], "with --use-distributed-optimizer"),
    "to-distributed": (TWO, [], TWO, DISTRIBUTED, "without --use-distributed-optimizer"),
    "together": (TWO, EXPERTS, SPREAD, EXPERTS, "size 1, or --no-load-optim"),
    "spread": (SPREAD, EXPERTS, TWO, EXPERTS, "give an --expert-model-parallel-size above 1, or --no-load-optim"),
}


@pytest.mark.parametrize(("before", "wrote", "after", "reads", "message"), FORMS.values(), ids=FORMS)
def test_an_optimizers_state_of_another_form_is_named(ranks, tmp_path, before, wrote, after, reads, message):
    words = flags(tmp_path, *SMALL)
    ranks.run(save_initial, before, [*words, *wrote, f"--save={tmp_path}/save", *before.flags()])
    load = [*words, *reads, f"--load={tmp_path}/save", *after.flags()]
    assert message in agreed(ranks.run(refusal, after, load))
    assert ranks.run(refusal, after, [*load, "--no-load-optim"]) == [None, None]


@pytest.mark.parametrize(
    ("after", "more"),
    [
        (Layout(cp=2, ep=2), []),
        pytest.param(Layout(dp=4, ep=4), [*DISTRIBUTED, "--micro-batch-size=4"], marks=pytest.mark.long),
    ],
    ids=["over-context", "over-more-distributed"],
)
def test_experts_go_on_spread_otherwise(ranks, tmp_path, after, more):
    words = flags(tmp_path, *EXPERTS, *more)
    ranks.run(steps, SPREAD, [*words, f"--save={tmp_path}/save", *SPREAD.flags()])
    found = ranks.run(steps, after, [*words, f"--load={tmp_path}/save", *after.flags()], 1, False)
    assert [reached for reached, _ in found] == [2] * after.world


NO_OPTIM = "was written without the optimizer's state (--no-save-optim): give --no-load-optim"
SGD, NO_MOMENTUM = "--optimizer=sgd", "--optimizer=sgd --sgd-momentum=0"
NOT_FITTING = {
    "no-optim": (f"--no-save-optim {SGD}", SGD, NO_OPTIM),
    "no-momentum": (NO_MOMENTUM, SGD, "was written with --sgd-momentum 0.0, this run has"),
    "no-reference": ("--grpo-kl-beta=0", "--grpo-kl-beta=0.1", "without a reference policy: give --grpo-kl-beta 0"),
    "sgd": ("", SGD, "was written with --optimizer adam"),
    "adam": (SGD, "", "was written with --optimizer sgd"),
    "layers": ("", "--num-layers=4", "does not fit this model and its flags (--num-layers 4; it was written with 2)"),
    "bias": ("", " ".join([*GPT2[4:], "--add-qkv-bias"]), "(--add-qkv-bias true; it was written with false)"),
    "bf16": ("", "--bf16 --rollout-dtype=bf16", ""),
}


@pytest.mark.parametrize(("before", "after", "message"), NOT_FITTING.values(), ids=NOT_FITTING)
def test_what_does_not_fit_is_said_in_flags(ranks, tmp_path, before, after, message):
    words = flags(tmp_path, *SMALL)
    ranks.run(save_initial, Layout(), [*words, *before.split(), f"--save={tmp_path}/save"])
    (said,) = ranks.run(refusal, Layout(), [*words, *after.split(), f"--load={tmp_path}/save"])
    assert message in said


@pytest.mark.parametrize(
    ("more", "layouts"),
    [
        (["--num-layers=4"], [Layout(tp=2, pp=2), Layout(pp=2, vpp=True), Layout(cp=2), Layout()]),
        (EXPERTS, [Layout(dp=2, ep=2), Layout(tp=2, sp=True), Layout()]),
    ],
    ids=["dense", "experts"],
)
def test_a_checkpoint_scores_alike_in_every_layout(ranks, tmp_path, more, layouts):
    """The log-probs of one batch, whatever layout reads the weights."""
    words = flags(tmp_path, "--lr=1e-3", "--micro-batch-size=8", *more)
    ranks.run(steps, layouts[0], [*words, f"--save={tmp_path}/save", *layouts[0].flags()])
    scores = []
    for layout in layouts:
        score = torch.full((SEQUENCES, LENGTH), torch.nan)
        for part in ranks.run(score_loaded, layout, [*words, f"--load={tmp_path}/save", *layout.flags()]):
            for index, positions, values in [part] if part else []:
                score[index, positions] = values
        scores.append(score)
    assert scores[0].abs().max() > 1
    for score in scores[1:]:
        torch.testing.assert_close(score, scores[0], rtol=0, atol=2e-6)


def score_loaded(words):
    """The rank's part of the log-probs, with its rows and positions; None on stages before the last."""
    trainer = make_trainer([*words, "--no-load-optim"])
    batch = trainer.prepare(share(trainer, 3)).batch
    scores = trainer.score(batch)
    rows = group_rank(trainer.groups.dp) * len(batch.rows) + batch.rows.unsqueeze(1)
    return None if scores is None else (rows, batch.local.positions, scores)
