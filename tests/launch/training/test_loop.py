"""The training loop on the ranks of the pool: resumption, failures on one rank, steps that must not be made."""

import contextlib
import io
import json
import math
import os
import signal
from dataclasses import replace
from unittest import mock

import pytest
import torch

from megatron_rc import RolloutCorrection, wrap_finalize
from megatron_rc.launch.engines import Sample
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.tasks import Problem, make_task
from megatron_rc.launch.training.run_page.page import page_data
from megatron_rc.parallel import ParallelGroups
from megatron_rc.records.rollout import load_rollouts, save_rollouts
from tests.support.documented import undocumented
from tests.support.ranks import Layout, drawing
from tests.support.recorded_training import GPT2, LLAMA, flags, make_trainer, recorded_batch, save_initial

# One small step an iteration, from rollouts of a real engine.
LIVE = ["--grpo-iterations=1", "--lr=1e-3", "--rollout-rs-threshold=0.5_2.5,10", "--run-name=run", "--lr-decay-iters=9"]
SHORT = ["--micro-batch-size=8", "--num-layers=2"]
LIVE += SHORT
# The same with problems that are held out.
HELD_OUT = ["--task=python:tests.support.user_rewards:Doubles", "--reward=exact", "--run-name=run", "--lr=1e-3"]
HELD_OUT += ["--max-response-length=8", "--grpo-iterations=1", "--micro-batch-size=2", "--num-layers=2"]
HELD_OUT += ["--grpo-prompts-per-step=2", "--grpo-group-size=2", "--global-batch-size=4"]
HELD_OUT += ["--rollout-rs-threshold=0.01_100,10"]


def run_training(words):
    """``train`` as under torchrun; what it raised."""
    from megatron_rc.launch.distributed import AgreedError
    from megatron_rc.launch.training.loop import train

    config, task = configure(words, torch.distributed.get_world_size())
    try:
        train(config, task)
    except (AgreedError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def rows(folder):
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def without_times(folder):
    return [{name: value for name, value in row.items() if not name.startswith("perf/")} for row in rows(folder)]


@pytest.mark.parametrize(
    ("layout", "more", "model"),
    [
        (Layout(tp=2), ["--grpo-kl-beta=0.1"], LLAMA),
        (Layout(pp=2, vpp=True), ["--num-layers=4", "--micro-batch-size=4", "--use-distributed-optimizer"], LLAMA),
        (Layout(cp=2, dp=2), ["--micro-batch-size=4", "--use-distributed-optimizer"], GPT2),
        (Layout(cp=2), ["--bypass-mode", "--rl-use-sequence-packing", "--rl-sequence-packing-bin-size=32"], GPT2),
        (Layout(), ["--bf16", "--rollout-dtype=bf16"], LLAMA),
        (Layout(), ["--optimizer=sgd", "--untie-embeddings-and-output-weights"], LLAMA),
    ],
    ids=[
        "tp2-reference",
        "pp2-vpp-distributed",
        "cp2-dp2-gpt2-distributed",
        "cp2-gpt2-bypass-packed",
        "bf16",
        "sgd-untied",
    ],
)
def test_a_resumed_run_takes_the_same_steps(ranks, tmp_path, layout, more, model):
    """Four steps, and two steps, a checkpoint and two more: equal to the last digit."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    words = [*LIVE, *more, *layout.flags()]
    save = [f"--save={tmp_path}/save", f"--load={tmp_path}/save"]
    for folder, extra in ((whole, ["--train-iters=4"]), (broken, ["--train-iters=2", *save]), (broken, save)):
        iterations = [] if "--train-iters=2" in extra else ["--train-iters=4"]
        assert set(ranks.run(run_training, layout, flags(folder, *words, *extra, *iterations, model=model))) == {None}
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert [row["step"] for row in rows(broken)] == [1, 2, 3, 4]
    assert without_times(broken) == without_times(whole)


def continue_recorded(words):
    """One more recorded batch after a checkpoint; the metrics."""
    trainer = make_trainer(words)
    replicas = trainer.config.data_parallel_size
    replica = torch.distributed.get_rank(trainer.groups.dp)
    prepared = trainer.prepare(recorded_batch(5, replica, replicas))
    first = trainer.update(prepared, 0)
    if trainer.config.checkpoints.save:
        trainer.save()
    return trainer.iteration, first


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_a_checkpoint_goes_on_in_another_layout(ranks, tmp_path, distributed):
    """Weights and Adam's moments written by TP2×PP2 are read by one process and by CP2×DP2, which agree."""
    words = flags(tmp_path, *SHORT, "--lr=1e-3", *["--use-distributed-optimizer"] * distributed)
    ranks.run(continue_recorded, Layout(tp=2, pp=2), [*words, f"--save={tmp_path}/save", *Layout(tp=2, pp=2).flags()])
    results = [
        ranks.run(continue_recorded, layout, [*words, f"--load={tmp_path}/save", *layout.flags()])[0]
        for layout in (Layout(), Layout(cp=2, dp=2), Layout(tp=2, pp=2))
    ]
    for iteration, metrics in results:
        assert iteration == 2
        assert metrics["policy/approx_kl"] == 0
        assert metrics["grad_norm"] == pytest.approx(results[0][1]["grad_norm"], rel=1e-4)
        assert metrics["loss/total"] == pytest.approx(results[0][1]["loss/total"], abs=1e-5)


def test_a_checkpoint_of_another_model_is_one_error_on_all_ranks(ranks, tmp_path):
    layout = Layout(tp=2)
    words = flags(tmp_path, *LIVE, *layout.flags(), "--train-iters=1")
    assert ranks.run(run_training, layout, [*words, f"--save={tmp_path}/save"]) == [None, None]
    for other in ("--hidden-size=64", "--num-layers=4"):
        messages = ranks.run(run_training, layout, [*words, f"--load={tmp_path}/save", other, "--train-iters=2"])
        assert all("checkpoint 1 does not fit this model and its flags" in message for message in messages)


def test_a_checkpoint_that_is_not_complete_is_named(ranks, tmp_path):
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / "latest_checkpointed_iteration.txt").write_text("7")
    (message,) = ranks.run(run_training, Layout(), flags(tmp_path, *LIVE, f"--load={tmp_path}/save"))
    assert "names checkpoint 7, which is not complete" in message


