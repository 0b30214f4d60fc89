"""The experts that an engine chose: their checks, and their way from the engine to the routers' ranks."""

import logging
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_rc.launch.rollouts import routed_experts
from megatron_rc.launch.rollouts.routed_experts import NOT_NEEDED, check_routed_experts
from megatron_rc.parallel import ParallelGroups
from megatron_rc.records.formats.verl import from_verl
from megatron_rc.records.rollout import SamplingParams, save_rollouts
from tests.support.made_rollouts import made_batch
from tests.support.ranks import Layout, RankFailure
from tests.support.recorded_training import LENGTH, SEQUENCES, flags, recorded_batch, run_config
from tests.support.training_runs import run_training

LAYERS, TOP_K, EXPERTS = 4, 3, 2000
PACKED = ["--rl-use-sequence-packing", "--rl-sequence-packing-bin-size=32"]
# The second and the fourth layer have experts.
MODEL = [f"--num-experts={EXPERTS}", "--moe-layer-freq=[0,1,0,1]", "--moe-ffn-hidden-size=2", "--moe-router-topk=3"]
REPLAY = ["--moe-enable-routing-replay"]
HELD = [1, 3]


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


def table():
    """Experts that name their sample, position and layer; [sequences, length, layers, top_k]."""
    sample, position = torch.arange(SEQUENCES).view(-1, 1, 1, 1), torch.arange(LENGTH).view(1, -1, 1, 1)
    own = torch.arange(LAYERS * TOP_K).view(LAYERS, TOP_K)
    return ((sample * LENGTH + position) * LAYERS * TOP_K + own) % EXPERTS


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
    batch, whole = recorded_batch(0), table()
    recorded = whole if of_all_layers else whole[:, :, HELD]
    record(tmp_path / "rollouts", replace(batch, routed_experts=recorded.short()))
    words = flags(tmp_path, f"--load-rollouts={tmp_path}/rollouts", "--train-iters=4", *layout.flags(), *MODEL, *more)
    stages = {1: [HELD], 2: [[1], [3]]}[layout.pp]
    if layout.vpp:
        stages = [[], HELD]  # the second stage has the second and the fourth layer
    last = (batch.response_mask * torch.arange(LENGTH)).amax(dim=1)
    for rank, (found, sequence, positions, is_real, said) in enumerate(ranks.run(collected, layout, [*words, *REPLAY])):
        own = stages[rank * layout.pp // layout.world]
        assert found.dtype == torch.int16
        assert found.shape[-2:] == (len(own), TOP_K)
        is_needed = is_real & (positions < last[sequence])
        wanted = whole[sequence, positions][..., own, :]
        assert torch.equal(found[is_needed].long(), wanted[is_needed])
        assert (found[~is_needed] == NOT_NEEDED).all()
        assert said == []
    # Without replay they stay on the first rank, which says so once.
    everywhere = ranks.run(collected, layout, words)
    assert {found for found, *_ in everywhere} == {None}
    first = [said for *_, said in everywhere if said]
    assert len(first) == layout.dp
    assert all("--moe-enable-routing-replay" in line for (line,) in first)


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
        (lambda experts: experts[:, :, :3], "3 layers of 3 experts"),
        (change(2, 5, 1, 0, EXPERTS), "sample 2, token 5, layer 1 has expert 2000, expected 0 to 1999"),
        (change(3, 4, 3, 1, -2), "sample 3, token 4, layer 3 has expert -2, expected 0 to 1999"),
        (change(3, 4, 3, 1, -7), "sample 3, token 4, layer 3 has expert -7"),
        (change(1, 2, 3, 2, 107), "sample 1, token 2, layer 3 has expert 107 twice"),
    ],
    ids=["none", "layers", "too-large", "not-needed", "negative", "twice"],
)
@pytest.mark.parametrize("at_once", [1, 7, 32768])
def test_experts_that_do_not_fit_are_named(config, made, words, at_once):
    """However many of them are looked at at once."""
    batch, experts = recorded_batch(0), table()
    experts[1, 2, 3, 0] = 107
    with (
        mock.patch.object(routed_experts, "_CHOICES_AT_ONCE", at_once),
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
        whole = experts if of_all_layers else experts[:, :, HELD]
        check_routed_experts(replace(batch, routed_experts=whole.to(dtype)), config)


def test_a_large_table_is_checked_beside_a_few_megabytes_and_in_no_time():
    """A sixteenth of 64 rows of 8192 tokens, 48 layers and 8 experts, which take 0.3 s on one core."""
    layers, experts = 48, 128
    words = [
        f"--num-experts={experts}",
        "--moe-router-topk=8",
        "--moe-ffn-hidden-size=2",
        "--moe-enable-routing-replay",
    ]
    words += [f"--num-layers={layers}", "--bypass-mode"]
    config = run_config(flags(Path(), *words, *REPLAY), engine=False)
    orders = torch.rand(1024, experts, generator=torch.Generator().manual_seed(0)).argsort(dim=1)[:, :8].int()
    given = orders.repeat(4 * 8192 * layers // 1024, 1).view(4, 8192, layers, 8)
    mask = torch.ones(4, 8192, dtype=torch.bool)
    batch = made_batch(torch.zeros(4, 8192).long(), mask, torch.full(mask.shape, -1.0), torch.zeros(4))
    batch = replace(batch, routed_experts=given)
    tracemalloc.start()
    check_routed_experts(batch, config)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < given.nbytes / 10
    begun = time.process_time()
    check_routed_experts(batch, config)
    assert time.process_time() - begun < 1 / 16 * 4, "with room for a busy machine"
    given[3, 8190, 47, 7] = given[3, 8190, 47, 0]
    with pytest.raises(ValueError, match="sample 3, token 8190, layer 47"):
        check_routed_experts(batch, config)


def test_verls_own_filler_is_taken(tmp_path):
    """verl makes a table of zeros and writes into it the engine's rows, of which the last token has none."""
    prompts, length = 3, 8
    layers, top_k, experts = 4, 2, 8
    shape = (2, prompts + length)
    attention = torch.zeros(shape, dtype=torch.int64)
    attention[0, 1:9] = 1  # two tokens of prompt, six of response
    attention[1, 2:5] = 1
    of_verl = torch.zeros(*shape, layers, top_k, dtype=torch.int64)
    for row, (begin, end) in enumerate([(1, 9), (2, 5)]):
        chosen = torch.rand(end - begin - 1, layers, experts).topk(top_k, dim=-1).indices
        of_verl[row, begin : end - 1] = chosen
    tensors = {
        "prompts": torch.ones(2, prompts, dtype=torch.int64),
        "responses": torch.ones(2, length, dtype=torch.int64),
        "attention_mask": attention,
        "rollout_log_probs": torch.full((2, length), -0.7),
        "token_level_scores": torch.zeros(2, length),
        "routed_experts": of_verl,
    }
    batch = from_verl(tensors, {"uid": ["a", "b"]}, sampling=SamplingParams())
    batch.validate()
    words = [f"--num-experts={experts}", "--moe-ffn-hidden-size=2", *REPLAY, "--bypass-mode"]
    config = run_config(flags(tmp_path, *words), engine=False)
    check_routed_experts(batch, config)
    wrong = batch.routed_experts.clone()
    wrong[0, 6] = 0  # the last token that is needed
    with pytest.raises(ValueError, match="sample 0, token 6, layer 0 has expert 0 twice"):
        check_routed_experts(replace(batch, routed_experts=wrong), config)


def test_records_without_experts_end_the_rank_that_reads_them(ranks, tmp_path):
    record(tmp_path / "rollouts", recorded_batch(0))
    words = [f"--load-rollouts={tmp_path}/rollouts", "--train-iters=4", *Layout(pp=2).flags(), *MODEL, *REPLAY]
    with pytest.raises(RankFailure, match=r"rank 0 of 2:[^$]*step 0 failed: .*--moe-enable-routing-replay"):
        ranks.run(run_training, Layout(pp=2), flags(tmp_path, *words))
