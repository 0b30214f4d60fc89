"""Single bad responses: one ends the run, or costs that response alone, which is counted and written down."""

import json
import math
import threading
from dataclasses import replace
from unittest import mock

import pytest
import torch

from megatron_rc.launch.engines import EngineError, Sample
from megatron_rc.launch.engines.answers import make_asks, make_sample
from megatron_rc.launch.rollouts.samples import GoodSamples, dropped
from megatron_rc.launch.tasks.ends import ResponseEnds
from megatron_rc.records.rollout import SamplingParams, load_rollouts
from tests.support.ranks import Layout, RankFailure
from tests.support.recorded_training import VOCABULARY, flags, run_config
from tests.support.training_runs import LIVE, rows, run_training

LONGEST = 4
PROMPTS = [[1], [2], [3]]
GOOD = Sample([3, 4], [-1.0, -2.0], "stop")
BAD = {
    "id": (Sample([3, VOCABULARY], [-1.0, -1.0], "stop"), "response token 1 is 13, expected less than"),
    "negative": (Sample([-1, 3], [-1.0, -1.0], "stop"), "response token 0 is -1, expected less than"),
    "empty": (Sample([], [], "stop"), "the response is empty"),
    "uneven": (Sample([3, 3], [-1.0] * 3, "length"), "3 log-probs came for 2 tokens"),
    "versions": (Sample([3, 3], [-1.0] * 2, "length", versions=[7]), "1 versions came for 2 tokens"),
    "long": (Sample([3] * 5, [-1.0] * 5, "length"), "5 tokens came, 4 were asked for"),
    "server": (Sample([3], [math.nan], "stop", "http://a: it says so"), "http://a: it says so"),
}
LOG_PROBS = {
    "nan": (Sample([3, 4], [-1.0, math.nan], "stop"), "the log-prob of response token 1 is nan, expected a finite"),
    "infinite": (Sample([3], [-math.inf], "stop"), "the log-prob of response token 0 is -inf"),
    "positive": (Sample([3], [0.5], "stop"), "the log-prob of response token 0 is 0.5"),
}


class Engine:
    """Gives what it is told, one list a call."""

    version = 7

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    def sample(self, prompts, params, max_new_tokens, seed):
        self.asked.append((prompts, seed))
        return self.answers.pop(0)


def good_samples(tmp_path, engine, *words):
    return GoodSamples(run_config(flags(tmp_path, "--run-name=run", *words)), engine, ResponseEnds((1,)), replica=1)


def ask(samples):
    return samples(PROMPTS, SamplingParams(), LONGEST, 5)


@pytest.mark.parametrize("kind", BAD | LOG_PROBS)
def test_a_bad_response_ends_the_run_or_is_dropped(tmp_path, kind):
    bad, message = (BAD | LOG_PROBS)[kind]
    if kind in BAD:
        with pytest.raises(EngineError) as error:
            ask(good_samples(tmp_path, Engine([GOOD, bad, GOOD])))
        assert message in str(error.value)
        assert kind == "server" or str(error.value).startswith("--rollout-engine transformers, prompt 1: ")
        assert not (tmp_path / "run" / "bad").exists()
    samples = good_samples(tmp_path, engine := Engine([GOOD, bad, GOOD]), "--bad-samples=drop")
    assert ask(samples) == [GOOD, Sample([], [], "abort", bad_lengths=(len(bad.token_ids),)), GOOD]
    assert (samples.bad, len(engine.asked)) == (1, 1)
    line = json.loads((tmp_path / "run" / "bad" / "samples.jsonl").read_text())
    assert message in line["error"]
    assert (line["replica"], line["index"], line["try"], line["weights"], line["prompt"]) == (1, 1, 1, 7, [2])
    assert line["tokens"] == bad.token_ids
    assert len(line["log_probs"]) == len(bad.log_probs)


def test_a_bad_response_is_listed_with_its_step_and_its_own_weights(tmp_path):
    """The engine has weights of version 7 by now."""
    bad = replace(BAD["id"][0], versions=[3, 5])
    samples = good_samples(tmp_path, Engine([GOOD, bad, GOOD], [bad]), "--bad-samples=drop")
    samples(PROMPTS, SamplingParams(), LONGEST, 5, step=6)
    samples(PROMPTS[:1], SamplingParams(), LONGEST, 5)
    lines = [json.loads(line) for line in (tmp_path / "run" / "bad" / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["versions"], line["weights"]) for line in lines] == [(6, [3, 5], 7), (None, [3, 5], 7)]