def test_a_folder_without_a_checkpoint_is_named(ranks, tmp_path):
    messages = ranks.run(run_training, Layout(dp=2), flags(tmp_path, *LIVE, f"--load={tmp_path}"))
    assert set(messages) == {messages[0]}
    assert "holds no checkpoint (latest_checkpointed_iteration.txt is missing)" in messages[0]


def test_an_older_metrics_file_is_kept(ranks, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    assert ranks.run(run_training, Layout(), flags(tmp_path, *LIVE, "--train-iters=1")) == [None]
    assert len(rows(tmp_path)[0]) > 20
    assert undocumented(rows(tmp_path)[0]) == []
    (older,) = (tmp_path / "run").glob("metrics-*.jsonl")
    assert older.read_text() == '{"step": 1}\n'


def test_a_full_disk_under_the_metrics_is_one_error_on_all_ranks(ranks, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/full")
    layout = Layout(tp=2)
    messages = ranks.run(run_training, layout, flags(tmp_path, *LIVE, *layout.flags(), "--train-iters=3"))
    assert set(messages) == {
        f"AgreedError: the metrics in {tmp_path}/run cannot be written (No space left on device): make room, or choose "
        "another --runs-dir"
    }


def run_with_picture(words):
    with drawing():
        return run_training(words)


def test_a_run_that_fails_leaves_its_picture_and_its_page(ranks, tmp_path):
    """A learning rate that makes the loss something that is no number."""
    words = flags(tmp_path, *LIVE, "--lr=1e38", "--clip-grad=0", "--optimizer=sgd", "--train-iters=9")
    (message,) = ranks.run(run_with_picture, Layout(), words)
    assert message is not None
    assert 1 <= len(rows(tmp_path)) < 9
    assert (tmp_path / "run" / "summary.png").read_bytes().startswith(b"\x89PNG")
    ending = page_data(tmp_path / "run")["ending"]
    assert ending.startswith(f"failed after step {len(rows(tmp_path))}: {message.partition(': ')[2]}, after ")


def test_a_second_task_from_a_library_runs(ranks, tmp_path):
    more = ["--task=reasoning_gym:chain_sum", "--seq-length=128", "--rollout-dtype=fp32", "--train-iters=2"]
    assert ranks.run(run_training, Layout(), flags(tmp_path, *LIVE, *more)) == [None]
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    assert all(row["rollout_corr/k3_kl"] < 1e-9 for row in rows(tmp_path)), "float32 weights: the same policy"


class BrokenEngine:
    """Samples token 3 eight times, and does one thing wrong on replica 1."""

    def __init__(self, fault, replica):
        self.fault, self.version = fault if replica == 1 else None, 0

    def load_weights(self, weights, version):
        for _ in weights:
            if self.fault == "weights":
                raise ValueError("out of memory")

    def sample(self, prompts, params, max_new_tokens, seed):
        if self.fault == "exception":
            raise TimeoutError("no answer in 60 s")
        log_probs = [-1.0] * 8
        log_probs[2] = {"nan": math.nan, "positive": 0.5}.get(self.fault, -1.0)
        return [Sample([3] * 8, log_probs, "stop") for _ in prompts]


def run_broken(words, fault):
    """Sync and sample with an engine that fails on one replica; the error of each rank."""
    from megatron_rc.launch.distributed import AgreedError
    from megatron_rc.launch.rollouts.collector import RolloutCollector
    from megatron_rc.launch.training.trainer import Trainer

    config, task = configure(words, torch.distributed.get_world_size())
    groups = ParallelGroups.from_megatron()
    engine = BrokenEngine(fault, torch.distributed.get_rank(groups.dp))
    collector = RolloutCollector(config, task, groups, engine)
    trainer = Trainer(config, groups)
    try:
        collector.sync_weights(trainer.chunks, 0)
        batch = collector.collect(0)
        return batch.rollout_log_probs[batch.response_mask].sum().item()
    except AgreedError as error:
        return str(error)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("weights", "the rollout engine refused the weights of step 0: out of memory"),
        ("exception", "the rollout of step 0 failed: TimeoutError: no answer in 60 s"),
        ("nan", "the rollout of step 0 failed: ValueError: the rollout log-prob of sample 8, token 4 is nan"),
        ("positive", "the rollout of step 0 failed: ValueError: the rollout log-prob of sample 8, token 4 is 0.5"),
    ],
)
def test_an_engine_that_fails_on_one_rank_ends_all_alike(ranks, tmp_path, fault, message):
    for layout in (Layout(tp=2, dp=2), Layout(pp=2, dp=2)):
        messages = ranks.run(run_broken, layout, flags(tmp_path, *SHORT, *layout.flags()), fault)
        assert set(messages) == {messages[0]}
        assert messages[0].startswith(message)


