"""What PyTorch allocates in a process while a rank builds its trainer and makes an optimizer step."""

from __future__ import annotations

import gc

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.trainer import Trainer
from megatron_rc.parallel import ParallelGroups
from megatron_rc.records.rollout import RolloutBatch, SamplingParams
from tests.support.recorded_training import run_config


def random_rollouts(config: RunConfig) -> RolloutBatch:
    """This replica's share of a rollout batch, every sequence of full length."""
    rows, length = config.rollouts.sequences // config.data_parallel_size, config.training.seq_length
    position = torch.arange(length).expand(rows, length)
    mask = position >= length - config.rollouts.max_response_length
    return RolloutBatch(
        tokens=torch.randint(0, config.model.vocab_size, (rows, length)),
        response_mask=mask,
        rollout_log_probs=torch.where(mask, -torch.rand(rows, length) - 1, torch.nan),
        policy_versions=torch.zeros(rows, length, dtype=torch.int32),
        sample_ids=torch.arange(rows),
        group_ids=torch.arange(rows) // config.rollouts.grpo_group_size,
        rewards=torch.rand(rows),
        finish_reasons=torch.zeros(rows, dtype=torch.int64),
        sampling=SamplingParams(),
    )


def peak_bytes(words: list[str]) -> int:
    """The most bytes that were allocated at once, from the model's first parameter to the end of a step."""
    # What is older would be missed when it goes.
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        config = run_config(words, torch.distributed.get_world_size(), engine=False)
        trainer = Trainer(config, ParallelGroups.from_megatron())
        prepared = trainer.prepare(random_rollouts(config))
        trainer.update(prepared, 0)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
