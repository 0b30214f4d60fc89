"""The experts that an engine chose, from recorded rollouts to every rank, cut as the tokens are that they read."""

import logging
from dataclasses import replace
from unittest import mock

import pytest
import torch

from megatron_rc.parallel import ParallelGroups
from megatron_rc.records.rollout import NO_EXPERT, save_rollouts
from tests.support.ranks import Layout
from tests.support.recorded_training import LENGTH, SEQUENCES, flags, recorded_batch

LAYERS, TOP_K = 4, 3
PACKED = ["--rl-use-sequence-packing", "--rl-sequence-packing-bin-size=32"]


def collected(words):
    """The local experts with the sequence and the position of each token, whether it is real, and what was said."""
    from megatron_rc.launch.flags.configure import configure
    from megatron_rc.launch.rollouts.collector import RolloutCollector
    from megatron_rc.launch.training.batches.micro_batches import cut_batch

    config, task = configure(words, torch.distributed.get_world_size())
    groups, said = ParallelGroups.from_megatron(), []
    with mock.patch.object(logging.getLogger("megatron_rc"), "warning", said.append):
        collector = RolloutCollector(config, task, groups)
        batches = [collector.collect(step) for step in (0, 2)]
    cut = cut_batch(batches[0], config, groups)
    local, pieces = cut.local, [cut.local.piece(one) for each in cut.cuts for one in each]
    assert [piece.routed_experts is None for piece in pieces] == [local.routed_experts is None] * len(pieces)
    if local.routed_experts is not None:
        assert torch.equal(torch.cat([piece.routed_experts for piece in pieces]), local.routed_experts)
    sequence = local.layout.expand(local.sequence_ids)
    return local.routed_experts, sequence, local.positions, local.layout.expand(cut.rows) >= 0, said


def record(folder, batch):
    folder.mkdir()
    for step in (0, 2):
        save_rollouts(batch, folder / f"step-{step:07d}-replica-0000.safetensors")


@pytest.mark.parametrize(
    ("layout", "more"),
    [(Layout(), PACKED), (Layout(pp=2, cp=2), []), (Layout(tp=2, dp=2), []), (Layout(cp=2, dp=2), PACKED)],
    ids=["packed", "pp2-cp2", "tp2-dp2", "cp2-dp2-packed"],
)
def test_every_rank_has_the_experts_of_its_tokens(ranks, tmp_path, layout, more):
    sample, position = torch.arange(SEQUENCES).view(-1, 1, 1, 1), torch.arange(LENGTH).view(1, -1, 1, 1)
    own = torch.arange(LAYERS * TOP_K).view(LAYERS, TOP_K)
    experts = (sample * LENGTH + position) * LAYERS * TOP_K + own
    record(tmp_path / "rollouts", replace(recorded_batch(0), routed_experts=experts.short()))
    words = flags(tmp_path, f"--load-rollouts={tmp_path}/rollouts", "--train-iters=4", *layout.flags(), *more)
    for found, sequence, positions, is_real, said in ranks.run(collected, layout, words):
        wanted = ((sequence * LENGTH + positions) * LAYERS * TOP_K).unsqueeze(-1).unsqueeze(-1) + own
        assert found.dtype == torch.int32
        assert torch.equal(found[is_real].long(), wanted[is_real])
        assert (found[~is_real] == NO_EXPERT).all()
        (line,) = said
        assert "experts" in line
    # Records without experts have none on the ranks.
    record(tmp_path / "plain", recorded_batch(0))
    for found, *_, said in ranks.run(collected, layout, [*words, f"--load-rollouts={tmp_path}/plain"]):
        assert (found, said) == (None, [])
