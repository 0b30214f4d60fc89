"""The functions between the collectives, as a controller with another transport calls them.

They may be called again on what they had: none of them writes into its arguments.
"""

import pytest
import torch

from megatron_rc import (
    AgreedCounts,
    PlanInputs,
    batch_sums,
    collect_shards,
    finish,
    group_sums,
    reduce_batch,
    reduce_groups,
    reduce_sequences,
    sequence_sums,
)
from megatron_rc.parallel import ParallelGroups, SequenceLayout
from tests.support.correction_cases import clear_batch, sizes
from tests.support.correction_comparison import assert_same, config_of


@pytest.mark.parametrize("name", ["groups", "token clamp", "turns"])
def test_the_functions_may_be_called_again_on_what_they_had(name):
    batch, expected = clear_batch(name)
    config, groups, prompts = config_of(name), ParallelGroups(), None
    inputs = PlanInputs(batch.train, batch.rollout, batch.mask, **batch.sides)
    local = sequence_sums(collect_shards(inputs, AgreedCounts(**sizes(batch)), groups), config)
    sequences = reduce_sequences(local.pair, groups)
    if name == "groups":
        prompts = reduce_groups(group_sums(local, sequences), groups)
    found = batch_sums(local, sequences, prompts)
    pair = reduce_batch(found.pair, groups)
    first = finish(found, pair)
    metrics = first.metrics()
    anew = finish(batch_sums(local, sequences, prompts), pair)
    for result in (first, finish(found, pair), anew):
        assert_same(result, expected)
        assert result.metrics() == metrics


@pytest.mark.parametrize("name", ["prefix", "turns"])
def test_slices_need_the_group_of_the_others(name):
    layout = SequenceLayout.padded(1, 4, cp_rank=1, cp_size=2)
    values = torch.full((1, 4), -1.0)
    shards = collect_shards(PlanInputs(values, values, values < 0, layout), AgreedCounts())
    with pytest.raises(ValueError, match="cp="):
        sequence_sums(shards, config_of(name))
