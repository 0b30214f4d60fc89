"""An estimator that is added as CONTRIBUTING says: one object. Its numbers are the same on every layout."""

import dataclasses
import math
from unittest import mock

import pytest
import torch

from examples.custom_estimator import MAXRL
from megatron_rc import group_advantages
from megatron_rc.advantages.estimators import GROUP_ESTIMATORS, AdvantageEstimator, define
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.groups import group_rank, group_size
from tests.support.on_rank import recorded
from tests.support.ranks import Layout

EXACT = {"rtol": 1e-12, "atol": 1e-12}
PROMPTS = 5
RESPONSES = 23


def behind_the_best(terms):
    """By how much a response lies behind its prompt's best one, by token, over the share of rewards above 0."""
    best = terms.prompt_max(terms.rewards)
    mean_length = terms.prompt_sum(terms.lengths) / terms.counts.clamp(min=1)
    positive, everything = terms.batch_sum((terms.rewards > 0).double(), torch.ones_like(terms.rewards))
    behind = torch.where(terms.kept, best - terms.rewards, 0)
    return -behind / mean_length.clamp(min=1) * everything / positive.clamp(min=1)


BEHIND = AdvantageEstimator(
    name="behind_the_best",
    words="(x - largest x) / mean length, over the share of positive rewards",
    advantage=behind_the_best,
    uses_batch=True,
)


@pytest.fixture(autouse=True)
def tables():
    """Define both as at the end of ``advantages/estimators.py``; the table is as before afterwards."""
    with mock.patch.dict(GROUP_ESTIMATORS):
        define(MAXRL, BEHIND)
        yield


def responses():
    """Rewards of 0 and above, prompts, kept ones, lengths and weights of all responses, [RESPONSES]."""
    dice = torch.Generator().manual_seed(5)
    rewards = torch.rand(RESPONSES, generator=dice, dtype=torch.float64)
    group_ids = torch.randint(0, PROMPTS - 1, (RESPONSES,), generator=dice)
    rewards[group_ids == 2] = 0.0  # a prompt that is never solved
    group_ids[7] = PROMPTS - 1  # a prompt with a single response
    return {
        "rewards": rewards,
        "group_ids": group_ids,
        "kept": torch.rand(RESPONSES, generator=dice) < 0.7,
        "lengths": torch.randint(1, 9, (RESPONSES,), generator=dice),
        "weights": torch.rand(RESPONSES, generator=dice, dtype=torch.float64) + 0.1,
    }


def by_loops(name, rewards, group_ids, kept, lengths, weights):
    """The advantages of both estimators from their formulas, one response at a time."""
    advantages = torch.zeros(RESPONSES, dtype=torch.float64)
    all_kept = [row for row in range(RESPONSES) if kept[row]]
    share_of_positive = sum(float(rewards[row] > 0) for row in all_kept) / len(all_kept)
    for row in all_kept:
        siblings = [sibling for sibling in range(RESPONSES) if group_ids[sibling] == group_ids[row]]
        kept_siblings = [sibling for sibling in siblings if kept[sibling]]
        if name == "maxrl":
            total = math.fsum(float(weights[sibling]) for sibling in kept_siblings)
            mean = math.fsum(float(weights[sibling] * rewards[sibling]) for sibling in kept_siblings) / total
            if len(siblings) > 1 and mean > 0:
                advantages[row] = (rewards[row] - mean) / mean
        else:
            best = max(float(rewards[sibling]) for sibling in kept_siblings)
            length = sum(int(lengths[sibling]) for sibling in kept_siblings) / len(kept_siblings)
            advantages[row] = (rewards[row] - best) / length / share_of_positive
    return advantages


@pytest.mark.parametrize("name", ["maxrl", "behind_the_best"])
@pytest.mark.parametrize("num_groups", [None, PROMPTS])
def test_the_advantages_are_the_formulas(name, num_groups):
    advantages = group_advantages(**responses(), estimator=name, num_groups=num_groups)
    torch.testing.assert_close(advantages, by_loops(name, **responses()), **EXACT)
    itself = group_advantages(**responses(), estimator=GROUP_ESTIMATORS[name], num_groups=num_groups)
    assert torch.equal(itself, advantages)
    assert advantages.abs().max() > 0.1


def shard_of_rank(num_rows):
    groups = ParallelGroups.from_megatron()
    rank = group_rank(groups.dp)
    size = group_size(groups.dp)
    return groups, torch.arange(rank, num_rows, size)


def advantages_on_a_rank(name):
    """This rank's rows, their advantages, and the collectives that were made."""
    groups, rows = shard_of_rank(RESPONSES)
    local = {key: value[rows] for key, value in responses().items()}
    with mock.patch.dict(GROUP_ESTIMATORS):
        define(MAXRL, BEHIND)
        with recorded() as calls:
            advantages = group_advantages(**local, estimator=name, num_groups=PROMPTS, groups=groups)
    return rows, advantages, list(calls)


@pytest.mark.parametrize("name", ["maxrl", "behind_the_best"])
def test_responses_to_a_prompt_may_lie_on_several_ranks(ranks, name):
    """Every rank takes every dp-th response."""
    expected = by_loops(name, **responses())
    entries = PROMPTS + 1
    of_every_estimator = [("SUM", 4, entries * 5), ("SUM", 4, entries)]
    of_this_one = [("MAX", 4, entries), ("SUM", 4, entries), ("SUM", 4, 2)] if name == "behind_the_best" else []
    for rows, advantages, calls in ranks.run(advantages_on_a_rank, Layout(dp=4), name):
        torch.testing.assert_close(advantages, expected[rows], **EXACT)
        assert calls == of_every_estimator + of_this_one


def test_errors_list_it_and_what_it_needs_is_asked_of_it():
    with pytest.raises(ValueError, match=r"estimator='maxrl2' is unknown: use one of grpo, .*, maxrl, behind_the_best"):
        group_advantages(torch.ones(2), torch.zeros(2, dtype=torch.int64), estimator="maxrl2")
    rewards = torch.ones(2)
    group_ids = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="give lengths"):
        group_advantages(rewards, group_ids, estimator="behind_the_best")
    with pytest.raises(ValueError, match=r"groups .* without num_groups"):
        group_advantages(rewards, group_ids, estimator="maxrl", groups=ParallelGroups())
    group_advantages(rewards, group_ids, estimator="behind_the_best", lengths=rewards, groups=ParallelGroups())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "Max RL"}, "letters, digits, hyphens and underscores"),
        ({"advantage": lambda terms: terms.centred.sum()}, "one number a row"),
        ({"advantage": lambda terms: terms.rewards > 0}, "finite floats"),
        ({"advantage": lambda terms: terms.centred / terms.means}, "finite floats"),
        ({"advantage": behind_the_best}, "define it with uses_batch=True"),
    ],
)
def test_one_that_does_not_fit_together_cannot_be_defined(changed, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MAXRL, **changed)


def test_a_name_stands_for_one_estimator():
    with pytest.raises(ValueError, match="'maxrl' is defined already"):
        define(MAXRL)


def test_a_reward_that_is_not_finite_is_not_hidden():
    rewards = torch.tensor([1.0, math.nan, 0.0, 0.0])
    advantages = group_advantages(rewards, torch.tensor([0, 0, 1, 1]), estimator="maxrl")
    assert advantages.isnan().tolist() == [True, True, False, False]
