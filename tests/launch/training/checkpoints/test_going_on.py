"""Runs that go on from a checkpoint: its schedule, other layouts, and what does not fit."""

import contextlib

import pytest
import torch

from megatron_rc.launch.checkpoint_folders import iteration_folder
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
    recorded_batch,
    refusal,
    run_config,
    save_initial,
    share,
)
from tests.support.refusals import refused

GOING_ON = ["--num-layers=2", "--micro-batch-size=8", "--lr-decay-style=linear", "--lr-decay-iters=10", "--min-lr=1e-4"]


@pytest.fixture(scope="module")
def stopped(ranks, tmp_path_factory):
    """A checkpoint after two steps of a schedule."""
    folder = tmp_path_factory.mktemp("stopped")
    arguments = flags(folder, *GOING_ON, "--lr=1e-3")
    ranks.run(steps, Layout(), [*arguments, f"--save={folder}/save"], 2)
    return folder / "save", arguments


OTHER = {
    "--lr=2e-3": "value 0.001 for learning rate do not match",
    "--min-lr=0": "value 0.0001 for minimum learning rate do not match",
    "--lr-decay-iters=11": "value 10 for total number of iterations do not match",
    "--lr-warmup-iters=3": "value 0 for warmup iterations do not match",
    "--lr-decay-style=cosine": "value linear for learning rate decay style do not match",
    "--weight-decay=0.1": "value 0.0 for start weight decay do not match",
    "--adam-beta2=0.9": "was written with --adam-beta2 0.999, this run has 0.9",
    "--adam-eps=1e-6": "was written with --adam-eps 1e-08, this run has 1e-06",
}


@pytest.mark.parametrize(("other", "message"), OTHER.items(), ids=list(OTHER))
def test_another_schedule_is_refused(ranks, stopped, other, message):
    folder, arguments = stopped
    (error,) = ranks.run(refusal, Layout(), [*arguments, f"--load={folder}", other])
    assert error.startswith(f"--load {folder}: checkpoint 2")
    assert message in error
    assert "--override-opt-param-scheduler" in error


def test_another_schedule_overrides_the_checkpoints_or_is_left_alone(ranks, stopped):
    """Overridden, the third step has the numbers of a run that had them from its beginning."""
    folder, arguments = stopped
    load = [*arguments, f"--load={folder}"]
    ((_, before),) = ranks.run(steps, Layout(), load, 1, False)
    ((_, from_the_start),) = ranks.run(steps, Layout(), [*arguments, *OTHER], 3, False)
    load = [*load, *OTHER]
    assert ranks.run(steps, Layout(), [*load, "--use-checkpoint-opt-param-scheduler"], 1, False) == [(3, before)]
    assert ranks.run(steps, Layout(), [*load, "--override-opt-param-scheduler"], 1, False) == [(3, from_the_start)]


def test_a_constant_rate_goes_on_for_longer(ranks, tmp_path):
    arguments = flags(tmp_path, *SMALL, "--lr-decay-style=constant")
    ranks.run(save_initial, Layout(), [*arguments, f"--save={tmp_path}/save"])
    assert ranks.run(refusal, Layout(), [*arguments, f"--load={tmp_path}/save", "--train-iters=200"]) == [None]


def test_the_schedule_goes_on_without_the_optimizer(ranks, stopped):
    folder, arguments = stopped
    arguments = [*arguments, f"--load={folder}"]
    with_optimizer, without = (
        ranks.run(steps, Layout(), [*arguments, *more], 1, False) for more in ([], ["--no-load-optim"])
    )
    assert with_optimizer == without
    ((_, (lr, *_)),) = ranks.run(steps, Layout(), [*arguments, "--finetune"], 1, False)
    assert lr == pytest.approx(1e-3 - 1 / 10 * (1e-3 - 1e-4))


def go_back(words):
    """Make the second step once more, from the first one's checkpoint, and save it; return both steps' numbers."""
    trainer = make_trainer(words)
    begun = trainer.iteration
    trainer.update(trainer.prepare(recorded_batch(1)), 0)
    trainer.save()
    return begun, trainer.iteration


def reached(words):
    """Return the step that a trainer begins at."""
    return make_trainer(words).iteration


def test_an_older_checkpoint_can_be_gone_on_from(ranks, tmp_path):
    """Its next save takes the place of the newer one, which the tracker names until then."""
    arguments = flags(tmp_path, *SMALL)
    files = [f"--save={tmp_path}/save", f"--load={tmp_path}/save"]
    ranks.run(steps, Layout(), [*arguments, files[0]], 2)
    with refused(f"--ckpt-step 3 | --load {tmp_path}/save | it has 1, 2"):
        run_config([*arguments, files[1], "--ckpt-step=3"], 1)
    assert ranks.run(reached, Layout(), [*arguments, *files]) == [2]
    assert ranks.run(go_back, Layout(), [*arguments, *files, "--ckpt-step=1"]) == [(1, 2)]
    assert ranks.run(reached, Layout(), [*arguments, *files]) == [2]


