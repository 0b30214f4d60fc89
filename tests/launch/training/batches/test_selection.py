"""The account of started responses: each ends in one place, the rates are those of plain enumeration."""

import itertools
import random
from fractions import Fraction

import pytest

from megatron_rc.launch.rollouts.excluded import Excluded
from megatron_rc.launch.training.batches.rollout_metrics import SampledResponse
from megatron_rc.launch.training.batches.selection import End, Selection

ENDS = [end.value for end in End]


def sampled(group, num_tokens, *, age=0.0, is_dropped=False, is_cut_off=False):
    return SampledResponse(float(group), float(num_tokens), age, float(is_dropped), float(is_cut_off))


def account(responses, excluded=(), *, replicas=1, mini_batches=1, masks_overlong=True):
    return Selection(
        responses, excluded, num_replicas=replicas, num_mini_batches=mini_batches, masks_overlong=masks_overlong
    )


def measured(selection):
    metrics = selection.metrics(knows_versions=True)
    assert all(name.startswith("selection/") for name in metrics)
    return {name.removeprefix("selection/"): value for name, value in metrics.items()}


def quarters(lengths, trained):
    """Inclusion of the shortest and the longest quarter, as the mean over all orders of responses of equal length.

    Each response stands four times, so that a quarter is as many as there are responses.
    """
    number = len(lengths)
    rates = []
    for sign in (1, -1):
        total = Fraction(0)
        orders = list(itertools.permutations(range(number)))
        for order in orders:
            ordered = sorted(order, key=lambda index: sign * lengths[index])
            fourfold = [index for index in ordered for _ in range(4)]
            total += Fraction(sum(trained[index] for index in fourfold[:number]), number)
        rates.append(float(total / len(orders)))
    return rates


@pytest.mark.parametrize("seed", range(8))
def test_rates_are_those_of_enumeration(seed):
    dice = random.Random(seed)
    num_rows = dice.choice([4, 6])
    responses = [sampled(row // 2, dice.randrange(1, 4), age=dice.random()) for row in range(num_rows)]
    accepted = [dice.random() < 0.6 for _ in responses]
    excluded = [Excluded((0, 1), dice.randrange(0, 4), is_bad=dice.random() < 0.5) for _ in range(dice.randrange(3))]
    selection = account(responses, excluded)
    selection.count_step(0, accepted)
    metrics = measured(selection)

    assert metrics["started"] == num_rows + len(excluded) == sum(metrics[end] for end in ENDS)
    assert metrics["trained"] == sum(accepted)
    assert metrics["rejected"] == num_rows - sum(accepted)
    assert metrics["inclusion"] == sum(accepted) / metrics["started"]
    lengths = [response.num_tokens for response in responses]
    trained = list(accepted)
    for response in excluded:
        if response.num_tokens:
            lengths.append(response.num_tokens)
            trained.append(False)
    assert [metrics["inclusion_shortest"], metrics["inclusion_longest"]] == pytest.approx(quarters(lengths, trained))
    rates = [sum(accepted[row : row + 2]) / 2 for row in range(0, num_rows, 2)]
    rates += [0.0] * bool(excluded)
    assert metrics["prompts_without"] == rates.count(0) / len(rates)
    mean = sum(rates) / len(rates)
    assert metrics["inclusion_prompt_std"] ** 2 == pytest.approx(sum((rate - mean) ** 2 for rate in rates) / len(rates))
    ages = [response.age for response, is_accepted in zip(responses, accepted, strict=True) if is_accepted]
    tokens = [response.num_tokens for response, is_accepted in zip(responses, accepted, strict=True) if is_accepted]
    if tokens:
        assert metrics["staleness_mean"] == pytest.approx(sum(ages) / sum(tokens))
    assert ("staleness_mean" in metrics) == bool(tokens)
    assert "selection/staleness_mean" not in selection.metrics(knows_versions=False)


def test_each_response_ends_in_one_place():
    """Two replicas, two mini-batches of two responses each, two steps on the first one, the second left out."""
    responses = [
        # Replica 0: the first mini-batch, then the second.
        sampled(0, 3),
        sampled(0, 3),
        sampled(1, 5),
        sampled(1, 9, is_cut_off=True),
        # Replica 1.
        sampled(2, 9, is_cut_off=True),
        sampled(2, 0, is_dropped=True),
        sampled(3, 4),
        sampled(3, 0, is_dropped=True),
    ]
    excluded = [Excluded((2, 0), 0, is_bad=True), Excluded((3, 0), 7, is_bad=True), Excluded((3, 0), 7, is_bad=True)]
    excluded += [Excluded((1, 1), 5, is_bad=False), Excluded((1, 1), 6, is_bad=False)]
    selection = account(responses, excluded, replicas=2, mini_batches=2)
    selection.count_step(0, [False, False, False, False])
    selection.count_step(1, None)
    selection.count_step(0, [True, False, True, False])
    selection.count_step(1, None)
    ends = [response.end for response in selection.started()]
    assert ends[:3] == [End.TRAINED, End.REJECTED, End.SKIPPED]
    assert ends[3:6] == [End.OVERLONG, End.OVERLONG, End.SKIPPED]
    assert ends[6:] == [End.BAD] * 3 + [End.REPLACED] * 2
    metrics = measured(selection)
    counts = {"trained": 1, "bad": 3, "replaced": 2, "overlong": 2, "rejected": 1, "skipped": 2}
    assert {end: metrics[end] for end in ENDS} == counts
    assert (metrics["started"], metrics["finished"]) == (11, 8)
    # Group 0 has one of two; groups 1 to 3 and the replaced prompt have none.
    assert metrics["prompts_without"] == 4 / 5
    assert metrics["inclusion_prompt_std"] == pytest.approx(0.2)

    # Without --overlong mask, responses that were cut off end as all others do.
    selection = account(responses, excluded, replicas=2, mini_batches=2, masks_overlong=False)
    selection.count_step(0, [True, True, True, False])
    assert [measured(selection)[end] for end in ("trained", "overlong", "skipped")] == [3, 0, 3]


def test_a_dropped_response_of_a_record_is_a_bad_one_of_unknown_length():
    selection = account([sampled(0, 4), sampled(0, 0, is_dropped=True)], None)
    selection.count_step(0, [True, False])
    metrics = measured(selection)
    assert [metrics[name] for name in ("started", "finished", "bad", "trained")] == [2, 1, 1, 1]
    assert (metrics["inclusion_shortest"], metrics["inclusion_longest"]) == (1, 1)


def test_a_selection_by_length_is_seen_in_the_quarters():
    responses = [sampled(index // 4, 10 + index) for index in range(16)]
    selection = account(responses)
    selection.count_step(0, [index < 12 for index in range(16)])
    metrics = measured(selection)
    assert (metrics["inclusion"], metrics["inclusion_shortest"], metrics["inclusion_longest"]) == (0.75, 1, 0)
    assert metrics["prompts_without"] == 0.25