def test_every_rank_of_a_replica_gets_the_records(ranks, tmp_path):
    layout = Layout(tp=2, pp=2, cp=2)
    assert ranks.run(run_broken, layout, flags(tmp_path, *SHORT, *layout.flags()), None) == [-16 * 8.0] * 8


def train_on_rejected(words, why):
    """A batch whose tokens are all rejected: the optimizer's state before and after its two updates."""
    trainer = make_trainer(words)
    trainer.update(trainer.prepare(recorded_batch(0)), 0)
    state = [parameter.detach().clone() for chunk in trainer.chunks for parameter in chunk.parameters()]
    moments = [t.clone() for t in tensors_of(trainer.optimizer.state_dict())]
    rate = trainer.optimizer.param_groups[0]["lr"]
    batch = recorded_batch(1)
    if why == "bad":
        batch = replace(batch, rollout_log_probs=torch.full_like(batch.rollout_log_probs, math.nan))
    else:
        config = reject_all(trainer.config.correction)
        trainer.correction = RolloutCorrection(config, trainer.groups, loss=trainer.config.loss)
        trainer.chunks[0].config.finalize_model_grads_func = wrap_finalize(trainer.correction)
    prepared = trainer.prepare(batch)
    metrics = [trainer.update(prepared, 0) for _ in range(2)][-1]
    after = [parameter for chunk in trainer.chunks for parameter in chunk.parameters()]
    same = all(torch.equal(a, b) for a, b in zip(state, after, strict=True))
    later = tensors_of(trainer.optimizer.state_dict())
    same &= all(torch.equal(a, b) for a, b in zip(moments, later, strict=True))
    return same and rate == trainer.optimizer.param_groups[0]["lr"], metrics, len(moments)


def reject_all(config):
    fields = config.to_dict() | {"rollout_rs": "token_k2", "rollout_rs_threshold": 1e-12}
    return type(config).from_dict(fields)