def test_a_checkpoint_that_was_being_replaced_is_gone_on_from(ranks, tmp_path):
    """A run that is killed before the new one has its name leaves the old one beside it; in its own folder alone."""
    save = tmp_path / "save"
    arguments = flags(tmp_path, *SMALL, f"--load={save}")
    ranks.run(steps, Layout(), [*arguments, f"--save={save}"], 1)
    folder = iteration_folder(save, 1)
    replaced = folder.rename(folder.with_suffix(".replaced"))
    (error,) = ranks.run(refusal, Layout(), [*arguments, f"--save={tmp_path}/other"])
    assert "names checkpoint 1, which is not complete" in error
    assert replaced.is_dir()
    link = tmp_path / "link"
    link.symlink_to(save)
    assert ranks.run(reached, Layout(), [*arguments, f"--save={link}"]) == [1]


def grad_norms(words, is_fused):
    """The gradient norms of the steps up to the third one; with ``--save`` the first step is saved."""
    with fused_adam() if is_fused else contextlib.nullcontext():
        trainer = make_trainer(words)
        norms = []
        for index in range(trainer.iteration, 3):
            result = trainer.update(trainer.prepare(share(trainer, index)), 0)
            norms.append(result.metrics["grad_norm"])
            if index == 0 and trainer.config.checkpoints.save:
                trainer.save()
    return norms


@pytest.mark.parametrize("more", [[], ["--use-distributed-optimizer"]], ids=["plain", "distributed"])
def test_adam_of_a_gpu_and_of_torch_go_on_from_each_other(ranks, tmp_path, more):
    """The one has its step in groups, the other with each parameter; a step that starts anew moves weights further."""
    arguments = flags(tmp_path, *more, "--num-layers=2", "--micro-batch-size=16", "--lr=1e-2")
    (of_torch,) = ranks.run(grad_norms, Layout(), [*arguments, f"--save={tmp_path}/torch"], False)
    (of_gpu,) = ranks.run(grad_norms, Layout(), [*arguments, f"--save={tmp_path}/gpu"], True)
    assert of_gpu == pytest.approx(of_torch, rel=1e-5)
    for name, is_fused in (("torch", True), ("gpu", False)):
        (later,) = ranks.run(grad_norms, Layout(), [*arguments, f"--load={tmp_path}/{name}"], is_fused)
        assert later == pytest.approx(of_torch[1:], rel=1e-5), f"from the checkpoint of {name}"


EXPERTS = ["--num-experts=4", "--moe-ffn-hidden-size=32", "--qk-layernorm", "--grpo-kl-beta=0", *SMALL]
TWO = Layout(dp=2)
SPREAD = Layout(dp=2, ep=2)
DISTRIBUTED = ["--use-distributed-optimizer"]


def test_experts_go_on_spread_otherwise_or_are_refused(ranks, tmp_path):
    arguments = flags(tmp_path, *EXPERTS)
    ranks.run(steps, SPREAD, [*arguments, f"--save={tmp_path}/save", *SPREAD.flags()])
    load = [*arguments, f"--load={tmp_path}/save"]
    after = Layout(cp=2, ep=2)
    assert [step for step, _ in ranks.run(steps, after, [*load, *after.flags()], 1, False)] == [2] * after.world
    for error in ranks.run(refusal, TWO, [*load, *TWO.flags()]):
        assert "give an --expert-model-parallel-size above 1 or" in error
        assert "or --no-load-optim" in error
    assert ranks.run(refusal, TWO, [*load, *TWO.flags(), "--no-load-optim"]) == [None, None]
    together = tmp_path / "together"
    ranks.run(save_initial, Layout(), [*arguments, f"--save={together}"])
    for error in ranks.run(refusal, SPREAD, [*arguments, f"--load={together}", *SPREAD.flags()]):
        assert "give --expert-model-parallel-size 1 and --expert-tensor-parallel-size 1, or --no-load-optim" in error


WHOLE_EXPERTS = Layout(tp=2, sp=True, etp=1)


def test_experts_that_are_not_split_go_on_so_or_are_refused(ranks, tmp_path):
    arguments = flags(tmp_path, *EXPERTS)
    ranks.run(steps, WHOLE_EXPERTS, [*arguments, f"--save={tmp_path}/save", *WHOLE_EXPERTS.flags()])
    load = [*arguments, f"--load={tmp_path}/save"]
    results = ranks.run(steps, WHOLE_EXPERTS, [*load, *WHOLE_EXPERTS.flags()], 1, False)
    assert [step for step, _ in results] == [2, 2]
    stages = Layout(pp=2)
    sizes = "--expert-model-parallel-size 1 and --expert-tensor-parallel-size 1 at --tensor-model-parallel-size"
    for error in ranks.run(refusal, stages, [*load, *stages.flags()]):
        assert f"was written with {sizes} 2" in error
        assert f"does not fit {sizes} 1: give" in error
        assert "or --no-load-optim" in error
    assert ranks.run(refusal, stages, [*load, *stages.flags(), "--no-load-optim"]) == [None, None]


def save_unmarked(words):
    """Write the checkpoint of a run whose experts share the optimizer of the other layers."""
    from megatron_rc.launch.training.models import build

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_mark_experts", lambda chunk: None)
        make_trainer(words).save()


