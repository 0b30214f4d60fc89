"""The experts that an engine chose: their checks, and their way from the engine to the routers' ranks."""

import logging
from dataclasses import replace
from unittest import mock

import pytest
import torch

from megatron_rc.launch.rollouts import routed_experts
from megatron_rc.launch.rollouts.routed_experts import NOT_NEEDED, check_routed_experts
from megatron_rc.parallel import ParallelGroups
from megatron_rc.records.rollout import save_rollouts
from tests.support.ranks import Layout, RankFailure
from tests.support.recorded_training import LENGTH, SEQUENCES, flags, recorded_batch, run_config
from tests.support.training_runs import run_training

LAYERS = 4
TOP_K = 3
EXPERTS = 2000
PACKED = ["--rl-use-sequence-packing", "--rl-sequence-packing-bin-size=32"]
# The second and the fourth layer have experts.
MODEL = [f"--num-experts={EXPERTS}", "--moe-layer-freq=[0,1,0,1]", "--moe-ffn-hidden-size=2", "--moe-router-topk=3"]
REPLAY = ["--moe-enable-routing-replay"]
LAYERS_WITH_EXPERTS = [1, 3]


def collected(words):
    """The local experts with the sequence and the position of each token, whether it is real, and warnings."""
    from megatron_rc.launch.flags.configure import configure
    from megatron_rc.launch.rollouts.collector import RolloutCollector
    from megatron_rc.launch.training.batches.micro_batches import cut_batch

    config, task = configure(words, torch.distributed.get_world_size())
    groups = ParallelGroups.from_megatron()
    warnings = []
    with mock.patch.object(logging.getLogger("megatron_rc"), "warning", warnings.append):
        collector = RolloutCollector(config, task, groups)
        batches = [collector.collect(step).batch for step in (0, 2)]
    cut = cut_batch(batches[0], config, groups)
    local = cut.local
    pieces = [cut.local.piece(micro_batch) for mini_batch in cut.cuts for micro_batch in mini_batch]
    assert [piece.routed_experts is None for piece in pieces] == [local.routed_experts is None] * len(pieces)
    if local.routed_experts is not None:
        assert torch.equal(torch.cat([piece.routed_experts for piece in pieces]), local.routed_experts)
    sequence = local.layout.expand(local.sequence_ids)
    return local.routed_experts, sequence, local.positions, local.layout.expand(cut.rows) >= 0, warnings


def record(folder, batch):
    folder.mkdir()
    for step in (0, 2):
        save_rollouts(batch, folder / f"step-{step:07d}-replica-0000.safetensors")


def table():
    """Experts that name their sample, position and layer; [sequences, length, layers, top_k]."""
    sample = torch.arange(SEQUENCES).view(-1, 1, 1, 1)
    position = torch.arange(LENGTH).view(1, -1, 1, 1)
    layer_and_slot = torch.arange(LAYERS * TOP_K).view(LAYERS, TOP_K)
    return ((sample * LENGTH + position) * LAYERS * TOP_K + layer_and_slot) % EXPERTS