def tensors_of(state):
    if isinstance(state, torch.Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else []
    return [tensor for value in values for tensor in tensors_of(value)]


BYPASS = ["--bypass-mode", "--loss-type=reinforce"]
PACKED = ["--rl-use-sequence-packing", "--rl-sequence-packing-bin-size=32"]


@pytest.mark.parametrize("why", ["rejected", "bad"])
@pytest.mark.parametrize(
    ("layout", "more"),
    [
        (Layout(pp=2), []),
        (Layout(pp=2), [*BYPASS, *PACKED]),
        (Layout(cp=2), [*BYPASS, "--calculate-per-token-loss"]),
    ],
    ids=["pp2", "pp2-bypass-packed", "cp2-bypass-ptl"],
)
def test_a_step_without_accepted_tokens_is_skipped_bitwise(ranks, tmp_path, layout, more, why):
    words = [*SHORT, *more, "--lr=1e-3", *["--bad-log-probs=reject_sequence"] * (why == "bad")]
    found = ranks.run(train_on_rejected, layout, flags(tmp_path, *words, *layout.flags()), why)
    for same, metrics, moments in found:
        assert same
        assert moments > 10
        assert metrics == found[0][1]
        assert metrics["skipped_steps"] == 2
        if "--bypass-mode" in more and why == "rejected":
            assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1


def train_on_bad_data(words):
    from megatron_rc.launch.distributed import AgreedError

    trainer = make_trainer(words)
    batch = recorded_batch(0)
    log_probs = batch.rollout_log_probs.clone()
    row, position = (int(index) for index in batch.response_mask.nonzero()[5])
    log_probs[row, position] = math.inf
    before = [parameter.detach().clone() for chunk in trainer.chunks for parameter in chunk.parameters()]
    try:
        trainer.update(trainer.prepare(replace(batch, rollout_log_probs=log_probs)), 0)
    except AgreedError as error:
        after = [parameter for chunk in trainer.chunks for parameter in chunk.parameters()]
        return str(error), row, position, all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        (Layout(pp=2), []),
        (Layout(cp=2, tp=2), []),
        (Layout(pp=2), BYPASS),
        (Layout(cp=2, tp=2), [*BYPASS, *PACKED]),
    ],
    ids=["pp2", "tp2-cp2", "pp2-bypass", "tp2-cp2-bypass-packed"],
)
def test_bad_log_probs_raise_alike_on_every_stage(ranks, tmp_path, layout, more):
    found = ranks.run(train_on_bad_data, layout, flags(tmp_path, *SHORT, *more, *layout.flags()))
    for message, row, position, untouched in found:
        # Position t of the correction speaks of token t + 1.
        assert message.startswith(
            f"the rollout log-prob of sample {row}, position {position - 1} is infinite (tokens of"
        )
        assert message == found[0][0]
        assert untouched


def count_passes(words):
    """How often the pipeline is run through before the first step, and in it."""
    from megatron_rc.launch.training import passes as model_passes

    passes, right = [], model_passes.get_forward_backward_func

    def counted():
        schedule = right()

        def run(**arguments):
            passes.append((arguments["forward_only"], arguments["num_microbatches"]))
            return schedule(**arguments)

        return run

    model_passes.get_forward_backward_func = counted
    try:
        trainer = make_trainer(words)
        prepared = trainer.prepare(recorded_batch(0))
        before = list(passes)
        trainer.update(prepared, 0)
    finally:
        model_passes.get_forward_backward_func = right
    return before, passes[len(before) :]


@pytest.mark.parametrize(
    ("more", "forward_only"),
    [
        *(([], 1), (["--grpo-kl-beta=0.1"], 2), (["--bypass-mode"], 0), (["--bypass-mode", "--grpo-kl-beta=0.1"], 1)),
        (["--proximal-interpolation", "--rollout-staleness=2"], 0),
    ],
    ids=["decoupled", "decoupled-kl", "bypass", "bypass-kl", "interpolation"],
)
def test_bypass_mode_and_interpolation_save_one_pass_through_the_pipeline(ranks, tmp_path, more, forward_only):
    layout = Layout(pp=2)
    words = flags(tmp_path, *SHORT, *layout.flags(), "--grpo-kl-beta=0", *more)
    for before, step in ranks.run(count_passes, layout, words):
        assert before == [(True, 2)] * forward_only
        assert step == [(False, 2)]