def test_a_bad_response_can_be_sampled_again(tmp_path):
    bad, _ = BAD["id"]
    too_long, _ = BAD["long"]
    engine = Engine([bad, GOOD, bad], [GOOD, too_long], [bad])
    samples = good_samples(tmp_path, engine, "--bad-samples=resample", "--bad-sample-attempts=2")
    resampled = replace(GOOD, bad_lengths=(2,))
    assert ask(samples) == [resampled, GOOD, Sample([], [], "abort", bad_lengths=(2, 5, 2))]
    assert samples.bad == 4
    assert [prompts for prompts, _ in engine.asked] == [PROMPTS, [[1], [3]], [[3]]]
    assert len({seed for _, seed in engine.asked}) == 3
    lines = [json.loads(line) for line in (tmp_path / "run" / "bad" / "samples.jsonl").read_text().splitlines()]
    assert [(line["prompt"], line["try"]) for line in lines] == [([1], 1), ([3], 1), ([3], 2), ([3], 3)]
    samples = good_samples(tmp_path / "other", Engine([BAD["id"][0]]), "--bad-samples=drop")
    (tmp_path / "other" / "run").mkdir(parents=True)
    (tmp_path / "other" / "run" / "bad").write_text("")
    with pytest.raises(EngineError, match=r"run/bad/samples.jsonl cannot be written \(.*\): make room, or choose"):
        ask(samples)


@pytest.mark.parametrize("kind", LOG_PROBS)
@pytest.mark.parametrize("policy", ["stop", "drop"])
def test_log_probs_that_the_correction_rejects_cost_no_sample(tmp_path, kind, policy):
    bad, _ = LOG_PROBS[kind]
    of_server, _ = BAD["server"]
    policies = ("--bad-log-probs=reject_token", f"--bad-samples={policy}")
    samples = [GOOD, bad, of_server]
    assert ask(good_samples(tmp_path, Engine(list(samples)), *policies)) == samples


@pytest.mark.parametrize("value", [None, "much", -9999.0, 0.5, True, math.nan], ids=str)
def test_an_unusable_log_prob_of_an_answer_is_nan_with_a_fault(value):
    """Also -9999, which vLLM writes for minus infinity: the correction would take it for a number."""
    (of_prompt,) = make_asks([[1]], SamplingParams(), LONGEST, 0, ends=ResponseEnds((9,)))
    sample = make_sample(of_prompt, [3, 9], [-1.0, value], "stop", "http://a")
    assert sample.fault.startswith(f"http://a, prompt 0: the log-prob of response token 1 is {value}, ")
    assert sample.log_probs[0] == -1
    assert math.isnan(sample.log_probs[1])


def train_with_bad_samples(words, share, bad, replicas=(1,)):
    """A run whose real engine gives some bad responses on some replicas."""
    from megatron_rc.launch.rollouts import collector

    make = collector.make_engine

    def spoilt(config, text, replica):
        engine = make(config, text, replica)
        sample = engine.sample

        def some(prompts, *args):
            samples = sample(prompts, *args)
            # The check after a weight sync asks for one response to a prompt.
            if replica in replicas and all(prompt == prompts[0] for prompt in prompts[:4]):
                samples[: int(share * 8)] = [bad] * int(share * 8)
            return samples

        engine.sample = some
        return engine

    with mock.patch.object(collector, "make_engine", spoilt):
        return run_training(words)