@pytest.mark.parametrize(
    ("layout", "more", "of_all_layers"),
    [
        (Layout(), PACKED, False),
        (Layout(pp=2, cp=2), [], False),
        (Layout(pp=2, vpp=True), [], True),
        (Layout(cp=2, dp=2), PACKED, True),
    ],
    ids=["packed", "pp2-cp2", "vpp", "cp2-dp2-packed"],
)
def test_every_rank_has_the_experts_of_its_tokens_and_layers(ranks, tmp_path, layout, more, of_all_layers):
    batch = recorded_batch(0)
    whole = table()
    recorded = whole if of_all_layers else whole[:, :, LAYERS_WITH_EXPERTS]
    record(tmp_path / "rollouts", replace(batch, routed_experts=recorded.short()))
    arguments = flags(
        tmp_path, f"--load-rollouts={tmp_path}/rollouts", "--train-iters=4", *layout.flags(), *MODEL, *more
    )
    stages = {1: [LAYERS_WITH_EXPERTS], 2: [[1], [3]]}[layout.pp]
    if layout.vpp:
        stages = [[], LAYERS_WITH_EXPERTS]  # the second stage has the second and the fourth layer
    last = (batch.response_mask * torch.arange(LENGTH)).amax(dim=1)
    replayed = ranks.run(collected, layout, [*arguments, *REPLAY])
    for rank, (experts, sequence, positions, is_real, warnings) in enumerate(replayed):
        layers = stages[rank * layout.pp // layout.world]
        assert experts.dtype == torch.int16
        assert experts.shape[-2:] == (len(layers), TOP_K)
        is_needed = is_real & (positions < last[sequence])
        expected = whole[sequence, positions][..., layers, :]
        assert torch.equal(experts[is_needed].long(), expected[is_needed])
        assert (experts[~is_needed] == NOT_NEEDED).all()
        assert warnings == []
    # Without replay they stay on the first rank, which says so once.
    without_replay = ranks.run(collected, layout, arguments)
    assert {experts for experts, *_ in without_replay} == {None}
    warnings_of_first_ranks = [warnings for *_, warnings in without_replay if warnings]
    assert len(warnings_of_first_ranks) == layout.dp
    assert all("--moe-enable-routing-replay" in warning for (warning,) in warnings_of_first_ranks)


def change(row, token, layer, slot, value):
    def changed(experts):
        experts[row, token, layer, slot] = value
        return experts

    return changed


@pytest.fixture
def config(tmp_path):
    record(tmp_path / "rollouts", recorded_batch(0))
    load = [f"--load-rollouts={tmp_path}/rollouts", "--train-iters=4"]
    return run_config(flags(tmp_path, *load, *MODEL, *REPLAY))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda experts: None, "--moe-enable-routing-replay"),
        (lambda experts: experts[:, :, :3], "3 layers with 3 choices"),
        (change(2, 5, 1, 0, EXPERTS), "sample 2, token 5, layer 1 has expert 2000, expected 0 to 1999"),
        (change(3, 4, 3, 1, -2), "sample 3, token 4, layer 3 has expert -2, expected 0 to 1999"),
        (change(3, 4, 3, 1, -7), "sample 3, token 4, layer 3 has expert -7"),
        (change(1, 2, 3, 2, 107), "sample 1, token 2, layer 3 has expert 107 twice"),
    ],
    ids=["none", "layers", "too-large", "not-needed", "negative", "twice"],
)
def test_experts_that_do_not_fit_are_named(config, made, words):
    """Also if several parts of the table are looked at one after the other."""
    batch = recorded_batch(0)
    experts = table()
    experts[1, 2, 3, 0] = 107
    with (
        mock.patch.object(routed_experts, "_CHOICES_AT_ONCE", 7),
        pytest.raises(ValueError, match=words),
    ):
        check_routed_experts(replace(batch, routed_experts=made(experts)), config)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("of_all_layers", [True, False])
def test_nothing_is_judged_that_no_sampled_token_depends_on(config, dtype, of_all_layers):
    """Zeros or any number behind the last sampled token and at it, in dense layers, and unknown experts."""
    batch = recorded_batch(0)
    last = (batch.response_mask * torch.arange(LENGTH)).amax(dim=1)
    is_needed = torch.arange(LENGTH) < last.unsqueeze(1)
    for filler in (0, 99, -2, 5000):
        experts = table()
        experts[~is_needed] = filler
        experts[:, :, [0, 2]] = filler
        experts[:, 1] = -1
        experts[:, 2, :, 1:] = -1  # known in part
        whole = experts if of_all_layers else experts[:, :, LAYERS_WITH_EXPERTS]
        check_routed_experts(replace(batch, routed_experts=whole.to(dtype)), config)


def test_records_without_experts_end_the_rank_that_reads_them(ranks, tmp_path):
    record(tmp_path / "rollouts", recorded_batch(0))
    arguments = [f"--load-rollouts={tmp_path}/rollouts", "--train-iters=4", *Layout(pp=2).flags(), *MODEL, *REPLAY]
    arguments.append("--num-experts=4")  # a model is built here, with all of them
    with pytest.raises(RankFailure, match=r"rank 0 of 2:[^$]*step 0 failed: .*--moe-enable-routing-replay"):
        ranks.run(run_training, Layout(pp=2), flags(tmp_path, *arguments))