def explode(words):
    """A weight that is not a number on one rank: the loss is not finite, and the step is not made."""
    from megatron_rc.launch.distributed import AgreedError

    trainer = make_trainer(words)
    prepared = trainer.prepare(recorded_batch(0))
    if torch.distributed.get_rank() == 0:
        next(iter(trainer.chunks[0].parameters())).data.fill_(math.nan)
    try:
        trainer.update(prepared, 0)
    except AgreedError as error:
        return str(error)


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2)], ids=str)
def test_a_loss_that_is_not_finite_ends_all_alike(ranks, tmp_path, layout):
    messages = ranks.run(explode, layout, flags(tmp_path, *SHORT, *layout.flags()))
    assert set(messages) == {messages[0]}
    assert messages[0].startswith("the loss of step 1 is nan: the step was not made")


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(pp=2)], ids=str)
def test_recorded_rollouts_train_as_the_sampled_ones_did(ranks, tmp_path, layout):
    """Written by one process, read by two; at float32's distance, since the layouts differ."""
    first, again = tmp_path / "first", tmp_path / "again"
    written = flags(first, *LIVE, "--train-iters=2", f"--save-rollouts={tmp_path}/rollouts")
    assert ranks.run(run_training, Layout(), written) == [None]
    assert len(list((tmp_path / "rollouts").glob("*.safetensors"))) == 2
    words = flags(again, *LIVE, "--train-iters=2", f"--load-rollouts={tmp_path}/rollouts", *layout.flags())
    # One seed gives each layout weights of its own: start from the same ones.
    start = [f"--load={tmp_path}/start", "--finetune"]
    ranks.run(save_initial, Layout(), flags(tmp_path, *LIVE, f"--save={tmp_path}/start"))
    assert set(ranks.run(run_training, layout, [*words, *start])) == {None}
    for one, other in zip(rows(first), rows(again), strict=True):
        for name in ("reward/mean", "rollout/tokens", "rollout_corr/kl", "loss/total"):
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name


def test_recorded_rollouts_of_other_dtypes_reach_every_rank(ranks, tmp_path):
    """What other programs' records become may hold int32 ids and float64 log-probs."""
    folder = tmp_path / "rollouts"
    ranks.run(run_training, Layout(), flags(tmp_path, *LIVE, "--train-iters=1", f"--save-rollouts={folder}"))
    (path,) = folder.glob("*.safetensors")
    batch = load_rollouts(path)
    kinds = {torch.int64: torch.int32, torch.int32: torch.int16, torch.float32: torch.float64}
    save_rollouts(replace(batch, **{n: v.to(kinds.get(v.dtype, v.dtype)) for n, v in batch.tensors().items()}), path)
    words = flags(tmp_path, *LIVE, "--train-iters=1", f"--load-rollouts={folder}")
    for layout in (Layout(tp=2), Layout(pp=2)):
        assert set(ranks.run(run_training, layout, [*words, *layout.flags()])) == {None}
        (row,) = rows(tmp_path)
        assert row["rollout/tokens"] == int(batch.response_mask.sum())
        assert row["reward/mean"] == pytest.approx(float(batch.rewards.mean()))


def test_recorded_rollouts_that_do_not_fit_are_named(ranks, tmp_path):
    folder = tmp_path / "rollouts"
    ranks.run(run_training, Layout(), flags(tmp_path, *LIVE, "--train-iters=1", f"--save-rollouts={folder}"))
    (path,) = folder.glob("*.safetensors")

    def run(*more):
        (message,) = ranks.run(run_training, Layout(), flags(tmp_path, *LIVE, f"--load-rollouts={folder}", *more))
        return message

    assert "16 sequences, the flags ask for 32" in run("--train-iters=1", "--grpo-prompts-per-step=8")
    assert "--seq-length 8 is too short: sample " in run("--train-iters=1", "--seq-length=8", "--max-response-length=4")
    assert "--rl-default-temperature is 0.5: set it alike" in run("--train-iters=1", "--rl-default-temperature=0.5")
    path.write_bytes(path.read_bytes()[:-20])
    assert "the rollout of step 0 failed: ValueError" in run("--train-iters=1")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--train-iters=3"], "holds 2 rollout batches, which make 2 optimizer steps: --train-iters 3 is more"),
        (["--train-iters=2", "--save-rollouts=elsewhere"], "would write again what --load-rollouts"),
        (["--train-iters=2", "--rollout-engine=vllm-server"], "--rollout-engine vllm-server does nothing with"),
    ],
)
def test_recordings_that_cannot_serve_are_refused(tmp_path, more, message):
    for step in range(2):
        (tmp_path / f"step-{step:07d}-replica-0000.safetensors").touch()
    with pytest.raises(ConfigurationError, match=message):
        configure(flags(tmp_path, *LIVE, f"--load-rollouts={tmp_path}", *more), 1)
    (tmp_path / "step-0000001-replica-0001.safetensors").touch()
    with pytest.raises(ConfigurationError, match="holds 1 rollout batches, which make 1 optimizer steps"):
        configure(flags(tmp_path, *LIVE, f"--load-rollouts={tmp_path}", "--train-iters=2"), 1)
    (tmp_path / "step-0000001-replica-0000.safetensors").unlink()
    with pytest.raises(ConfigurationError, match="has no rollout batch of all 2 replicas that wrote to it"):
        configure(flags(tmp_path, *LIVE, f"--load-rollouts={tmp_path}", "--train-iters=2"), 1)
    with pytest.raises(ConfigurationError, match="/none: no such folder"):
        configure(flags(tmp_path, *LIVE, f"--load-rollouts={tmp_path}/none", "--train-iters=2"), 1)


