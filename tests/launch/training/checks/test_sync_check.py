"""Engines with older weights, or with log-probs of something else, end the run within one batch; sound ones never."""

import collections
import dataclasses
from unittest import mock

import pytest
import torch

from megatron_rc.launch.engines import Sample
from tests.support.on_rank import recorded
from tests.support.ranks import Layout, RankFailure
from tests.support.recorded_training import GPT2, LLAMA, flags, make_trainer, share
from tests.support.training_runs import HELD_OUT, agreed, rows, run_training

RUN = ["--grpo-iterations=1", "--lr=3e-3", "--run-name=run", "--rollout-rs-threshold=0.01_100,10", "--train-iters=3"]
# An entropy bonus moves the weights even where no response earns anything.
RUN += ["--grpo-entropy-term-weight=0.1", "--grpo-kl-beta=0", "--num-layers=2", "--micro-batch-size=8"]


class Sampling:
    """Takes the weights of every sync, and samples as a function does."""

    def __init__(self, engine, function):
        self.engine = engine
        self.function = function

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def sample(self, *request):
        return self.function(self.engine, *request)


class PackedHead(Sampling):
    """Keeps the output layer of the first sync, as an engine does that packed it before the embeddings changed."""

    def __init__(self, engine):
        super().__init__(engine, type(engine).sample)
        self.head = None

    def load_weights(self, weights, version):
        model = self.engine.model
        if self.head is not None:
            model.lm_head.weight = model.model.embed_tokens.weight
        self.engine.load_weights(weights, version)
        self.head = model.lm_head.weight.clone() if self.head is None else self.head
        model.lm_head.weight = torch.nn.Parameter(self.head, requires_grad=False)


def shifted(engine, *request):
    """Reports the log-prob of the token before."""
    samples = engine.sample(*request)
    return [Sample(sample.token_ids, [-2.0, *sample.log_probs[:-1]], sample.finish_reason) for sample in samples]


def shifted_later(engine, *request):
    """Does so from the second sync on, which no probe follows."""
    return shifted(engine, *request) if engine.version else engine.sample(*request)


def far(engine, *request):
    """From the second sync on reports tokens as far less likely than they are: the rejection takes all of them."""
    off = 5.0 if engine.version else 0.0
    samples = engine.sample(*request)
    return [dataclasses.replace(sample, log_probs=[value - off for value in sample.log_probs]) for sample in samples]


def silent(engine, *request):
    """Fails in the middle of the check."""
    raise RuntimeError("out of paper")


def run_broken(words, fault, replica):
    """``train`` with this fault in the engine of one replica; what it raised."""
    from megatron.core import parallel_state

    from megatron_rc.launch.rollouts import collector

    right = collector.make_engine

    def wrong(*settings):
        engine = right(*settings)
        if parallel_state.get_data_parallel_rank() != replica:
            return engine
        return fault(engine) if isinstance(fault, type) else Sampling(engine, fault)

    with mock.patch.object(collector, "make_engine", wrong):
        return run_training(words)


OLDER = "does the engine keep older weights"


@pytest.mark.parametrize(
    ("fault", "layout", "more", "made", "message"),
    [
        (PackedHead, Layout(pp=2, dp=2), [], 1, OLDER),
        (PackedHead, Layout(pp=2), ["--bypass-mode", "--rl-use-sequence-packing"], 1, OLDER),
        (shifted_later, Layout(cp=2), [], 1, "shifted by +1; align both to the label tokens"),
        # The probe after the first sync.
        (shifted, Layout(tp=2), [], 0, "shifted by +1; align both to the label tokens"),
    ],
)
def test_an_engine_with_something_old_ends_the_run_on_all_ranks(ranks, tmp_path, fault, layout, more, made, message):
    """Only the last replica's engine is broken; the first sync cannot tell what later ones leave behind."""
    arguments = flags(tmp_path, *RUN, "--rollout-dtype=fp32", *layout.flags(), *more)
    said = agreed(ranks.run(run_broken, layout, arguments, fault, layout.dp - 1))
    assert said.startswith("RunError: ")
    assert message in said
    if "sync" in said:
        assert f"after the weight sync of step {made} the rollout engine and the trainer disagree by" in said
        assert (" on 1 of 2 data-parallel replicas (1), up to 0.001" in said) == (layout.dp == 2)
    made_steps = rows(tmp_path) if made else []
    assert len(made_steps) == made, "no step was made with wrong weights"


def test_an_engine_that_fails_in_the_probe_ends_its_rank(ranks, tmp_path):
    layout = Layout(dp=2)
    arguments = flags(tmp_path, *RUN, *layout.flags())
    with pytest.raises(RankFailure, match="the check of the rollout engine failed: RuntimeError: out of paper"):
        ranks.run(run_broken, layout, arguments, silent, 1)


def test_a_batch_of_which_nothing_is_accepted_tells_too(ranks, tmp_path):
    """No step is made, and the ranks hear of it at the step's end."""
    plain = [word for word in RUN if not word.startswith("--rollout-rs")]
    arguments = flags(tmp_path, *plain, "--rollout-dtype=fp32", "--rollout-rs=token_k3", "--rollout-rs-threshold=1e-3")
    arguments += ["--bad-steps=skip"]
    (message,) = ranks.run(run_broken, Layout(), arguments, far, 0)
    assert "after the weight sync of step 1 the rollout engine and the trainer disagree by" in message
    assert [row["skipped_steps"] for row in rows(tmp_path)] == [0, 1]


