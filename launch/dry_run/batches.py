"""Sizes of the layout, of rollout batches, optimizer steps, micro-batches and the vocabulary."""

from __future__ import annotations

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.passes import passes_in_words, scoring_in_words


def layout_of(config: RunConfig) -> dict[str, int]:
    """Number of ranks in each dimension: tensor, context, pipeline and data parallelism."""
    return {
        "tp": config.parallel.tensor_model_parallel_size,
        "cp": config.parallel.context_parallel_size,
        "pp": config.parallel.pipeline_model_parallel_size,
        "dp": config.data_parallel_size,
    }


def batch_numbers(config: RunConfig) -> dict[str, int]:
    """Sizes of a rollout batch and its parts; with packing a micro-batch is one row, as long as a bin."""
    training = config.training
    rollouts = config.rollouts
    dp = config.data_parallel_size
    packed = training.rl_use_sequence_packing
    rows = 1 if packed else training.micro_batch_size
    length = training.rl_sequence_packing_bin_size if packed else training.seq_length
    return {
        "prompts": rollouts.grpo_prompts_per_step,
        "responses_of_a_prompt": rollouts.grpo_group_size,
        "sequences": rollouts.sequences,
        "sequences_of_a_replica": rollouts.sequences // dp,
        "optimizer_steps": config.updates_per_rollout,
        "mini_batches": rollouts.sequences // training.global_batch_size,
        "sequences_of_a_step": training.global_batch_size,
        "micro_batches": -(-training.global_batch_size // (dp * sequences_of_micro_batch(config))),
        "rows_of_a_micro_batch": rows,
        "tokens_of_a_row": length,
        "tokens_of_a_rank": rows * length // config.parallel.context_parallel_size,
    }


def sequences_of_micro_batch(config: RunConfig) -> int:
    """Sequences of one micro-batch; with packing the number that fits if all have full length."""
    training = config.training
    if training.rl_use_sequence_packing:
        return training.rl_sequence_packing_bin_size // training.seq_length
    return training.micro_batch_size


def vocabulary_numbers(config: RunConfig) -> dict[str, int]:
    """Number of tokens, and of rows of the padded embedding."""
    padded = config.model.padded_vocab_size
    return {
        "tokens": config.model.vocab_size,
        "padded": padded,
        "rows_of_a_rank": padded // config.parallel.tensor_model_parallel_size,
    }


def numbers_in_words(config: RunConfig) -> list[str]:
    """The sizes, the layout and the experts as lines of text."""
    batch = batch_numbers(config)
    vocabulary = vocabulary_numbers(config)
    parallel = config.parallel
    at_most = "at most " if config.training.rl_use_sequence_packing else ""
    virtual = parallel.virtual_pipeline_model_parallel_size
    experts = config.experts
    layout = " × ".join(f"{dimension.upper()} {size}" for dimension, size in layout_of(config).items())
    stages = f", {virtual} virtual stages a rank" if virtual else ""
    lines = [
        f"{config.launch.world_size} ranks = {layout}{stages}",
        f"rollout batch: {batch['prompts']} prompts × {batch['responses_of_a_prompt']} responses = "
        f"{batch['sequences']} sequences, {batch['sequences_of_a_replica']} on each data-parallel rank",
        passes_in_words(config),
        scoring_in_words(config),
        f"{batch['optimizer_steps']} optimizer steps of {batch['sequences_of_a_step']} sequences: each "
        f"{at_most}{batch['micro_batches']} micro-batches a data-parallel rank, of {batch['rows_of_a_micro_batch']} × "
        f"{batch['tokens_of_a_row']} tokens",
        f"vocabulary: {vocabulary['tokens']} tokens, padded to {vocabulary['padded']} rows, "
        f"{vocabulary['rows_of_a_rank']} on each tensor-parallel rank",
    ]
    if experts is not None:
        ep = parallel.expert_model_parallel_size
        lines.append(
            f"experts: {experts.num_moe_experts} on EP {ep} = {experts.num_moe_experts // ep} on each rank, "
            f"{experts.moe_router_topk} for each token"
        )
    return lines