@pytest.mark.parametrize(
    ("layout", "interval", "steps"),
    [(Layout(), 2, [0, 2, 3]), (Layout(dp=2, pp=2), 1, [0, 1, 2, 3]), (Layout(cp=2), 9, [0, 3])],
    ids=str,
)
def test_evaluations_come_at_the_start_by_the_interval_and_at_the_end(ranks, tmp_path, layout, interval, steps):
    words = [*HELD_OUT, f"--eval-interval={interval}", "--eval-problems=5", "--train-iters=3", *layout.flags()]
    assert set(ranks.run(run_training, layout, flags(tmp_path, *words))) == {None}
    evaluations = [row for row in rows(tmp_path) if "eval/reward" in row]
    assert [row["step"] for row in evaluations] == steps
    assert all(
        set(row) == {"step", "eval/reward", "eval/exact_match", "eval/pass@1", "eval/reward_errors"}
        for row in evaluations
    )
    written = sorted((tmp_path / "run" / "eval").iterdir())
    assert [path.name for path in written] == [f"step-{step:07d}.jsonl" for step in steps]
    assert len(written[0].read_text().splitlines()) == 5
    assert [row["step"] for row in rows(tmp_path) if "loss/total" in row] == [1, 2, 3]


def test_a_resumed_run_goes_on_evaluating(ranks, tmp_path):
    """Stopped between two multiples of the interval: nothing is evaluated twice, and no interval goes by unseen."""
    words = [*HELD_OUT, "--eval-interval=2", "--eval-problems=2", f"--save={tmp_path}/save", f"--load={tmp_path}/save"]
    for iterations in (3, 7):
        assert ranks.run(run_training, Layout(), flags(tmp_path, *words, f"--train-iters={iterations}")) == [None]
    assert [row["step"] for row in rows(tmp_path) if "eval/reward" in row] == [0, 2, 3, 4, 6, 7]
    (tmp_path / "run").rename(tmp_path / "before")
    ahead = ["--rollout-staleness=2", "--train-iters=12"]
    assert ranks.run(run_training, Layout(), flags(tmp_path, *words, *ahead)) == [None]
    # Weights are handed over after 7, 9 and 11 steps; in a new folder nothing says that those of 7 were evaluated.
    assert [row["step"] for row in rows(tmp_path) if "eval/reward" in row] == [7, 9, 11, 12]


def run_until_signal(words, step):
    """A run that is told to stop while it makes a step; whether nothing is lost."""
    from megatron_rc.launch.training.loop import train
    from megatron_rc.launch.training.trainer import Trainer

    update = Trainer.update

    def stop(trainer, *args):
        metrics = update(trainer, *args)
        if trainer.iteration == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return metrics

    with mock.patch.object(Trainer, "update", stop):
        return train(*configure(words, torch.distributed.get_world_size()))


def test_an_evaluation_due_at_the_step_of_a_stop_is_made_when_the_run_goes_on(ranks, tmp_path):
    save = [f"--save={tmp_path}/save", f"--load={tmp_path}/save"]
    words = flags(tmp_path, *HELD_OUT, "--eval-interval=2", "--eval-problems=2", "--train-iters=4", *save)
    assert ranks.run(run_until_signal, Layout(dp=2), words, 2) == [True, True]
    assert [row["step"] for row in rows(tmp_path) if "eval/reward" in row] == [0]
    assert ranks.run(run_training, Layout(dp=2), words) == [None, None]
    assert [row["step"] for row in rows(tmp_path) if "eval/reward" in row] == [0, 2, 4]


def test_a_signal_in_the_last_step_loses_nothing(ranks, tmp_path):
    words = flags(tmp_path, *LIVE, "--train-iters=2")
    assert ranks.run(run_until_signal, Layout(), words, 2) == [True]
    assert ranks.run(run_until_signal, Layout(), words, 1) == [False]


def what_is_said(words):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        error = run_training(words)
    return error, said.getvalue()


