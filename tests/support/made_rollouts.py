"""Rollout batches of made responses, and of responses whose log-probs are a trainer's with noise."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from megatron_rc.records.rollout import RolloutBatch, SamplingParams


def made_batch(tokens: Tensor, mask: Tensor, log_probs: Tensor, rewards: Tensor, **more: Any) -> RolloutBatch:
    """Records of these responses, NaN where nothing was sampled; sampled by the first weights, four to a prompt."""
    ids = torch.arange(len(tokens))
    plain = {
        "policy_versions": torch.zeros(tokens.shape, dtype=torch.int32),
        "sample_ids": ids,
        "group_ids": ids // 4,
        "finish_reasons": torch.zeros_like(ids),
        "sampling": SamplingParams(),
    }
    return RolloutBatch(tokens, mask, torch.where(mask, log_probs, torch.nan), rewards=rewards, **plain | more)


def short_responses(number: int, length: int, vocabulary: int = 13) -> RolloutBatch:
    """Responses of 3 to ``length`` - 1 tokens, their prompts of 1 to 4 tokens included; two tokens at least train."""
    generator = torch.Generator().manual_seed(0)
    shape = (number, length)
    prompt = torch.randint(1, 5, (number, 1), generator=generator)
    end = prompt + torch.randint(2, length - 4, (number, 1), generator=generator)
    position = torch.arange(length).expand(shape)
    mask = (position >= prompt) & (position < end)
    log_probs = (-2.7 + 0.4 * torch.randn(shape, generator=generator)).clamp(max=-0.01)
    tokens = torch.randint(0, vocabulary, shape, generator=generator)
    return made_batch(tokens, mask, log_probs, torch.rand(number, generator=generator))


def on_device(batch: RolloutBatch, device: torch.device) -> RolloutBatch:
    """The batch on the model's device, to which the rollouts' broadcast brings it."""
    return dataclasses.replace(batch, **{name: values.to(device) for name, values in batch.tensors().items()})


def near_rollouts(trainer: Any, mask: Tensor, noise: float, generator: torch.Generator, **more: Any) -> RolloutBatch:
    """Random tokens on the trainer's device; the engine's log-probs are the trainer's with noise of this size."""
    from megatron_rc.launch.training.batches.micro_batches import cut_batch

    tokens = torch.randint(0, trainer.config.model.vocab_size, mask.shape, generator=generator)
    rewards = torch.rand(len(mask), generator=generator)
    noise = noise * torch.randn(mask.shape, generator=generator)
    blank = on_device(made_batch(tokens, mask, torch.full(mask.shape, -7.0), rewards, **more), trainer.device)
    of_labels = trainer.score(cut_batch(blank, trainer.config, trainer.groups))
    # Labels are the next tokens.
    log_probs = (of_labels.roll(1, dims=1) + noise.to(of_labels)).clamp(max=-1e-3)
    return dataclasses.replace(blank, rollout_log_probs=torch.where(blank.response_mask, log_probs, torch.nan))