def test_a_bad_response_costs_that_response_on_all_ranks(ranks, tmp_path):
    replicas = Layout(dp=2)
    arguments = flags(tmp_path, *LIVE, "--train-iters=2", f"--save-rollouts={tmp_path}/records")
    arguments += ["--rl-use-sequence-packing"]
    bad = BAD["id"][0]
    with pytest.raises(RankFailure, match="step 0 failed: EngineError: --rollout-engine transformers, prompt 0: "):
        ranks.run(train_with_bad_samples, replicas, arguments, 0.5, bad)
    layout = Layout(dp=2, tp=2)
    dropping = [*arguments, *layout.flags(), "--bad-samples=drop"]
    assert ranks.run(train_with_bad_samples, layout, dropping, 0.5, bad) == [None] * 4
    first, second = rows(tmp_path)
    assert (first["rollout/bad_samples"], first["rollout/dropped_samples"]) == (4, 4)
    assert second["skipped_steps"] == 0
    path = str(tmp_path / "records" / "step-0000000-replica-000{}.safetensors")
    batches = [load_rollouts(path.format(replica)) for replica in (0, 1)]
    assert [dropped(batch).tolist() for batch in batches] == [[False] * 8, [True] * 4 + [False] * 4]
    kept = torch.cat([batch.rewards[~dropped(batch)] for batch in batches]).double()
    assert first["reward/mean"] == pytest.approx(kept.mean().item())
    assert first["reward/min"] == kept.min()
    assert first["rollout/response_length"] == sum(int(batch.response_mask.sum()) for batch in batches) / len(kept)
    ends = [first[f"selection/{name}"] for name in ("started", "finished", "bad", "trained", "skipped")]
    assert ends in ([16, 12, 4, 12, 0], [16, 12, 4, 0, 12])
    arguments += ["--bad-samples=resample", "--grpo-iterations=2"]
    assert ranks.run(train_with_bad_samples, replicas, arguments, 1.0, bad) == [None] * 2, "half of the batch is enough"
    # Retries are started responses too: here all of one replica are bad.
    first, second = rows(tmp_path)
    assert "selection/started" not in first, "the numbers come with the last step on the batch"
    assert second["selection/bad"] == second["rollout/bad_samples"] == 8 * 4
    assert (second["selection/started"], second["selection/finished"]) == (8 + 8 * 4, 8)


def test_a_batch_that_is_left_too_small_is_the_error(ranks, tmp_path):
    layout = Layout(dp=2)
    arguments = flags(tmp_path, *LIVE, *layout.flags(), "--train-iters=2", "--bad-samples=drop")
    errors = ranks.run(train_with_bad_samples, layout, arguments, 1.0, BAD["negative"][0], (0, 1))
    (error,) = set(errors)
    assert error.startswith("RunError: the rollout of step 0 failed: 16 of its 16 responses ")
    assert f" {tmp_path}/run/bad: " in error


@pytest.mark.parametrize("policy", ["reject_token", "reject_sequence"])
def test_an_engines_nan_is_rejected_by_the_correction(ranks, tmp_path, policy):
    layout = Layout(dp=2)
    arguments = flags(tmp_path, *LIVE, *layout.flags(), "--train-iters=1", f"--bad-log-probs={policy}")
    # The other log-probs of these responses are made up.
    arguments.insert(0, "--rollout-check-tolerance=10")
    save = f"--save-rollouts={tmp_path}/records"
    assert ranks.run(train_with_bad_samples, layout, [*arguments, save], 0.5, LOG_PROBS["nan"][0]) == [None] * 2
    (row,) = rows(tmp_path)
    assert row["rollout_corr/bad_log_probs"] == 4
    assert math.isfinite(row["grad_norm"])
    assert row["rollout/dropped_samples"] == 0
    # Recorded ones too.
    load = f"--load-rollouts={tmp_path}/records"
    if policy == "reject_token":
        with pytest.raises(RankFailure, match="the rollout log-prob of sample 8, token 3 is nan: "):
            ranks.run(run_training, layout, [*arguments[:-1], load])
    assert ranks.run(run_training, layout, [*arguments, load]) == [None] * 2
    (again,) = rows(tmp_path)
    assert [again[name] for name in ("rollout_corr/bad_log_probs", "grad_norm")] == [4, row["grad_norm"]]


def test_bad_responses_are_counted_for_the_thread_that_asked(tmp_path):
    """An evaluation on another thread does not count in the batch that is sampled meanwhile."""
    samples = good_samples(tmp_path, Engine([GOOD, BAD["empty"][0], GOOD]), "--bad-samples=drop")
    counts = []
    thread = threading.Thread(target=lambda: (ask(samples), counts.append(samples.bad)))
    thread.start()
    thread.join()
    assert (counts, samples.bad) == ([1], 0)