def test_a_resumed_run_says_where_it_goes_on_and_what_it_leaves(ranks, tmp_path):
    save = [f"--save={tmp_path}/save", f"--load={tmp_path}/save", f"--save-hf={tmp_path}/hf"]
    words = flags(tmp_path, *LIVE, *save)
    ((error, said),) = ranks.run(what_is_said, Layout(), [*words, "--train-iters=1"])
    assert error is None
    assert "goes on from" not in said
    ((error, said),) = ranks.run(what_is_said, Layout(), [*words, "--train-iters=2"])
    assert error is None
    assert f"goes on from checkpoint 1 of {tmp_path}/save\n" in said
    assert f"finished at step 2, saved to {tmp_path}/save, model in {tmp_path}/hf/step-2 after" in said


def test_a_checkpoint_past_the_end_is_refused_and_leaves_the_settings(ranks, tmp_path):
    layout, save = Layout(dp=2), [f"--save={tmp_path}/save", f"--load={tmp_path}/save"]
    words = flags(tmp_path, *LIVE, *save)
    assert ranks.run(run_training, layout, [*words, "--train-iters=2"]) == [None, None]
    before = (tmp_path / "run" / "config.yaml").read_text()
    remedy = "give a larger one, or --finetune to start at step 0 from its weights"
    assert (
        ranks.run(run_training, layout, [*words, "--train-iters=1"])
        == [f"ValueError: --load {tmp_path}/save: checkpoint 2 is already past --train-iters 1: {remedy}"] * 2
    )
    (message, _) = ranks.run(run_training, layout, [*words, "--train-iters=3", "--lr=2e-3"])
    assert "was written with --lr" in message
    assert sorted(path.name for path in (tmp_path / "run").glob("config*")) == ["config.yaml"]
    assert (tmp_path / "run" / "config.yaml").read_text() == before


def close_after_failure(words):
    """Whether the engine is closed where what follows it cannot be made."""
    from megatron_rc.launch.rollouts.collector import RolloutCollector
    from megatron_rc.launch.training import weight_sync

    failing = mock.patch.object(weight_sync, "SyncCheck", side_effect=ValueError("no room"))
    with failing, mock.patch.object(RolloutCollector, "close", autospec=True) as close:
        return run_training(words), close.call_count


def test_an_engine_ends_where_what_comes_after_it_fails(ranks, tmp_path):
    assert ranks.run(close_after_failure, Layout(), flags(tmp_path, *LIVE)) == [("ValueError: no room", 1)]


class Pupil:
    """Knows the answer to some of the held-out problems, and to others at every second try."""

    version = 0

    def __init__(self, task, known, guessed=()):
        self.task, self.known, self.guessed, self.asked, self.sampling = task, known, guessed, [], []

    def load_weights(self, weights, version):
        self.version = len(list(weights)) and version

    def sample(self, prompts, params, max_new_tokens, seed):
        self.sampling.append((params.top_k, params.temperature))
        return [self.answer(self.task.text.decode(prompt)) for prompt in prompts]

    def answer(self, prompt):
        self.asked.append(prompt)
        is_right = prompt not in self.guessed or self.asked.count(prompt) % 2
        text = self.known.get(prompt, "99") if is_right else "99"
        if text is None:
            return Sample([], [], "stop")
        ids = [*self.task.text.encode(Problem(text)), self.task.text.eos]
        return Sample(ids, [0.0] * len(ids), "stop")


def evaluate_pupil(words, known, guessed=()):
    from megatron_rc.launch.rollouts.collector import RolloutCollector

    config, task = configure(words, torch.distributed.get_world_size())
    groups = ParallelGroups.from_megatron()
    pupil = Pupil(task, known, guessed)
    collector = RolloutCollector(config, task, groups, pupil)
    metrics = collector.evaluate(6)
    return metrics, pupil.asked, set(pupil.sampling)


def failed_evaluation(words):
    from megatron_rc.launch.distributed import AgreedError

    try:
        return evaluate_pupil(words, {})
    except AgreedError as error:
        return str(error)


def first_problems(count):
    """The problems, and their prompts as the engine sees them."""
    task = make_task("python:tests.support.user_rewards:Doubles", 1234)
    problems = task.problems(0, count, held_out=True)
    return problems, [task.text.decode(task.text.encode(problem)) for problem in problems]


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2, pp=2), Layout(cp=2, dp=2)], ids=str)
def test_an_evaluation_asks_each_problem_once_and_counts_the_right_answers(ranks, tmp_path, layout):
    problems, prompts = first_problems(5)
    known = {prompt: problem.label for prompt, problem in zip(prompts[:3], problems[:3], strict=True)}
    words = flags(tmp_path, *HELD_OUT, "--eval-interval=1", "--eval-problems=5", *layout.flags())
    found = ranks.run(evaluate_pupil, layout, words, known)
    expected = {"eval/reward": 0.6, "eval/exact_match": 0.6, "eval/pass@1": 0.6, "eval/reward_errors": 0}
    assert [metrics for metrics, *_ in found] == [pytest.approx(expected)] * layout.world
    assert sorted(prompt for _, asked, _ in found for prompt in asked) == sorted(prompts)
    assert {how for *_, sampling in found for how in sampling} == {(1, 1.0)}


