"""How a rollout batch becomes micro-batches: packed sequences lose no token, and their number is agreed on."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_rc.launch.training.batches.micro_batches import cut_batch
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.groups import group_rank
from tests.support.ranks import Layout
from tests.support.recorded_training import LENGTH, SEQUENCES, flags, recorded_batch, run_config

PACKED = "--rl-use-sequence-packing"


def parse(folder, *words, world=1):
    return run_config(flags(folder, *words), world)


@pytest.mark.parametrize("size", [LENGTH, 24, 64, 16 * LENGTH])
def test_packed_tokens_are_the_padded_ones(tmp_path, size):
    batch = recorded_batch(3)
    batch = replace(batch, policy_versions=torch.randint(9, batch.tokens.shape, dtype=torch.int32))
    packed = cut_batch(batch, parse(tmp_path, PACKED, f"--rl-sequence-packing-bin-size={size}"), ParallelGroups())
    padded = cut_batch(batch, parse(tmp_path, "--micro-batch-size=1"), ParallelGroups())
    local = packed.local
    row = packed.local.layout.expand(packed.rows)
    real = row >= 0
    for name in ("tokens", "labels", "response_mask", "rollout_log_probs", "policy_versions", "positions"):
        got = getattr(local, name)[real]
        want = getattr(padded.local, name)[row[real], local.positions[real]]
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert int(local.response_mask.sum()) == int(padded.local.response_mask.sum())
    assert not local.response_mask[~real].any()
    assert packed.rows_of_model == 1
    assert packed.length_of_model <= size
    assert {cut.layout.shape for cuts in packed.cuts for cut in cuts} == {(packed.length_of_model,)}
    for name in ("advantages", "sequence_ids"):
        assert torch.equal(
            getattr(local, name)[packed.rows >= 0], getattr(padded.local, name)[packed.rows[packed.rows >= 0]]
        )
    if size == 64:
        # Padding behind the last label is left out, and a batch without a trained token is padding alone.
        assert packed.total_tokens[0] < 0.8 * SEQUENCES * LENGTH
        batch.response_mask.zero_()
        empty = cut_batch(batch, parse(tmp_path, PACKED), ParallelGroups())
        assert empty.rows.tolist() == [-1]
        assert [len(cuts) for cuts in empty.cuts] == [1]


def cut_on_rank(words, emptied):
    """On a rank: micro-batches of each mini-batch, their width, the tokens of all, and the rows that are held."""
    config = run_config(words, torch.distributed.get_world_size())
    groups = ParallelGroups.from_megatron()
    replica = group_rank(groups.dp)
    batch = recorded_batch(3, replica, config.data_parallel_size)
    if replica == emptied:
        batch.response_mask[1:] = False
    cut = cut_batch(batch, config, groups)
    return [len(cuts) for cuts in cut.cuts], cut.length_of_model, cut.total_tokens, cut.rows.tolist(), replica


@pytest.mark.parametrize(
    ("layout", "multiple"),
    [(Layout(dp=2), 1), (Layout(dp=2, pp=2, vpp=True), 2), (Layout(dp=2, cp=2), 1), (Layout(dp=2, tp=2, sp=True), 1)],
    ids=str,
)
def test_ranks_agree_on_the_number_of_micro_batches(ranks, tmp_path, layout, multiple):
    """One replica holds a single sequence, the other eight: dummies fill up."""
    arguments = flags(tmp_path, *layout.flags(), PACKED, "--rl-sequence-packing-bin-size=24", "--global-batch-size=16")
    results = ranks.run(cut_on_rank, layout, arguments, 1)
    numbers = results[0][0]
    assert numbers[0] >= 3
    assert numbers[0] % multiple == 0
    widths = {replica: width for _, width, _, _, replica in results}
    for number, width, total, rows, replica in results:
        assert number == numbers
        assert width % math.lcm(2 * layout.cp if layout.cp > 1 else 1, layout.tp * layout.cp if layout.sp else 1) == 0
        assert total == (numbers[0] * sum(widths.values()),)
        assert sum(row >= 0 for row in rows) == (8 if replica == 0 else 1)
    assert widths[0] > widths[1]
