"""The check after every weight sync: engines that keep something old are stopped, sound ones never."""

import copy
import json

import pytest
import torch

from megatron_rc.launch.engines import Sample
from tests.support.ranks import Layout
from tests.support.recorded_training import GPT2, LLAMA, flags
from tests.support.training_runs import run_training

RUN = ["--grpo-iterations=1", "--lr=3e-3", "--run-name=run", "--rollout-rs-threshold=0.01_100,10", "--train-iters=3"]
# An entropy bonus moves the weights even where no response earns anything.
RUN += ["--grpo-entropy-term-weight=0.1", "--num-layers=2", "--micro-batch-size=8"]


class PackedHead:
    """Keeps the output layer of the first sync, as an engine does that packed it before the embeddings changed."""

    def __init__(self, engine):
        self.engine, self.head = engine, None

    @property
    def version(self):
        return self.engine.version

    def load_weights(self, weights, version):
        model = self.engine.model
        if self.head is not None:
            model.lm_head.weight = model.model.embed_tokens.weight
        self.engine.load_weights(weights, version)
        self.head = model.lm_head.weight.clone() if self.head is None else self.head
        model.lm_head.weight = torch.nn.Parameter(self.head, requires_grad=False)

    def sample(self, *args):
        return self.engine.sample(*args)


class StalePrefix(PackedHead):
    """Keeps what the weights of the first sync made of the prompts."""

    def load_weights(self, weights, version):
        self.engine.load_weights(weights, version)
        self.head = copy.deepcopy(self.engine.model) if self.head is None else self.head

    def sample(self, *args):
        new = self.engine.model

        def model(past_key_values, **rest):
            return (new if past_key_values is not None else self.head)(past_key_values=past_key_values, **rest)

        self.engine.model = model
        try:
            return self.engine.sample(*args)
        finally:
            self.engine.model = new


class Shifted(PackedHead):
    """Reports the log-prob of the token before."""

    def load_weights(self, weights, version):
        self.engine.load_weights(weights, version)

    def sample(self, *args):
        found = self.engine.sample(*args)
        return [Sample(one.token_ids, [-2.0, *one.log_probs[:-1]], one.finish_reason) for one in found]


class Silent(Shifted):
    """Fails in the middle of the check."""

    def sample(self, *args):
        raise RuntimeError("out of paper")


def run_broken(words, fault, replica):
    """``train`` with this fault in the engine of one replica; what it raised."""
    from megatron.core import parallel_state

    from megatron_rc.launch.rollouts import collector as rollout

    right = rollout.RolloutCollector._default_engine

    def wrong(self):
        here = parallel_state.get_data_parallel_rank() == replica
        return fault(right(self)) if here else right(self)

    rollout.RolloutCollector._default_engine = wrong
    try:
        return run_training(words)
    finally:
        rollout.RolloutCollector._default_engine = right


def steps(folder):
    file = folder / "run" / "metrics.jsonl"  # made with its first line
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.parametrize(
    ("fault", "layout", "made", "message"),
    [
        (PackedHead, Layout(), 1, "does the engine keep older weights, or a cache that they filled?"),
        (PackedHead, Layout(pp=2, dp=2), 1, "does the engine keep older weights"),
        (StalePrefix, Layout(cp=2), 1, "does the engine keep older weights, or a cache that they filled?"),
        (Shifted, Layout(tp=2), 0, "shifted by +1; align both to the label tokens"),
        (Silent, Layout(dp=2), 0, "the check of the rollout engine failed: RuntimeError: out of paper"),
    ],
)
def test_an_engine_with_something_old_ends_the_run_on_all_ranks(ranks, tmp_path, fault, layout, made, message):
    """Only the last replica's engine is broken; the first sync cannot tell what later ones leave behind."""
    words = flags(tmp_path, *RUN, "--rollout-dtype=fp32", *layout.flags())
    messages = ranks.run(run_broken, layout, words, fault, layout.dp - 1)
    assert set(messages) == {messages[0]}
    assert messages[0].startswith("AgreedError: ")
    assert message in messages[0]
    if "sync" in messages[0]:
        assert f"after the weight sync of step {made} the rollout engine and the trainer disagree by" in messages[0]
    assert len(steps(tmp_path)) == made, "no step was made with wrong weights"


@pytest.mark.parametrize(
    ("layout", "more", "model"),
    [
        (Layout(tp=2, pp=2, sp=True), ["--rollout-dtype=fp32"], LLAMA),
        (Layout(pp=2, vpp=True), ["--num-layers=4", "--rollout-dtype=bf16"], LLAMA),
        (Layout(cp=2, dp=2), ["--rollout-dtype=fp8-e4m3", "--rl-default-temperature=0.7"], GPT2),
        (Layout(cp=2), ["--rollout-dtype=int8", "--rl-use-sequence-packing", "--bypass-mode"], LLAMA),
    ],
    ids=["tp2-pp2-sp-fp32", "pp2-vpp-bf16", "cp2-dp2-fp8", "cp2-packed-int8"],
)
def test_a_sound_engine_passes_and_says_how_close_it_is(ranks, tmp_path, layout, more, model):
    assert set(ranks.run(run_training, layout, flags(tmp_path, *RUN, *layout.flags(), *more, model=model))) == {None}
    errors = [row["rollout/sync_error"] for row in steps(tmp_path)]
    assert len(errors) == 3
    exact = "--rollout-dtype=fp32" in more
    assert all(0 < error < (1e-5 if exact else 0.05) for error in errors)


def test_the_tolerance_is_a_flag(ranks, tmp_path):
    words = flags(tmp_path, *RUN, "--rollout-dtype=int8", "--rollout-check-tolerance=1e-7")
    (message,) = ranks.run(run_training, Layout(), words)
    assert "nats a token, up to 1e-07 is rounding" in message
    loose = flags(tmp_path, *RUN, "--rollout-dtype=fp32", "--rollout-check-tolerance=100")
    assert ranks.run(run_broken, Layout(), loose, PackedHead, 0) == [None]
