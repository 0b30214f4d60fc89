"""Prompts whose responses have all the same reward make place for others; the reward of the most likely response."""

import random

import pytest
import torch

from megatron_rc.launch.engines import Sample
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.rollouts.sampler import RolloutSampler
from tests.support.ranks import Layout
from tests.support.recorded_training import flags
from tests.support.training_runs import LIVE, rows, run_training

EOS = 12
GROUP = 4


class Engine:
    """Prompts that begin with an even digit have the same response each time, the others one that the seed decides."""

    version = 3

    def __init__(self):
        self.asked = []
        self.answers = []

    def sample(self, prompts, params, max_new_tokens, seed):
        self.asked.append(([list(prompt) for prompt in prompts], params.top_k, seed))
        chance = random.Random(f"{seed}")
        results = []
        for place, prompt in enumerate(prompts):
            right = [token for token in range(prompt[-1] + 1, 10)]
            length = 0 if prompt[0] % 2 == 0 else (place + chance.randrange(3)) % (len(right) + 1)
            tokens = (right[:length] if params.top_k != 1 else right) or [prompt[-1]]
            results.append(Sample(tokens, [-1.0] * len(tokens), "length"))
        self.answers.append(results)
        return results


def sampler(tmp_path, *more):
    arguments = flags(tmp_path, "--run-name=run", "--grpo-iterations=1", "--vocab-size=13", *more)
    config, task = configure(arguments, 1)
    return RolloutSampler(config, task, Engine(), 0)


def groups_of(batch):
    return [batch.rewards[batch.group_ids == index].unique() for index in batch.group_ids.unique()]


@pytest.mark.parametrize("tries", [1, 2, 30])
def test_prompts_without_spread_make_place_for_others(tmp_path, tries):
    made = sampler(tmp_path, f"--dynamic-sampling={tries}")
    default = sampler(tmp_path)
    sampled = default.sample(0)
    plain = sampled.batch
    assert (len(default.engine.asked), len(sampled.counts), sampled.baselines) == (1, 3, None)
    assert any(len(values) == 1 for values in groups_of(plain))
    sampled = made.sample(0)
    batch = sampled.batch
    asked = made.engine.asked
    assert 1 < len(asked) <= 1 + tries
    assert sampled.counts["rollout/replaced_prompts"] == sum(len(prompts) for prompts, *_ in asked[1:]) // GROUP
    # Each response that was asked for is in the batch or among the excluded ones, with its length and its prompt.
    in_batch = batch.response_mask.sum(dim=1).tolist()
    excluded = [response.num_tokens for response in sampled.excluded]
    answered = [len(sample.token_ids) for samples in made.engine.answers for sample in samples]
    assert sorted(in_batch + excluded) == sorted(answered)
    assert not any(response.is_bad for response in sampled.excluded)
    prompts = [response.prompt for response in sampled.excluded]
    assert all(prompts.count(prompt) == GROUP for prompt in prompts)
    assert len(set(prompts)) == sampled.counts["rollout/replaced_prompts"]
    assert default.sample(0).excluded == []
    left = [values for values in groups_of(batch) if len(values) == 1]
    assert sampled.counts["rollout/flat_prompts"] == len(left)
    assert tries < 30 or not left
    # What had a spread is as it was, and so are ids and the shape.
    for index, values in enumerate(groups_of(plain)):
        of_prompt = plain.group_ids == index
        if len(values) > 1:
            assert torch.equal(batch.tokens[of_prompt], plain.tokens[of_prompt])
    assert torch.equal(batch.sample_ids, plain.sample_ids)
    # The same again, on whichever day: it follows from the step.
    again = sampler(tmp_path, f"--dynamic-sampling={tries}").sample(0).batch
    assert torch.equal(again.tokens, batch.tokens)


def test_no_prompt_is_drawn_twice(tmp_path, monkeypatch):
    made = sampler(tmp_path, "--dynamic-sampling=2")
    problems = made.task.problems
    drawn = []

    def watched(start, count, *, held_out=False):
        drawn.extend(range(start, start + count))
        return problems(start, count, held_out=held_out)

    monkeypatch.setattr(made.task, "problems", watched)
    num_first_draws = 0
    for step in range(6):
        num_first_draws += made.sample(step).batch.group_ids.unique().numel()
    assert len(drawn) > num_first_draws, "some were replaced"
    assert len(drawn) == len(set(drawn))


def test_the_greedy_response_to_each_prompt_is_asked_for_and_is_no_record(tmp_path):
    made = sampler(tmp_path, "--advantage-estimator=remax", "--dynamic-sampling=1")
    sampled = made.sample(0)
    plain = sampler(tmp_path, "--dynamic-sampling=1").sample(0)
    prompts, top_k, _ = made.engine.asked[-1]
    assert (top_k, len(prompts)) == (1, 4)
    assert len({seed for *_, seed in made.engine.asked}) == len(made.engine.asked), "no two calls share a seed"
    assert torch.equal(sampled.batch.tokens, plain.batch.tokens)
    assert [list(row[:2]) for row in sampled.batch.tokens[::GROUP].tolist()] == [prompt[:2] for prompt in prompts]
    text = made.task.text
    expected = []
    for prompt, one in zip(prompts, made.engine.answers[-1], strict=True):
        shown = text.decode(prompt)
        answer = "0123456789"[int(shown[-1]) + 1 :]
        response = text.response_text(one.token_ids)
        expected.append(made.task.reward(prompt=shown, response=response, label=answer, record={}))
    assert sampled.baselines[::GROUP].tolist() == pytest.approx(expected)
    assert max(expected) > 0
    assert torch.equal(sampled.baselines, sampled.baselines[::GROUP].repeat_interleave(GROUP))


@pytest.mark.parametrize("layout", [Layout(pp=2, dp=2)], ids=str)
def test_a_run_with_both(ranks, tmp_path, layout):
    """Baselines reach the last stage of each replica, and what was replaced is counted over all."""
    arguments = [*LIVE, "--advantage-estimator=remax", "--dynamic-sampling=1", "--train-iters=2", "--grpo-kl-beta=0"]
    arguments += ["--micro-batch-size=4", *layout.flags(), "--no-skip-steps-without-signal"]
    assert ranks.run(run_training, layout, flags(tmp_path, *arguments)) == [None] * layout.world
    for row in rows(tmp_path):
        assert 0 <= row["reward/greedy"] <= 1
        assert row["selection/replaced"] == GROUP * row["rollout/replaced_prompts"]
        ends = ("trained", "bad", "replaced", "overlong", "rejected", "skipped")
        assert row["selection/started"] == sum(row[f"selection/{end}"] for end in ends)
        assert row["selection/started"] == 16 + row["selection/replaced"]
        assert {"rollout/replaced_prompts", "rollout/flat_prompts", "reward/nonzero_advantages", "grad_norm"} <= set(
            row
        )
