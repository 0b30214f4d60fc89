"""Megatron-LM: its vocabulary-parallel cross entropy and its GRPO loss, beside our log-probs and our weighted loss."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_rc.adaptors.check.comparison import Batch, Comparison
from megatron_rc.adaptors.check.shards import RANKS, on_ranks
from megatron_rc.batch.chain import correct_rollouts
from megatron_rc.loss.policy import policy_loss
from megatron_rc.parallel.vocab import vocab_parallel_log_probs
from megatron_rc.settings.config import RolloutCorrectionConfig

NEEDS = "megatron.core.tensor_parallel"
GRPO = "megatron.rl.rl_utils"
TOKENS = 24
VOCABULARY = 32
CLIP_LOW = 0.2
CLIP_HIGH = 0.3
BOUND = 1.5
SIZES = (1, RANKS)  # tensor-parallel ranks
Found = tuple[list[float], list[list[float]]]  # log-probs, and their gradient at this rank's logits


def comparisons(seed: int) -> Iterator[Comparison]:
    """All comparisons on the batch of a seed; the loss only if Megatron-LM's ``megatron.rl`` is there."""
    shards = on_ranks(log_probs_of_shards, seed, modules=[NEEDS])
    for ranks in SIZES:
        layout = f"{ranks} tensor-parallel rank" + "s" * (ranks > 1)
        for number, name in enumerate(("log-probs", "gradient of the log-probs")):
            ours, theirs = (torch.tensor([of_rank[ranks][whose][number] for of_rank in shards]) for whose in (0, 1))
            yield Comparison.of(f"{name}, {layout}", ours, theirs)
    if has_grpo():
        yield from _losses(Batch.random(seed))


def left_out() -> list[str]:
    """Reasons why some of Megatron-LM's functions are not compared."""
    return [] if has_grpo() else [f"the GRPO loss: {GRPO} is not installed; it comes with Megatron-LM's repository"]


def has_grpo() -> bool:
    """Whether Megatron-LM's own reinforcement learning can be imported."""
    return importlib.util.find_spec("megatron.rl") is not None


def log_probs_of_shards(seed: int) -> dict[int, list[Found]]:
    """[ours, Megatron's] of this rank, for each number of ranks that share the vocabulary."""
    return {size: _log_probs_of_shard(seed, size) for size in SIZES}


def _log_probs_of_shard(seed: int, size: int) -> list[Found]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    rank = parallel_state.get_tensor_model_parallel_rank()
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(TOKENS, 1, VOCABULARY, generator=generator)
    labels = torch.randint(0, VOCABULARY, (TOKENS, 1), generator=generator)
    factors = torch.randn(TOKENS, 1, generator=generator)
    group = parallel_state.get_tensor_model_parallel_group()
    results = []
    for log_probs in (
        lambda shard: vocab_parallel_log_probs(shard, labels, group),
        lambda shard: -vocab_parallel_cross_entropy(shard * 1, labels),  # Megatron's writes into float32 logits
    ):
        leaf = logits.chunk(size, -1)[rank].clone().requires_grad_()
        values = log_probs(leaf)
        (gradient,) = torch.autograd.grad((values * factors).sum(), leaf)
        results.append((values.flatten().tolist(), gradient.flatten(0, 1).tolist()))
    parallel_state.destroy_model_parallel()
    return results


def _losses(batch: Batch) -> Iterator[Comparison]:
    """The loss of each token with truncated weights, and its gradient."""
    from megatron.rl.rl_utils import calculate_grpo_loss

    config = RolloutCorrectionConfig.decoupled_token_is(threshold=BOUND)
    result = correct_rollouts(batch.old, batch.rollout, batch.mask, config)
    assert isinstance(result.weights, Tensor)
    leaves = [batch.new.clone().requires_grad_() for _ in range(2)]
    settings: dict[str, Any] = {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, "weights": result.weights}
    ours = policy_loss(leaves[0], batch.old, batch.advantages, batch.mask, **settings).per_token
    theirs, *_ = calculate_grpo_loss(
        current_logprobs=leaves[1],
        old_logprobs=batch.old,
        ref_logprobs=batch.old,
        advantages=batch.advantages[:, 0],
        clamp_eps_lower=CLIP_LOW,
        clamp_eps_upper=CLIP_HIGH,
        kl_beta=0.0,
        entropy_weight=0.0,
        inference_logprobs=batch.rollout,
        is_truncation_coef=BOUND,
    )
    theirs = torch.where(batch.mask, theirs, 0)
    yield Comparison.of("GRPO loss of each token, truncated weights", ours, theirs)
    (our_gradient,) = torch.autograd.grad(ours.sum(), leaves[0])
    (their_gradient,) = torch.autograd.grad(theirs.sum(), leaves[1])
    yield Comparison.of("gradient of the GRPO loss, truncated weights", our_gradient, their_gradient)