def test_a_response_that_is_left_out_counts_as_wrong_in_an_evaluation(ranks, tmp_path):
    problems, prompts = first_problems(4)
    known = {prompt: problem.label for prompt, problem in zip(prompts, problems, strict=True)} | {prompts[1]: None}
    words = flags(tmp_path, *HELD_OUT, "--eval-interval=1", "--eval-problems=4", "--bad-samples=drop")
    ((metrics, *_),) = ranks.run(evaluate_pupil, Layout(), words, known)
    assert (metrics["eval/exact_match"], metrics["eval/reward"]) == (0.75, 0.75)


@pytest.mark.parametrize(("layout", "written"), [(Layout(), 2), (Layout(dp=2), 2), (Layout(dp=2, pp=2), 4)], ids=str)
def test_several_samples_are_counted_by_problem_over_all_replicas(ranks, tmp_path, layout, written):
    """Of 4 tries 2 are right for a problem that is guessed: one of two tries is right with 1 - 1/6."""
    problems, prompts = first_problems(5)
    known = {prompt: problem.label for prompt, problem in zip(prompts, problems, strict=True) if prompt != prompts[4]}
    more = ["--eval-samples=4", "--eval-temperature=0.7", f"--eval-answers={written}"]
    words = flags(tmp_path, *HELD_OUT, "--eval-interval=1", "--eval-problems=5", *more, *layout.flags())
    found = ranks.run(evaluate_pupil, layout, words, known, prompts[:2])
    expected = {"eval/reward": 0.6, "eval/exact_match": 0.6, "eval/pass@1": 0.6, "eval/reward_errors": 0}
    expected |= {"eval/pass@2": (2 * 5 / 6 + 2) / 5, "eval/pass@4": 0.8}
    assert [metrics for metrics, *_ in found] == [pytest.approx(expected)] * layout.world
    asked = [prompt for _, some, _ in found for prompt in some]
    assert {prompt: asked.count(prompt) for prompt in prompts} == dict.fromkeys(prompts, 4)
    assert {how for *_, sampling in found for how in sampling} == {(0, 0.7)}
    lines = (tmp_path / "run" / "eval" / "step-0000006.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    # Of two replicas the first has the first two problems.
    assert [(answer["label"], answer["reward"]) for answer in answers] == [(p.label, 1.0) for p in problems[:written]]


def test_answers_that_cannot_be_written_end_the_run_on_every_rank(ranks, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "eval").write_text("in the way")
    words = flags(tmp_path, *HELD_OUT, "--eval-interval=1", "--eval-problems=2", *Layout(dp=2).flags())
    first, second = ranks.run(failed_evaluation, Layout(dp=2), words)
    assert first == second
    assert "eval/step-0000006.jsonl cannot be written (File exists): make room" in first


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--eval-interval=3", "--grpo-iterations=2"], "--eval-interval 3 must be a multiple of the 2 optimizer steps"),
        (["--eval-interval=0"], "--eval-interval 0 must be positive"),
        (["--eval-interval=1", "--eval-problems=1"], "--eval-problems 1 leaves some of the 2 data-parallel ranks"),
        (["--eval-interval=1", "--task=count_up"], "--task count_up holds no problems out"),
        (["--eval-problems=8"], "--eval-problems 8 does nothing without --eval-interval"),
        (["--rollout-check-tolerance=-1"], "--rollout-check-tolerance -1.0 must be positive"),
    ],
)
def test_evaluations_that_cannot_be_made_are_refused(tmp_path, more, message):
    with pytest.raises(ConfigurationError, match=message):
        configure(flags(tmp_path, *HELD_OUT, *more), 2)


def test_recorded_rollouts_have_no_engine_to_evaluate(tmp_path):
    save_rollouts(recorded_batch(0), tmp_path / "step-0000000-replica-0000.safetensors")
    words = flags(tmp_path, f"--load-rollouts={tmp_path}", "--eval-interval=2", "--train-iters=2")
    with pytest.raises(ConfigurationError, match="--eval-interval 2 needs an engine, which --load-rollouts"):
        configure(words, 1)