@pytest.mark.parametrize(
    ("layout", "more", "model"),
    [
        (Layout(tp=2, sp=True), ["--rollout-dtype=fp32"], LLAMA),
        (Layout(dp=2), ["--rollout-dtype=fp8-e4m3", "--rl-default-temperature=0.7"], GPT2),
    ],
    ids=["tp2-sp-fp32", "dp2-fp8"],
)
def test_a_sound_engine_passes_and_says_how_close_it_is(ranks, tmp_path, layout, more, model):
    arguments = flags(tmp_path, *RUN, *layout.flags(), *more, "--train-iters=2", model=model)
    assert set(ranks.run(run_training, layout, arguments)) == {None}
    errors = [row["rollout/sync_error"] for row in rows(tmp_path)]
    assert len(errors) == 2
    exact = "--rollout-dtype=fp32" in more
    assert all(0 < error < (1e-5 if exact else 0.05) for error in errors)


def test_the_tolerance_is_a_flag(ranks, tmp_path):
    arguments = flags(tmp_path, *RUN, "--rollout-dtype=int8", "--rollout-check-tolerance=1e-7")
    (message,) = ranks.run(run_training, Layout(), arguments)
    assert "nats a token, up to 1e-07 is rounding" in message
    loose = flags(tmp_path, *RUN, "--rollout-dtype=fp32", "--rollout-check-tolerance=100", "--train-iters=2")
    assert ranks.run(run_broken, Layout(), loose, PackedHead, 0) == [None]


def run_counted(words, blind):
    """(error, collectives by kind) of a run whose batches are compared, or not: ``blind``."""
    from megatron_rc.launch.training.checks.batch_check import BatchCheck

    def begin(self, *args):
        right(self, *args)
        self._is_pending, self.is_open = self._is_pending and not blind, self.is_open and not blind

    right = BatchCheck.begin
    with mock.patch.object(BatchCheck, "begin", begin), recorded() as calls:
        error = run_training(words)
    return error, collections.Counter(kind for kind, *_ in calls)


def test_the_check_of_a_batch_makes_no_collective(ranks, tmp_path):
    layout = Layout(cp=2, pp=2)
    arguments = flags(tmp_path, *RUN, *layout.flags(), "--train-iters=1")
    seeing, blind = (ranks.run(run_counted, layout, arguments, blind) for blind in (False, True))
    assert seeing == blind
    assert seeing[0][0] is None
    assert min(seeing[0][1].values()) > 0


def run_probed(words, restarts=()):
    """(error, syncs that a probe followed); the engine is started again before these syncs."""
    from megatron_rc.launch.rollouts.collector import RolloutCollector
    from megatron_rc.launch.training.checks.sync_check import SyncCheck

    synced = []
    probed = []
    sync = RolloutCollector.sync_weights
    check = SyncCheck.__call__

    def counted(self, chunks, version):
        if self.engine is not None and self.replica == 1 and len(synced) in restarts:
            self.engine.restarts = getattr(self.engine, "restarts", 0) + 1
        synced.append(version)
        return sync(self, chunks, version)

    def probe(self, step):
        probed.append(len(synced) - 1)
        return check(self, step)

    with mock.patch.object(RolloutCollector, "sync_weights", counted), mock.patch.object(SyncCheck, "__call__", probe):
        return run_training(words), probed


@pytest.mark.parametrize(
    ("more", "restarts", "expected"),
    [
        ([], (2,), [0, 2]),
        (["--sync-probe-interval=2"], (), [0, 2]),
        (["--rollout-staleness=1"], (), [0, 1]),
        # The last sync of a run serves an evaluation alone.
        ([*HELD_OUT, "--eval-interval=2", "--eval-problems=2", "--train-iters=2"], (), [0, 2]),
    ],
    ids=["restart", "interval", "staleness", "evaluation"],
)
def test_a_probe_follows_the_syncs_that_no_batch_can_tell_of(ranks, tmp_path, more, restarts, expected):
    layout = Layout(dp=2 if restarts else 1)
    arguments = flags(tmp_path, *RUN, *layout.flags(), *more)
    assert ranks.run(run_probed, layout, arguments, restarts) == [(None, expected)] * layout.dp


def batch_check_of(words, step, wrong):
    """The check of a batch with tokens of versions 0 and 1, whose trainer disagrees about those of one version."""
    from megatron_rc.launch.errors import RunError
    from megatron_rc.launch.training.batches.micro_batches import cut_batch
    from megatron_rc.launch.training.checks.batch_check import BatchCheck

    trainer = make_trainer(words)
    batch = share(trainer, 0)
    versions = (torch.arange(batch.tokens.shape[1]) % 2).expand(batch.tokens.shape).int()
    local = cut_batch(dataclasses.replace(batch, policy_versions=versions), trainer.config, trainer.groups).local
    check = BatchCheck(trainer.config, trainer.groups)
    check.is_on = True
    rollout = local.rollout_log_probs
    check.begin(step, torch.where(local.policy_versions == wrong, rollout - 1, rollout), local)
    try:
        check.hear(check.numbers)
    except RunError as error:
        return str(error)
    return check.metrics


def test_only_tokens_of_the_newest_weights_are_compared(ranks, tmp_path):
    arguments = flags(tmp_path, "--rollout-dtype=fp32")

    def found(step, wrong):
        (result,) = ranks.run(batch_check_of, Layout(), arguments, step, wrong)
        return result

    assert found(1, wrong=0) == {"rollout/sync_error": 0}
    assert "after the weight sync of step 1 the rollout engine and the trainer disagree by 1.0000" in found(1, wrong=1)
    assert found(2, wrong=1) == {}, "no token of the newest weights"
