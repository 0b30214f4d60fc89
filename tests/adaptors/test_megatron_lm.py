"""Megatron-LM's calls on real Megatron-Core: the launcher's gradients, on pipeline stages, context and data ranks."""

import argparse
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_rc import add_rollout_correction_args
from megatron_rc.adaptors.megatron_lm import MegatronCorrection
from megatron_rc.parallel import ParallelGroups
from tests.support.paths import ROOT
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, make_trainer, recorded_batch


def parsed(arguments):
    return add_rollout_correction_args(argparse.ArgumentParser()).parse_known_args(arguments)[0]


def whole(values, layout, cp):
    """Whole sequences from the slices of the context-parallel ranks."""
    shards = [torch.empty_like(values) for _ in range(cp.size())]
    dist.all_gather(shards, values.contiguous(), group=cp)
    return layout.restore(shards)


def data_of(piece, trainer):
    """A micro-batch of Megatron-LM's data iterator, with the values that only the last stage knows."""
    cp = trainer.groups.cp
    pp = trainer.groups.pp
    old = piece.train_log_probs if piece.train_log_probs is not None else torch.zeros_like(piece.rollout_log_probs)
    dist.broadcast(old, dist.get_global_rank(pp, pp.size() - 1), group=pp)
    advantages = piece.advantages.clone()
    dist.broadcast(advantages, dist.get_global_rank(pp, pp.size() - 1), group=pp)
    fields = {"tokens": piece.tokens, "position_ids": piece.positions, "labels": piece.labels}
    fields |= {"loss_mask": piece.response_mask.float(), "rollout_log_probs": piece.rollout_log_probs}
    fields |= {"old_log_probs": old}
    return {name: whole(value, piece.layout, cp) for name, value in fields.items()} | {"advantages": advantages}


def gradients(trainer):
    return [parameter.main_grad.clone() for chunk in trainer.chunks for parameter in chunk.parameters()]


