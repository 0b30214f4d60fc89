"""Records of responses as tensors."""

import pytest
import torch

from megatron_rc.launch.engines import Sample
from megatron_rc.launch.rollouts.batches import batch_of
from megatron_rc.launch.rollouts.turns import Conversation
from megatron_rc.records.rollout import SamplingParams


@pytest.fixture
def bfloat16_by_default():
    """Torch's default dtype, of all threads, as while transformers makes the description of a bfloat16 model."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("bfloat16_by_default")
def test_a_batch_that_is_made_beside_an_export_keeps_its_digits():
    turns = (Sample([5, 1], [-0.1, -0.3], "stop", versions=[3, 3]), Sample([6], [-0.7], "length", versions=[3]))
    conversation = Conversation([2], turns, observations=([4],), rewards=(0.9,))
    options = {"has_experts": False, "has_support": False, "has_turns": True}
    batch = batch_of([conversation], 6, pad=0, sampling=SamplingParams(), **options)
    batch.validate()
    log_probs = torch.tensor([[0, -0.1, -0.3, 0, -0.7, 0]], dtype=torch.float32)
    turn_rewards = torch.tensor([[0, 0, 0.9, 0, 0, 0]], dtype=torch.float32)
    assert torch.equal(batch.rollout_log_probs, log_probs)
    assert torch.equal(batch.turn_rewards, turn_rewards)
    assert batch.rewards.dtype == torch.float32
