"""Checks of the model's distribution over the ranks, and of batches."""

from __future__ import annotations

from megatron_rc.launch.errors import ConfigurationError, flag, require_multiple
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.numerics import NUM_SEQUENCE_IDS

_MOST_MINI_BATCHES = 1024


def check_parallelism(config: RunConfig) -> None:
    """Check the number of processes, and tensor, pipeline, sequence and context parallelism."""
    parallel, length, world = config.parallel, config.training.seq_length, config.launch.world_size
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp = parallel.context_parallel_size
    layout = f"--tensor-model-parallel-size {tp} · --pipeline-model-parallel-size {pp} · --context-parallel-size {cp}"
    if world < parallel.model_size:
        raise ConfigurationError(
            f"{layout} needs {parallel.model_size} processes, got {world}: start more, or split less"
        )
    if world % parallel.model_size:
        raise ConfigurationError(
            f"{layout} = {parallel.model_size} does not divide {world} processes: start a multiple of it"
        )
    _check_stages(config)
    if parallel.sequence_parallel and tp == 1:
        raise ConfigurationError("--sequence-parallel needs --tensor-model-parallel-size above 1: drop it")
    if parallel.sequence_parallel and length // cp % tp:
        raise ConfigurationError(
            f"--sequence-parallel: --seq-length {length} / --context-parallel-size {cp} must be a multiple of "
            f"--tensor-model-parallel-size {tp}"
        )
    if cp > 1:
        require_multiple("seq_length", length, "context_parallel_size", cp, factor=2)
    if config.optimizer.use_distributed_optimizer and config.optimizer.optimizer != "adam":
        raise ConfigurationError(
            f"--use-distributed-optimizer needs --optimizer adam, got {config.optimizer.optimizer}: drop one of them"
        )


def _check_stages(config: RunConfig) -> None:
    """Check that layers spread evenly over the stages, apart from given numbers for the first and the last stage."""
    layers, pp = config.transformer.num_layers, config.parallel.pipeline_model_parallel_size
    ends = dict(zip(("first", "last"), config.megatron.layers_at_ends, strict=True))
    given = {f"--decoder-{end}-pipeline-num-layers {n}": n for end, n in ends.items() if n is not None}
    if not given:
        require_multiple("num_layers", layers, "pipeline_model_parallel_size", pp)
        return
    flags = " and ".join(given)
    if min(given.values()) <= 0:
        raise ConfigurationError(f"{flags} must be positive")
    if pp == 1:
        raise ConfigurationError(f"{flags} needs --pipeline-model-parallel-size above 1: give both, or neither")
    if config.parallel.virtual_pipeline_model_parallel_size is not None:
        raise ConfigurationError(
            f"{flags} with --num-layers-per-virtual-pipeline-stage: virtual stages have equally many layers; drop one"
        )
    left, others = layers - sum(given.values()), pp - len(given)
    if left < others or (left % others if others else left):
        raise ConfigurationError(
            f"--num-layers {layers} without {flags} leaves {left} layers, which do not spread evenly over {others} "
            "other pipeline stages: change one of them"
        )


def check_batches(config: RunConfig) -> None:
    """Check that rollout batches split into mini-batches, these into micro-batches, and all of them over the ranks."""
    rollouts, size, dp = config.rollouts, config.training.global_batch_size, config.data_parallel_size
    if rollouts.grpo_prompts_per_step % dp:
        raise ConfigurationError(
            f"--grpo-prompts-per-step {rollouts.grpo_prompts_per_step} must be a multiple of {dp} data-parallel ranks"
        )
    product = (
        f"--grpo-prompts-per-step {rollouts.grpo_prompts_per_step} · --grpo-group-size {rollouts.grpo_group_size} "
        f"= {rollouts.sequences} sequences"
    )
    if rollouts.sequences > NUM_SEQUENCE_IDS:
        raise ConfigurationError(f"{product}: a rollout batch has at most {NUM_SEQUENCE_IDS}")
    if rollouts.sequences % size:
        raise ConfigurationError(f"{product} must be a multiple of --global-batch-size {size}")
    if rollouts.sequences // size > _MOST_MINI_BATCHES:
        raise ConfigurationError(
            f"{product} make {rollouts.sequences // size} batches of --global-batch-size {size}: at most "
            f"{_MOST_MINI_BATCHES} are possible; make them larger"
        )
    if config.compute.calculate_per_token_loss and size * config.training.seq_length >= 2**31:
        raise ConfigurationError(
            f"--calculate-per-token-loss counts the {size * config.training.seq_length} tokens of --global-batch-size "
            f"{size} sequences of --seq-length {config.training.seq_length} in 32 bits: drop it, the gradients are the "
            "same"
        )
    _check_micro_batches(config)


def _check_micro_batches(config: RunConfig) -> None:
    training, dp, packs = config.training, config.data_parallel_size, config.training.rl_use_sequence_packing
    if packs:
        packed = f"--rl-sequence-packing-bin-size {training.rl_sequence_packing_bin_size}"
        if training.rl_sequence_packing_bin_size < training.seq_length:
            raise ConfigurationError(f"{packed} must hold a whole sequence of --seq-length {training.seq_length}")
        if training.rl_sequence_packing_bin_size % config.parallel.packing_unit:
            raise ConfigurationError(
                f"{packed} must be a multiple of {config.parallel.packing_unit}, for context and sequence parallelism"
            )
    at_once = dp if packs else dp * training.micro_batch_size
    factor = "" if packs else f"--micro-batch-size {training.micro_batch_size} · "
    if training.global_batch_size % at_once:
        raise ConfigurationError(
            f"--global-batch-size {training.global_batch_size} must be a multiple of {factor}{dp} data-parallel ranks"
        )
    number, unit = training.global_batch_size // at_once, config.parallel.micro_batch_unit
    if number % unit and not packs:
        raise ConfigurationError(
            f"virtual stages need a multiple of {unit} micro-batches (--pipeline-model-parallel-size), got {number}: "
            "change --global-batch-size or --micro-batch-size"
        )


def check_intervals(config: RunConfig, samples: bool) -> None:
    """Check that whole rollout batches lie between saves, updates of the reference, the critic's start and syncs."""
    rollouts, training, critic, steps = config.rollouts, config.training, config.critic, config.updates_per_rollout
    product = (
        f"--grpo-prompts-per-step {rollouts.grpo_prompts_per_step} · --grpo-group-size {rollouts.grpo_group_size} · "
        f"--grpo-iterations {rollouts.grpo_iterations} / --global-batch-size {training.global_batch_size}"
    )
    intervals = {
        "save_interval": config.checkpoints.save_interval,
        "ref_update_interval": config.reference.ref_update_interval,
        "num_critic_only_steps": critic and critic.num_critic_only_steps,
        "rollout_staleness": rollouts.rollout_staleness if samples else None,
        "eval_interval": config.evaluation.eval_interval,
    }
    for name, interval in intervals.items():
        if interval and interval % steps:
            raise ConfigurationError(
                f"{flag(name)} {interval} must be a multiple of the {steps} optimizer steps of a rollout batch "
                f"({product})"
            )
    interval, staleness = config.evaluation.eval_interval, rollouts.rollout_staleness
    if interval and staleness and interval % staleness:
        raise ConfigurationError(
            f"--eval-interval {interval} must be a multiple of --rollout-staleness {staleness}, the optimizer steps "
            "after which the engine gets new weights"
        )
