"""The training loop on the ranks of the pool: resumption, failures on one rank, steps that must not be made."""

import math
import re
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_rc.launch.checkpoint_folders import TRACKER, iterations
from megatron_rc.launch.engines import Sample
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.training.reporting import metrics_file
from megatron_rc.parallel import ParallelGroups
from tests.support.ranks import Layout, RankFailure
from tests.support.recorded_training import flags, make_trainer, recorded_batch
from tests.support.training_runs import (
    LIVE,
    SHORT,
    agreed,
    equal,
    rows,
    run_training,
    run_until_signal,
    said_by_training,
    tensors_of,
    weights_of,
    without_times,
)

RESUMED = {
    "tp2-reference-untied": (Layout(tp=2), "--grpo-kl-beta=0.1 --untie-embeddings-and-output-weights", ""),
    "pp2-vpp-distributed-background": (
        Layout(pp=2, vpp=True),
        "--num-layers=4 --micro-batch-size=4 --use-distributed-optimizer",
        "--async-save --save-interval=1 --keep-last=2",
    ),
}


@pytest.mark.parametrize(("layout", "more", "saving"), RESUMED.values(), ids=RESUMED)
def test_a_resumed_run_takes_the_same_steps(ranks, tmp_path, layout, more, saving):
    """Three steps, and a step or two, a checkpoint and the rest, of which the last shows the optimizer's state.

    In the background, the metrics of the next step say how long a save was waited for.
    """
    whole = tmp_path / "whole"
    broken = tmp_path / "broken"
    stop = 2 if saving else 1
    arguments = [*LIVE, *more.split(), *layout.flags()]
    save = [f"--save={tmp_path}/save", f"--load={tmp_path}/save", *saving.split()]
    for folder, last, more_files in ((whole, 3, []), (broken, stop, save), (broken, 3, save)):
        words_of_run = flags(folder, *arguments, *more_files, f"--train-iters={last}")
        assert set(ranks.run(run_training, layout, words_of_run)) == {None}
    assert iterations(tmp_path / "save") == [stop, 3]
    assert (tmp_path / "save" / TRACKER).read_text() == "3"
    assert [row["step"] for row in rows(broken)] == [1, 2, 3]
    assert without_times(broken) == without_times(whole), "to the last digit"
    if saving:
        assert [row["step"] for row in rows(broken) if "perf/save_seconds" in row] == [2]


HOUR = 3600.0


def run_with_slow(words, *slow):
    """The error of a run in which, by the loop's clock, each call of these methods takes an hour longer."""
    from megatron_rc.launch.training import loop

    waited = []

    def slowed(method):
        def call(*args, **options):
            waited.append(HOUR)
            return method(*args, **options)

        return call

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(waited))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(loop, "time", clock))
        for owner, name in slow:
            stack.enter_context(mock.patch.object(owner, name, slowed(getattr(owner, name))))
        error = run_training(words)
    assert waited
    return error


def run_with_slow_files(words):
    """A run whose reports, records and checkpoints are slow."""
    from megatron_rc.launch.training.reporting.reporter import Reporter
    from megatron_rc.launch.training.saved_log_probs import SavedLogProbs
    from megatron_rc.launch.training.when_to_save import CheckpointSaves

    slow = (Reporter, "step"), (CheckpointSaves, "on_the_way"), (SavedLogProbs, "after_update")
    return run_with_slow(words, *slow)


def test_the_time_of_an_update_is_without_reports_and_saves(ranks, tmp_path):
    """Two steps on each of two rollout batches; each report and each save takes an hour."""
    arguments = flags(tmp_path, *LIVE, "--grpo-iterations=2", "--train-iters=4", "--device-peak-tflops=0.5")
    assert ranks.run(run_with_slow_files, Layout(), arguments) == [None]
    for row in rows(tmp_path):
        assert {name for name in row if re.fullmatch(r"perf/\w+_seconds", name)} == {
            *("perf/sync_seconds", "perf/rollout_seconds", "perf/plan_seconds", "perf/update_seconds")
        }
        assert sum(row[f"perf/{phase}_seconds"] for phase in ("sync", "rollout", "plan", "update")) < HOUR
        assert row["perf/tokens_per_second"] > row["rollout/tokens"] / HOUR


