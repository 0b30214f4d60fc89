"""From shards: the oracle's numbers on every rank, the budget of collectives, and errors alike everywhere."""

import math

import pytest
import torch
import torch.distributed as dist

from megatron_rc import PlanInputs, RolloutCorrection, RolloutCorrectionConfig, correct_rollouts
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.parallel import ParallelGroups, SequenceLayout
from megatron_rc.parallel.groups import group_rank
from tests.support.correction_cases import CASES, ROWS, WIDTH, clear_batch, sizes
from tests.support.correction_comparison import assert_metrics, config_of
from tests.support.on_rank import cp_place, outcome, recorded
from tests.support.ranks import Layout


def my_rows(split):
    """The rows of this rank's replica."""
    return torch.arange(ROWS).split(split)[group_rank(ParallelGroups.from_megatron().dp)]


def row_lengths(batch, form):
    """Tokens of each row that are kept: all, or packed only up to the last valid one, in multiples of 8."""
    if form != "packed":
        return [WIDTH] * len(batch.mask)
    return [8 * math.ceil((int(row.nonzero().max()) + 1) / 8) if row.any() else 0 for row in batch.mask]


def my_layout(lengths, form, where=None):
    """How this rank's slice of some rows is cut."""
    where = where or cp_place()
    if form == "packed":
        local = [length // where["cp_size"] for length in lengths]
        return SequenceLayout.packed([sum(local[:index]) for index in range(len(local) + 1)], **where)
    split = "contiguous" if form == "contiguous" else "zigzag"
    return SequenceLayout.padded(len(lengths), WIDTH // where["cp_size"], split=split, **where)


def my_part(batch, form, layout=None):
    """(layout, tensors, sides) of these rows on this rank."""
    lengths = row_lengths(batch, form)
    layout = layout or my_layout(lengths, form)

    def cut(tensor):
        rows = [row[:length] for row, length in zip(tensor, lengths, strict=True)]
        return layout.cut(torch.cat([*rows, tensor.new_empty(0)]) if form == "packed" else tensor)

    sides = {name: cut(value) if value.dim() == 2 else value for name, value in batch.sides.items()}
    return layout, [cut(tensor) for tensor in (batch.train, batch.rollout, batch.mask)], sides


def my_places(rows, layout):
    """(row, position) of each local token in the whole batch, flat."""
    return rows[layout.sequence_index], layout.positions().reshape(-1)


def correct_shards(batches, split, form):
    """For each case on one rank: (rows, positions, weights, mask, the result's numbers)."""
    groups = ParallelGroups.from_megatron()
    rows = my_rows(split)
    results = {}
    for name, batch in batches.items():
        pieces = list(rows.split(3)) or [rows] if form == "lists" else [rows]
        parts = [my_part(batch.rows(piece), form) for piece in pieces]
        tensors = [[part[1][index] for part in parts] for index in range(3)]
        sides = {key: [part[2][key] for part in parts] for key in batch.sides}
        layouts = [part[0] for part in parts]
        if form != "lists":
            tensors = [values[0] for values in tensors]
            layouts = layouts[0]
            sides = {key: values[0] for key, values in sides.items()}
        result = correct_rollouts(*tensors, config_of(name), layouts, groups, **sides, **sizes(batch))
        result.check()
        mask = torch.cat([part.reshape(-1) for part in (result.mask if form == "lists" else [result.mask])])
        weights = result.weights
        if weights is not None:
            weights = torch.cat([part.reshape(-1) for part in (weights if form == "lists" else [weights])])
        numbers = (result.denominators, result.skip, result.sequence_lengths, result.metrics())
        places = my_places(rows, my_layout(row_lengths(batch.rows(rows), form), form))
        results[name] = (rows, places, weights, mask, numbers)
    return results


# What crosses the borders of slices and of replicas: sums, maxima, prefixes, turns, prompts.
SOME = ["maxima and veto", "min prefix", "prefix", "turns by id", "turns", "groups", "sequence by staleness"]
# The whole table on CP2 x DP2, and on a replica without a row beside one with all of them; some of it in the other
# forms, and on four slices of a sequence.
LAYOUTS_AND_FORMS = [
    (Layout(cp=2, dp=2), "padded", [7, 5], list(CASES)),
    (Layout(dp=2), "packed", [0, 12], list(CASES)),
    (Layout(cp=2, dp=2), "packed", [7, 5], SOME),
    (Layout(cp=2, dp=2), "contiguous", [7, 5], SOME),
    (Layout(cp=2, dp=2), "lists", [7, 5], SOME),
    (Layout(cp=4), "packed", [12], SOME),
]


@pytest.mark.parametrize(
    ("layout", "form", "split", "names"),
    LAYOUTS_AND_FORMS,
    ids=[f"{layout}-{form}" for layout, form, *_ in LAYOUTS_AND_FORMS],
)
def test_shards_match_the_oracle(ranks, layout, form, split, names):
    clear = {name: clear_batch(name) for name in names}
    batches = {name: batch for name, (batch, _) in clear.items()}
    assert_as_expected(ranks.run(correct_shards, layout, batches, split, form), clear)


def assert_as_expected(everywhere, clear):
    """The oracle's numbers for each case on every rank, as :func:`correct_shards` gives them."""
    for name, (_, expected) in clear.items():
        for rank in everywhere:
            rows, places, weights, mask, numbers = rank[name]
            denominators, skip, lengths, metrics = numbers
            assert torch.equal(mask, torch.tensor(expected.mask)[places])
            if weights is not None:
                want = torch.tensor(expected.weights, dtype=torch.float64)[places]
                torch.testing.assert_close(weights, want, rtol=1e-9, atol=1e-12)
            assert denominators.tolist() == expected.denominators
            assert skip.tolist() == expected.skip
            assert lengths.tolist() == torch.tensor(expected.sequence_lengths)[rows].tolist()
            assert_metrics(metrics, expected, 1e-9)
            assert metrics == everywhere[0][name][4][3]


def count_collectives(names, length):
    """The collectives of each case; ranks hold differently many valid tokens, one of them none."""
    groups = ParallelGroups.from_megatron()
    calls_by_name = {}
    where = cp_place()
    layout = SequenceLayout.padded(2, length // where["cp_size"], **where)
    for name in names:
        train = torch.full(layout.shape, -1.0)
        mask = torch.rand(layout.shape) < dist.get_rank() / 4
        sides = {"group_ids": torch.zeros(2, dtype=torch.int64), "advantages": torch.ones(2)}
        if "token_advantages" in CASES[name].sides:
            sides["advantages"] = torch.ones(layout.shape)
        if "rollout_staleness_scale" in CASES[name].fields:
            sides |= {"policy_versions": torch.randint(4, layout.shape), "current_version": 4}
        with recorded() as seen:
            result = correct_rollouts(train, train - 0.1, mask, config_of(name), layout, groups, num_groups=2, **sides)
            result.check()
            result.metrics()
        calls_by_name[name] = seen
    return calls_by_name


def budget(name, layout):
    """The kinds and group sizes of the collectives that one correction may make."""
    criteria = config_of(name).criteria
    # Weights of prefixes exchange one number for each chunk of a sequence, turns the ids at its ends before.
    turns = CASES[name].settings.get("level", "").startswith("turn") or any(
        criterion_of_case.unit == "turn" for criterion_of_case in criteria
    )
    of_tokens = 2 if turns else int(CASES[name].settings.get("level") in ("prefix", "min_prefix"))
    calls = [("SUM", layout.cp)] * (1 + of_tokens)
    if any("seq_max" in criterion.name for criterion in criteria):
        calls.append(("MAX", layout.cp))
    world = layout.cp * layout.dp
    if any(criterion.unit == "prompt" for criterion in criteria):
        calls.append(("SUM", world))
    return [call for call in [*calls, ("SUM", world), ("MAX", world)] if call[1] > 1]


@pytest.mark.parametrize("layout", [Layout(), Layout(cp=2, dp=2)], ids=str)
def test_the_collectives_are_those_of_the_budget(ranks, layout):
    names = list(CASES)
    short = ranks.run(count_collectives, layout, names, WIDTH)
    for name in names:
        calls = [rank[name] for rank in short]
        assert all(call == calls[0] for call in calls)
        assert [call[:2] for call in calls[0]] == budget(name, layout)
    # Nothing grows with tokens.
    long = ranks.run(count_collectives, layout, [*SOME, "token"], 8 * WIDTH)
    for name in (*SOME, "token"):
        assert [rank[name] for rank in long] == [rank[name] for rank in short]


def check_bad_token(policy, value, with_ids):
    """Data that one rank alone sees as bad; the error of each rank."""
    groups = ParallelGroups.from_megatron()
    layout = my_layout([WIDTH] * 4, "padded")
    train = torch.full(layout.shape, -1.0)
    rollout = torch.full(layout.shape, -1.1)
    if dist.get_rank() == dist.get_world_size() - 1:
        {"training": train, "rollout": rollout}[policy][2, 5] = value
    ids = torch.tensor([9, 7, 6, 5]) + 4 * group_rank(groups.dp)
    mask = torch.ones(layout.shape, dtype=torch.bool)
    sides = {"sequence_ids": ids} if with_ids else {}
    result = correct_rollouts(train, rollout, mask, config_of("token"), layout, groups, **sides)
    result.metrics()
    return outcome(result.check)


@pytest.mark.parametrize(("policy", "value", "kind"), [("training", math.nan, "NaN"), ("rollout", 0.5, "positive")])
def test_a_bad_token_on_one_rank_is_the_same_error_on_all(ranks, policy, value, kind):
    """Rank 3 is CP rank 1 of replica 1: its sixth local token is position 9 of the sequence with id 10."""
    messages = ranks.run(check_bad_token, Layout(cp=2, dp=2), policy, value, True)
    assert set(messages) == {messages[0]}
    assert f"{policy} log-prob of sample 10, position 9 is {kind}" in messages[0]


def test_without_ids_the_error_names_the_replica(ranks):
    messages = ranks.run(check_bad_token, Layout(cp=2, dp=2), "rollout", math.nan, False)
    assert set(messages) == {messages[0]}
    for fragment in ("sample 2 of data-parallel rank 1", "sequence_ids", "position 9"):
        assert fragment in messages[0]


LOSS = PolicyLossConfig()


def plan_on_all_stages(name, batch):
    groups = ParallelGroups.from_megatron()
    correction = RolloutCorrection(config_of(name), groups, loss=LOSS)
    inputs = PlanInputs(batch.train, batch.rollout, batch.mask, **batch.sides) if groups.is_last_stage else None
    with recorded() as seen:
        result = correction.plan(inputs, **sizes(batch))
    result.check()
    return result.metrics(), result.skip.tolist(), result.denominators.tolist(), result.mask is None, seen


@pytest.mark.parametrize("name", ["groups"])
def test_every_pipeline_stage_knows_the_plan(ranks, name):
    batch, expected = clear_batch(name)
    first, last = ranks.run(plan_on_all_stages, Layout(pp=2), name, batch)
    assert first[:3] == last[:3]
    assert first[1:3] == (expected.skip, expected.denominators)
    assert_metrics(first[0], expected, 1e-9)
    assert (first[3], last[3]) == (True, False)
    assert first[4] == last[4]
    assert [call[:2] for call in first[4]] == [("BROADCAST", 2)]


def messages(thresholds, kind):
    """What each rank says, in the order of its calls."""
    groups = ParallelGroups.from_megatron()
    threshold = thresholds[dist.get_rank()]
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=threshold)
    layout = SequenceLayout.padded(2, 8, **cp_place())
    tokens = torch.full(layout.shape, -1.0), torch.full(layout.shape, -1.1), torch.ones(layout.shape, dtype=torch.bool)
    if kind == "correct_rollouts":
        return [outcome(correct_rollouts(*tokens, config, layout, groups).check)]
    correction = RolloutCorrection(config, groups, loss=PolicyLossConfig())
    plan = correction.plan(PlanInputs(*tokens, layout) if groups.is_last_stage else None)
    checked = outcome(plan.check)
    scale = outcome(plan.loss_scale, num_microbatches=1)
    return [checked, scale if isinstance(scale, str) else None]


@pytest.mark.parametrize(("layout", "kind"), [(Layout(dp=2), "plan"), (Layout(cp=2), "correct_rollouts")], ids=str)
def test_configurations_that_differ_between_ranks_are_the_same_error_on_all(ranks, layout, kind):
    first, second = ranks.run(messages, layout, [2.0, 3.0], kind)
    assert first == second
    assert first[0].startswith("config: ")
    if kind == "plan":
        assert "check()" in first[1]
    assert ranks.run(messages, layout, [3.0, 3.0], kind) == [[None] * len(first)] * 2