def test_an_optimizer_of_another_form_is_one_error(ranks, tmp_path):
    """Checkpoints of experts that are not split once had one optimizer; their settings do not say so."""
    arguments = flags(tmp_path, *EXPERTS)
    arguments = [*arguments, *WHOLE_EXPERTS.flags()]
    ranks.run(save_unmarked, WHOLE_EXPERTS, [*arguments, f"--save={tmp_path}/save"])
    load = [*arguments, f"--load={tmp_path}/save"]
    for error in ranks.run(refusal, WHOLE_EXPERTS, load):
        assert error.startswith(f"--load {tmp_path}/save: checkpoint 0: the optimizer's state does not fit")
        assert error.endswith("or --no-load-optim")
    assert ranks.run(refusal, WHOLE_EXPERTS, [*load, "--no-load-optim"]) == [None, None]


NO_OPTIM = "was written without the optimizer's state (--no-save-optim): give --no-load-optim"
SGD = "--optimizer=sgd"
NO_MOMENTUM = "--optimizer=sgd --sgd-momentum=0"
# Flags after the checkpoint of two steps, and words of the error.
NOT_FITTING = {
    "sgd": (SGD, "was written with --optimizer adam"),
    "distributed": (*DISTRIBUTED, "was written without --use-distributed-optimizer"),
    "layers": ("--num-layers=4", "does not fit this model and its flags (--num-layers 4; it was written with 2)"),
    "bias": (" ".join([*GPT2[4:], "--add-qkv-bias"]), "(--add-qkv-bias true; it was written with false)"),
    "heads": ("--num-attention-heads=8", "another architecture than the policy (--num-attention-heads 8;"),
}


@pytest.mark.parametrize(("after", "message"), NOT_FITTING.values(), ids=NOT_FITTING)
def test_what_does_not_fit_is_said_in_flags(ranks, stopped, after, message):
    folder, arguments = stopped
    (error,) = ranks.run(refusal, Layout(), [*arguments, *after.split(), f"--load={folder}"])
    assert message in error


# Flags before and after a checkpoint, and words of the error.
OTHERS_NOT_FITTING = {
    "no-optim": (f"--no-save-optim {SGD}", SGD, NO_OPTIM),
    "no-momentum": (NO_MOMENTUM, SGD, "was written with --sgd-momentum 0.0, this run has"),
    "no-reference": ("--grpo-kl-beta=0", "--grpo-kl-beta=0.1", "without a reference policy: give --grpo-kl-beta 0"),
    "not-distributed": (*DISTRIBUTED, "", "was written with --use-distributed-optimizer"),
}


@pytest.mark.parametrize(("before", "after", "message"), OTHERS_NOT_FITTING.values(), ids=OTHERS_NOT_FITTING)
def test_what_other_checkpoints_lack_is_said_in_flags(ranks, tmp_path, before, after, message):
    arguments = flags(tmp_path, *SMALL)
    ranks.run(save_initial, Layout(), [*arguments, *before.split(), f"--save={tmp_path}/save"])
    (error,) = ranks.run(refusal, Layout(), [*arguments, *after.split(), f"--load={tmp_path}/save"])
    assert message in error


@pytest.mark.parametrize(
    ("more", "layouts"),
    [
        (["--num-layers=4"], [Layout(tp=2, pp=2), Layout(pp=2, vpp=True), Layout()]),
        (EXPERTS, [Layout(dp=2, ep=2), Layout(tp=2, sp=True), Layout()]),
    ],
    ids=["dense", "experts"],
)
def test_a_checkpoint_scores_alike_in_every_layout(ranks, tmp_path, more, layouts):
    """The log-probs of one batch by the trainer that saves, and by trainers of other layouts that read the weights."""
    arguments = flags(tmp_path, "--lr=1e-3", "--micro-batch-size=8", *more)
    scores = []
    for layout in layouts:
        file = f"--load={tmp_path}/save" if scores else f"--save={tmp_path}/save"
        score = torch.full((SEQUENCES, LENGTH), torch.nan)
        for part in ranks.run(score_batch, layout, [*arguments, file, *layout.flags()]):
            for index, positions, values in [part] if part else []:
                score[index, positions] = values
        scores.append(score)
    assert scores[0].abs().max() > 1
    for score in scores[1:]:
        torch.testing.assert_close(score, scores[0], rtol=0, atol=2e-6)


def score_batch(words):
    """The rank's part of the log-probs, with its rows and positions; None on stages before the last.

    With ``--save`` after a step, which is saved; else with the weights of ``--load``.
    """
    if any(word.startswith("--save=") for word in words):
        trainer = make_trainer(words)
        trainer.update(trainer.prepare(share(trainer, 0)), 0)
        trainer.save()
    else:
        trainer = make_trainer([*words, "--no-load-optim"])
    batch = trainer.prepare(share(trainer, 3)).batch
    scores = trainer.score(batch)
    rows = group_rank(trainer.groups.dp) * len(batch.rows) + batch.rows.unsqueeze(1)
    return None if scores is None else (rows, batch.local.positions, scores)
