"""How many operations a correction asks for: on a GPU their number is the time of a batch."""

import pytest
import torch

from megatron_rc import PlanInputs, RolloutCorrectionConfig, correct_rollouts
from megatron_rc.correction.inputs import AgreedCounts, collect_shards
from megatron_rc.correction.tokens import token_blocks
from megatron_rc.measures.data import first_bad_keys, key_ids
from tests.support.far_device import GPU, far_device
from tests.support.operations import count_operations

# For each configuration the most operations of correct_rollouts(), check() and metrics().
MOST = {
    "token weights": ({"rollout_is": "token"}, 120),
    "token weights, geometric criterion": (
        {"rollout_is": "token", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.99_1.01"},
        157,
    ),
    "token weights, token criterion": (
        {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2"},
        140,
    ),
    "sequence weights": ({"rollout_is": "sequence"}, 140),
    "weights of turns": ({"rollout_is": "turn"}, 175),
}


def make_batch(shape=(64, 2048)):
    generator = torch.Generator().manual_seed(0)
    rollout = -3 * torch.rand(shape, generator=generator) - 0.01
    train = (rollout + 0.05 * torch.randn(shape, generator=generator)).clamp(max=0)
    return train, rollout, rollout < -0.7


def correct(batch, config):
    result = correct_rollouts(*batch, config)
    result.check()
    result.metrics()


@pytest.mark.parametrize("name", MOST)
@pytest.mark.parametrize("far", [False, True], ids=["CPU", "another device"])
def test_few_operations_correct_a_batch(name, far):
    fields, most = MOST[name]
    config = RolloutCorrectionConfig(**fields)
    batch = make_batch()
    if far:
        with far_device():
            batch = [tensor.to(GPU) for tensor in batch]
            correct(batch, config)
            counts = count_operations(lambda: correct(batch, config))
    else:
        correct(batch, config)
        counts = count_operations(lambda: correct(batch, config))
    assert sum(counts.values()) <= most, counts


def test_six_operations_locate_a_bad_token():
    """Besides the count of such tokens; on the first data-parallel rank, or with sequence ids."""
    shards = collect_shards(PlanInputs(*make_batch()), AgreedCounts())
    ids = key_ids(shards)
    ((_, block, tokens),) = token_blocks(shards, RolloutCorrectionConfig(rollout_is="token"))
    bad = tokens.mask & (tokens.log_probs[0] < -1)

    def locate():
        return first_bad_keys(tokens, bad, shards.parts[0], block, shards, ids)

    locate()
    counts = count_operations(locate)
    assert sum(counts.values()) <= 6, counts


def test_a_million_tokens_are_one_block_of_a_gpu():
    """A GPU is faster with them than the host is with asking for the next operation."""
    config = RolloutCorrectionConfig(rollout_is="token")
    with far_device():
        counts = []
        for shape in ((64, 2048), (512, 2048)):
            batch = [tensor.to(GPU) for tensor in make_batch(shape)]
            correct(batch, config)
            counts.append(count_operations(lambda batch=batch: correct(batch, config)))
    assert counts[0] == counts[1]
