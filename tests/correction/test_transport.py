"""The functions between the collectives, as another transport calls them: they may be called again, on what they had.

That is so only if none of them writes into its arguments.
"""

import copy
import dataclasses
from collections.abc import Mapping

import pytest
import torch

from megatron_rc import (
    PlanInputs,
    batch_sums,
    finish,
    group_sums,
    reduce_batch,
    reduce_groups,
    reduce_sequences,
    sequence_sums,
)
from megatron_rc.correction.inputs import AgreedCounts, collect_shards
from megatron_rc.parallel import ParallelGroups, SequenceLayout
from tests.support.correction_cases import CASES, WIDTH, clear_batch, sizes
from tests.support.correction_comparison import assert_same as compare_with_oracle
from tests.support.correction_comparison import config_of, numbers


def tensors_of(value):
    """All tensors in records, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = [getattr(value, one.name) for one in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [found for each in value for found in tensors_of(each)] if isinstance(value, (list, tuple)) else []


def assert_unchanged(one, other):
    """Every bit but those of NaN."""
    assert tensors_of(one)
    for value, known in zip(tensors_of(one), tensors_of(other), strict=True):
        torch.testing.assert_close(value, known, rtol=0, atol=0, equal_nan=True)


def watched():
    """A function that calls others, and looks that nothing which was given to any of them has changed."""
    given = []

    def call(function, *arguments):
        given.extend((value, copy.deepcopy(value)) for value in arguments if tensors_of(value))
        result = function(*arguments)
        for value, known in given:
            assert_unchanged(value, known)
        return result

    return call


def inputs_of(batch, layouts=None):
    """All rows; in lists, of three micro-batches."""
    tensors = batch.train, batch.rollout, batch.mask
    if layouts is None:
        return PlanInputs(*tensors, **batch.sides)
    pieces = [value.split(4) for value in tensors]
    return PlanInputs(*map(list, pieces), layouts, **{key: list(value.split(4)) for key, value in batch.sides.items()})


@pytest.mark.parametrize("form", ["whole", "lists"])
@pytest.mark.parametrize("name", CASES)
def test_no_function_writes_into_what_it_is_given(name, form):
    batch, expected = clear_batch(name)
    config, groups, call = config_of(name), ParallelGroups(), watched()
    inputs = inputs_of(batch, None if form == "whole" else [SequenceLayout.padded(4, WIDTH)] * 3)
    shards = call(collect_shards, inputs, AgreedCounts(**sizes(batch)), groups)
    local = call(sequence_sums, shards, config)
    sequences = call(reduce_sequences, local.pair, groups)
    prompts = None
    if config.needs_prompts:
        prompts = call(reduce_groups, call(group_sums, local, sequences), groups)
    found = call(batch_sums, local, sequences, prompts)
    pair = call(reduce_batch, found.pair, groups)
    first = call(finish, found, pair)
    kept = copy.deepcopy(first)
    again = call(finish, found, pair)
    anew = finish(call(batch_sums, local, sequences, prompts), pair)
    for result in (first, again, anew):
        assert_unchanged(result, kept)
        assert torch.equal(numbers(result), numbers(kept))
        assert result.metrics() == kept.metrics()
    if form == "whole":
        compare_with_oracle(first, expected)


@pytest.mark.parametrize("name", ["prefix", "min prefix", "turns"])
def test_slices_need_the_group_of_the_others(name):
    layout = SequenceLayout.padded(1, 4, cp_rank=1, cp_size=2)
    values = torch.full((1, 4), -1.0)
    shards = collect_shards(PlanInputs(values, values, values < 0, layout), AgreedCounts())
    with pytest.raises(ValueError, match="pass cp=, or whole sequences"):
        sequence_sums(shards, config_of(name))
