"""Rollout batches, mini-batches and micro-batches, and what packs into one."""

from __future__ import annotations

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.numerics import NUM_SEQUENCE_IDS

_MOST_MINI_BATCHES = 1024


def check_batches(config: RunConfig) -> None:
    """Whether rollout batches split into mini-batches, these into micro-batches, and all of them over the ranks."""
    rollouts, size, dp = config.rollouts, config.training.global_batch_size, config.data_parallel_size
    if rollouts.grpo_prompts_per_step % dp:
        raise ConfigurationError(
            f"--grpo-prompts-per-step {rollouts.grpo_prompts_per_step} must be a multiple of the {dp} data-parallel "
            "ranks"
        )
    if rollouts.sequences > NUM_SEQUENCE_IDS:
        raise ConfigurationError(
            f"--grpo-prompts-per-step {rollouts.grpo_prompts_per_step} · --grpo-group-size {rollouts.grpo_group_size} "
            f"= {rollouts.sequences} sequences: a rollout batch has at most {NUM_SEQUENCE_IDS}"
        )
    if rollouts.sequences % size:
        raise ConfigurationError(
            f"--grpo-prompts-per-step {rollouts.grpo_prompts_per_step} · --grpo-group-size {rollouts.grpo_group_size} "
            f"= {rollouts.sequences} sequences do not split into batches of --global-batch-size {size}"
        )
    if rollouts.sequences // size > _MOST_MINI_BATCHES:
        raise ConfigurationError(
            f"--grpo-prompts-per-step {rollouts.grpo_prompts_per_step} · --grpo-group-size {rollouts.grpo_group_size} "
            f"make {rollouts.sequences // size} batches of --global-batch-size {size}: at most {_MOST_MINI_BATCHES}, "
            "since the later ones learn from a policy that is long gone"
        )
    tokens = size * config.training.seq_length
    if config.compute.calculate_per_token_loss and tokens >= 2**31:
        raise ConfigurationError(
            f"--calculate-per-token-loss counts the {tokens} tokens of --global-batch-size {size} sequences of "
            f"--seq-length {config.training.seq_length} in 32 bits: drop it, the gradients are the same"
        )
    if config.training.rl_use_sequence_packing:
        _check_packing(config)
    _check_micro_batches(config)
    interval = config.checkpoints.save_interval
    if interval and interval % config.updates_per_rollout:
        raise ConfigurationError(
            f"--save-interval {interval} must be a multiple of the {config.updates_per_rollout} optimizer steps of a "
            "rollout batch, so that a resumed run takes the same steps"
        )


def _check_packing(config: RunConfig) -> None:
    size, unit = config.training.rl_sequence_packing_bin_size, config.parallel.packing_unit
    if size < config.training.seq_length:
        raise ConfigurationError(
            f"--rl-sequence-packing-bin-size {size} must hold a whole sequence of --seq-length "
            f"{config.training.seq_length}"
        )
    if size % unit:
        raise ConfigurationError(
            f"--rl-sequence-packing-bin-size {size} must be a multiple of {unit}, for context and sequence parallelism"
        )


def _check_micro_batches(config: RunConfig) -> None:
    training, dp = config.training, config.data_parallel_size
    at_once, factor = dp, ""
    if not training.rl_use_sequence_packing:
        at_once, factor = dp * training.micro_batch_size, f"--micro-batch-size {training.micro_batch_size} · "
    if training.global_batch_size % at_once:
        raise ConfigurationError(
            f"--global-batch-size {training.global_batch_size} must be a multiple of {factor}{dp} data-parallel ranks"
        )
    number, unit = training.global_batch_size // at_once, config.parallel.micro_batch_unit
    if number % unit and not training.rl_use_sequence_packing:
        raise ConfigurationError(
            f"virtual stages need a multiple of {unit} micro-batches (--pipeline-model-parallel-size), got {number}: "
            "change --global-batch-size or --micro-batch-size"
        )