def run_with_slow_attribution(words):
    """A run whose attributions are slow."""
    from megatron_rc.launch.training import trainer

    return run_with_slow(words, (trainer, "attribute_batch"))


def test_the_speed_is_without_attributions(ranks, tmp_path):
    arguments = flags(tmp_path, *LIVE, "--train-iters=2", "--attribution-interval=2", "--attribution-nodes=1")
    assert ranks.run(run_with_slow_attribution, Layout(), arguments) == [None]
    attributed, other = rows(tmp_path)
    assert HOUR < attributed["perf/attribution_seconds"] < 2 * HOUR
    assert "perf/attribution_seconds" not in other
    for row in (attributed, other):
        assert row["perf/tokens_per_second"] > row["rollout/tokens"] / HOUR


def run_with_metrics_in_place(words):
    """What stands in the place of the metrics stays there, although the run begins."""
    with mock.patch.object(metrics_file, "set_aside"):
        return run_training(words)


def test_a_full_disk_under_the_metrics_is_one_sentence(ranks, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/full")
    (message,) = ranks.run(run_with_metrics_in_place, Layout(), flags(tmp_path, *LIVE, "--train-iters=3"))
    assert message == (
        f"ConfigurationError: the metrics in {tmp_path}/run cannot be written (No space left on device): make room, "
        "or choose another --runs-dir"
    )


class BrokenEngine:
    """Samples token 3 eight times, and does one thing wrong on replica 1."""

    def __init__(self, fault, replica):
        self.fault = fault if replica == 1 else None
        self.version = 0

    def load_weights(self, weights, version):
        for _ in weights:
            if self.fault == "weights":
                raise ValueError("out of memory")

    def sample(self, prompts, params, max_new_tokens, seed):
        if self.fault == "exception":
            raise TimeoutError("no answer in 60 s")
        if self.fault == "exit":
            sys.exit(0)
        if self.fault == "flag":
            raise ConfigurationError("--prompt-data a.jsonl has changed")
        log_probs = [-1.0] * 8
        log_probs[2] = math.nan if self.fault == "nan" else -1.0
        return [Sample([3] * 8, log_probs, "stop") for _ in prompts]


def run_broken(words, fault):
    """Sync and sample with an engine that fails on one replica; the sum of the log-probs on each rank."""
    from megatron_rc.launch.rollouts.collector import RolloutCollector
    from megatron_rc.launch.training.trainer import Trainer

    config, task = configure(words, torch.distributed.get_world_size())
    groups = ParallelGroups.from_megatron()
    engine = BrokenEngine(fault, torch.distributed.get_rank(groups.dp))
    collector = RolloutCollector(config, task, groups, engine)
    trainer = Trainer(config, groups)
    collector.sync_weights(trainer.chunks, 0)
    batch = collector.collect(0).batch
    return batch.rollout_log_probs[batch.response_mask].sum().item()


FAULTS = {
    "weights": "the rollout engine refused the weights of step 0: out of memory",
    "exception": "the rollout of step 0 failed: TimeoutError: no answer in 60 s",
    "flag": "--prompt-data a.jsonl has changed",
    "exit": "the rollout of step 0 failed: SystemExit: 0",
    "nan": "the rollout of step 0 failed: ValueError: the rollout log-prob of sample 8, token 4 is nan",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_engine_that_fails_is_one_sentence_of_its_rank(ranks, tmp_path, fault):
    layout = Layout(dp=2)
    with pytest.raises(RankFailure, match=f"(?m)Error: {re.escape(FAULTS[fault])}"):
        ranks.run(run_broken, layout, flags(tmp_path, *SHORT, *layout.flags()), fault)


def test_every_rank_of_a_replica_gets_the_records(ranks, tmp_path):
    layout = Layout(tp=2, pp=2, cp=2)
    assert ranks.run(run_broken, layout, flags(tmp_path, *SHORT, *layout.flags()), None) == [-16 * 8.0] * 8


def train_on_rejected(words, off):
    """A batch whose log-probs are off, so that all tokens are rejected: whether its steps change a thing."""
    trainer = make_trainer(words)
    trainer.update(trainer.prepare(recorded_batch(0)), 0)
    state = weights_of(trainer.chunks)
    moments = [t.clone() for t in tensors_of(trainer.optimizer.state_dict())]
    rate = trainer.optimizer.param_groups[0]["lr"]
    batch = recorded_batch(1)
    prepared = trainer.prepare(replace(batch, rollout_log_probs=batch.rollout_log_probs - off))
    metrics = [trainer.update(prepared, 0).metrics for _ in range(trainer.config.updates_per_rollout)][-1]
    same = equal(state, weights_of(trainer.chunks))
    same &= equal(moments, tensors_of(trainer.optimizer.state_dict()))
    return same and rate == trainer.optimizer.param_groups[0]["lr"], metrics, len(moments)


BYPASS = ["--bypass-mode", "--loss-type=reinforce"]
PACKED = ["--rl-use-sequence-packing", "--rl-sequence-packing-bin-size=32"]
ONE_PASS = ["--grpo-iterations=1"]


@pytest.mark.parametrize(
    ("layout", "more", "off"),
    [
        (Layout(pp=2), [], math.nan),
        (Layout(pp=2), [*BYPASS, *PACKED], math.nan),
        (Layout(pp=2), ONE_PASS, 20),
        (Layout(cp=2), [*BYPASS, "--calculate-per-token-loss"], 20),
    ],
    ids=["pp2", "pp2-bypass-packed", "pp2-one-pass", "cp2-bypass-ptl"],
)
def test_a_step_without_accepted_tokens_is_skipped_bitwise(ranks, tmp_path, layout, more, off):
    arguments = [*SHORT, *more, "--lr=1e-3", "--bad-log-probs=reject_sequence"]
    results = ranks.run(train_on_rejected, layout, flags(tmp_path, *arguments, *layout.flags()), off)
    for same, metrics, moments in results:
        assert same
        assert moments > 10
        assert metrics == results[0][1]
        assert metrics["skipped_steps"] == (1 if more == ONE_PASS else 2)
        if "--bypass-mode" in more and off == 20:
            assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1


def train_on_bad_data(words):
    from megatron_rc.launch.errors import RunError

    trainer = make_trainer(words)
    batch = recorded_batch(0)
    log_probs = batch.rollout_log_probs.clone()
    row, position = (int(index) for index in batch.response_mask.nonzero()[5])
    log_probs[row, position] = math.inf
    before = weights_of(trainer.chunks)
    try:
        trainer.update(trainer.prepare(replace(batch, rollout_log_probs=log_probs)), 0)
    except RunError as error:
        return str(error), row, position, equal(before, weights_of(trainer.chunks))


@pytest.mark.parametrize(
    ("layout", "more"),
    [(Layout(cp=2, tp=2), []), (Layout(pp=2), ONE_PASS), (Layout(pp=2), BYPASS), (Layout(cp=2), [*BYPASS, *PACKED])],
    ids=["tp2-cp2", "pp2-one-pass", "pp2-bypass", "cp2-bypass-packed"],
)
def test_bad_log_probs_raise_alike_on_every_stage(ranks, tmp_path, layout, more):
    results = ranks.run(train_on_bad_data, layout, flags(tmp_path, *SHORT, *more, *layout.flags()))
    for message, row, position, untouched in results:
        # Position t of the correction speaks of token t + 1.
        assert message.startswith(
            f"the rollout log-prob of sample {row}, position {position - 1} is infinite (tokens of"
        )
        assert message == results[0][0]
        assert untouched


def count_passes(words):
    """Whether each pass before the first step, and each one in it, is forward-only."""
    trainer = make_trainer(words)
    run = trainer.passes.run = mock.Mock(wraps=trainer.passes.run)
    prepared = trainer.prepare(recorded_batch(0))
    before = run.call_count
    trainer.update(prepared, 0)
    kinds = [call.kwargs.get("forward_only", False) for call in run.call_args_list]
    return kinds[:before], kinds[before:]


@pytest.mark.parametrize(
    ("more", "forward_only"),
    [
        *(("", 1), ("--grpo-kl-beta=0.1", 2), ("--bypass-mode", 0), ("--bypass-mode --grpo-kl-beta=0.1", 1)),
        ("--proximal-interpolation --rollout-staleness=2", 0),
    ],
)
def test_bypass_mode_and_interpolation_save_one_pass_through_the_pipeline(ranks, tmp_path, more, forward_only):
    layout = Layout(pp=2)
    arguments = flags(tmp_path, *SHORT, *layout.flags(), "--grpo-kl-beta=0", *more.split())
    for before, step in ranks.run(count_passes, layout, arguments):
        assert before == [True] * forward_only
        assert step == [False]


def test_a_signal_in_the_last_step_loses_nothing(ranks, tmp_path):
    arguments = flags(tmp_path, *LIVE, "--train-iters=2")
    assert ranks.run(run_until_signal, Layout(), arguments, 2) == [True]
    assert ranks.run(run_until_signal, Layout(), arguments, 1) == [False]


def test_a_resumed_run_says_where_it_goes_on_and_leaves_nothing_where_it_is_refused(ranks, tmp_path):
    layout = Layout(dp=2)
    config = tmp_path / "run" / "config.yaml"
    arguments = flags(tmp_path, *LIVE, f"--save={tmp_path}/save", f"--load={tmp_path}/save", f"--save-hf={tmp_path}/hf")
    (error, said), _ = ranks.run(said_by_training, layout, [*arguments, "--train-iters=1"])
    assert error is None
    assert "goes on from" not in said
    rest = "tokenizer: one token a character (--from-scratch) · task: count_up · reward: rule of the task · engine: tr"
    assert said.startswith(f"weights: random (--from-scratch) · {rest}ansformers\n")
    (error, said), _ = ranks.run(said_by_training, layout, [*arguments, "--train-iters=2"])
    assert error is None
    assert f"goes on from checkpoint 1 of {tmp_path}/save\n" in said
    assert said.startswith(f"weights: checkpoint {tmp_path}/save/iter_0000001 (--load) · {rest}")
    assert f"finished at step 2, saved to {tmp_path}/save, model in {tmp_path}/hf/step-2 after" in said
    before = config.read_text()
    left = sorted(path.name for path in (tmp_path / "run").glob("config*"))
    past = agreed(ranks.run(run_training, layout, [*arguments, "--train-iters=1"]))
    assert past.startswith(f"ValueError: --load {tmp_path}/save: checkpoint 2 is already past --train-iters 1: ")
    assert "--finetune" in past
    (message, _) = ranks.run(run_training, layout, [*arguments, "--train-iters=3", "--lr=2e-3"])
    assert "--override-opt-param-scheduler to go on with this run's" in message
    assert sorted(path.name for path in (tmp_path / "run").glob("config*")) == left
    assert config.read_text() == before


def close_after_failure(words):
    """Whether the engine is closed where what follows it cannot be made."""
    from megatron_rc.launch.rollouts.collector import RolloutCollector
    from megatron_rc.launch.training import weight_sync

    failing = mock.patch.object(weight_sync, "SyncCheck", side_effect=ValueError("no room"))
    with failing, mock.patch.object(RolloutCollector, "close", autospec=True) as close:
        return run_training(words), close.call_count


def test_an_engine_ends_where_what_comes_after_it_fails(ranks, tmp_path):
    assert ranks.run(close_after_failure, Layout(), flags(tmp_path, *LIVE)) == [("ValueError: no room", 1)]