def both_ways(arguments):
    """Gradients of the launcher and of the adaptor for one step of real rollouts, and the schedule's log."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    trainer = make_trainer(arguments)
    prepared = trainer.prepare(recorded_batch(0, trainer.groups.dp.rank(), trainer.groups.dp.size()))
    batch = prepared.batch
    trainer.accumulate(prepared, 0)
    launchers_gradients = gradients(trainer)
    total = None
    data = [data_of(batch.local.piece(cut), trainer) for cut in batch.cuts[0]]
    correction = MegatronCorrection(lambda: parsed(arguments))
    trainer.model[0].config.finalize_model_grads_func = None
    for chunk in trainer.model:
        chunk.zero_grad_buffer()
    several = len(trainer.model) > 1
    logged = correction.around(get_forward_backward_func)()(
        forward_step_func=correction.forward_step,
        data_iterator=[iter(data) for _ in trainer.model] if several else iter(data),
        model=list(trainer.model),
        num_microbatches=len(data),
        forward_only=False,
        seq_length=batch.length_of_model,
        micro_batch_size=batch.rows_of_model,
    )
    sums = torch.zeros(2)
    if logged:
        sums = torch.stack([entry["policy loss"] for entry in logged]).sum(0)
        dist.all_reduce(sums, group=trainer.groups.dp_cp)
        total = float(sums[0] / sums[1])
    metrics = correction.correction.loss_metrics()
    return launchers_gradients, gradients(trainer), total, metrics["loss/total"]


MODES = {"decoupled": [], "bypass": ["--bypass-mode", "--loss-type=reinforce"]}
LAYOUTS = [(Layout(pp=2, vpp=True), "bypass"), (Layout(pp=2, cp=2), "decoupled")]


@pytest.mark.parametrize(("layout", "mode"), LAYOUTS, ids=str)
def test_megatrons_schedule_makes_the_launchers_gradients(ranks, tmp_path, layout, mode):
    more = ["--vocab-size=16", "--grpo-kl-beta=0", "--loss-aggregation=seq-mean-token-mean", *MODES[mode]]
    everywhere = ranks.run(both_ways, layout, flags(tmp_path, *more, *layout.flags()))
    for expected, got, logged, total in everywhere:
        assert sum(float(gradient.norm()) for gradient in expected) > 0.01
        for gradient, expected_gradient in zip(got, expected, strict=True):
            torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)
        assert total != 0
        if logged is not None:
            # In bypass mode the denominator is not known before the end of the step.
            assert mode == "bypass" or logged == pytest.approx(total, rel=1e-5)
    assert any(logged is not None for _, _, logged, _ in everywhere)


def micro_batch(**changes):
    shape = (2, 4)
    data = {"tokens": torch.ones(shape, dtype=torch.long), "position_ids": torch.arange(4).expand(shape)}
    data |= {"labels": torch.ones(shape, dtype=torch.long), "loss_mask": torch.ones(shape)}
    data |= {"rollout_log_probs": -torch.ones(shape), "old_log_probs": -torch.ones(shape), "advantages": torch.ones(2)}
    return {name: value for name, value in (data | changes).items() if value is not None}


def one_step(arguments, **changes):
    """Run a step of one micro-batch in this process; the schedule calls the forward step and its loss."""
    correction = MegatronCorrection(lambda: parsed(arguments.split()), ParallelGroups())
    settings = SimpleNamespace(finalize_model_grads_func=lambda model: None, calculate_per_token_loss=False)
    logits = torch.zeros(2, 4, 3, requires_grad=True)

    class Model:
        config = settings

        def __call__(self, tokens, positions, mask):
            return logits

    def schedule(*, forward_step_func, data_iterator, model, num_microbatches):
        output, loss = forward_step_func(data_iterator, model)
        return loss(output)

    run = correction.around(lambda: schedule)()
    data = iter([micro_batch(**changes)])
    return run(forward_step_func=correction.forward_step, data_iterator=data, model=Model(), num_microbatches=1)


def test_masks_of_any_dtype_are_turned():
    (loss, tokens, log), *_ = (one_step("--rollout-is token", loss_mask=torch.ones(2, 4, dtype=t)) for t in (int, bool))
    assert loss.item() == pytest.approx(-(3**-1) * 2.718281828, rel=1e-5)  # -A r w, w = 1
    assert tokens.item() == 1
    assert (log["policy loss"][0] / log["policy loss"][1]).item() == pytest.approx(loss.item())


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        ("", {"rollout_log_probs": None}, "rollout_log_probs is missing in a micro-batch"),
        ("--grpo-kl-beta 0.1", {}, "ref_log_probs is missing in a micro-batch"),
        ("", {"rollout_log_probs": torch.full((2, 4), torch.nan)}, "is NaN"),
        ("", {"advantages": torch.ones(3)}, r"advantages of a micro-batch has shape \(3,\): expected \(2,\)"),
        ("--policy-loss distill", {}, "distillation needs a teacher"),
        ("--bypass-mode --loss-type distill", {}, "distillation needs a teacher"),
        ("--distillation-coef 0.5", {}, "distillation needs a teacher"),
        ("--proximal-interpolation", {}, "proximal_interpolation=True: .* drop it"),
        ("--rollout-rs group_mean_k1 --rollout-rs-threshold 0.9_1.1", {}, "rollout_rs='group_mean_k1' needs prompts"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:24],
)
def test_steps_that_cannot_be(arguments, changes, message):
    with pytest.raises(ValueError, match=message):
        one_step(arguments, **changes)


def test_a_schedule_that_nobody_wrapped():
    correction = MegatronCorrection(lambda: parsed([]), ParallelGroups())
    with pytest.raises(ValueError, match=r"set megatron\.training\.training\.get_forward_backward_func"):
        correction.forward_step(iter([micro_batch()]), None)


@pytest.mark.filterwarnings("ignore:.* is deprecated:DeprecationWarning")  # in the arguments of Megatron-LM's own flags
def test_megatrons_parser_takes_the_flags(monkeypatch):
    """Its own ``--grpo-*`` flags stay; ``make test-latest`` runs this."""
    arguments = pytest.importorskip("megatron.training.arguments", reason="this Megatron-Core brings no parser")
    flags = "--rollout-is token --policy-loss gspo --grpo-clamp-eps-upper 0.3 --grpo-kl-beta 0"
    monkeypatch.setattr("sys.argv", ["train.py", *flags.split()])
    args = arguments.parse_args(extra_args_provider=add_rollout_correction_args)
    correction = MegatronCorrection(lambda: args, ParallelGroups()).correction
    assert correction.config.rollout_is == "token"
    loss = correction.loss
    assert (loss.algorithm, loss.clip_low, loss.clip_high, loss.kl_coef) == ("gspo", 0.01, 0.3, 0.0)


@pytest.mark.processes
@pytest.mark.parametrize("mode", MODES)
def test_the_page_trains_with_megatrons_own_loop(mode):
    """``pretrain`` of megatron.training, with an evaluation in between; ``make test-latest`` runs this."""
    pytest.importorskip("megatron.training.arguments", reason="this Megatron-Core brings no training loop")
    flags = ["--rollout-is=token", "--rollout-rs=token_k1", "--rollout-rs-threshold=0.5_2", *MODES[mode]]
    command = [sys.executable, "-m", "tests.adaptors.megatron_training", *flags]
    # Megatron's loop calls torch.compile, which needs a C++ compiler on a CPU.
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCH_COMPILE_DISABLE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"iteration +4/ +4 .* number of skipped iterations: +0 ", done.stdout)
    assert "validation loss at iteration 2 | policy loss value:" in done.stdout
    assert float(re.search(r"^weights (.*)$", done.stdout, re.MULTILINE)[1]) > 0.1
