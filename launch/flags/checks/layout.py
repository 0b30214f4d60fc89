"""Checks of the model's distribution over the ranks, of batches, and of numbers of steps."""

from __future__ import annotations

from megatron_rc.launch.errors import ConfigurationError, flag, require_multiple
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.guards import Condition

_SEQUENCES = ("grpo_prompts_per_step", "grpo_group_size")


def check_layout(config: RunConfig) -> None:
    """Check the number of processes, and tensor, pipeline, expert, sequence and context parallelism."""
    parallel = config.parallel
    size = parallel.model_size
    world = config.launch.world_size
    tp = parallel.tensor_model_parallel_size
    cp = parallel.context_parallel_size
    product = _product(config, "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    if world % size:
        raise ConfigurationError(f"{product} needs a multiple of {size} processes, got {world}: start as many")

    _check_stages(config)
    # Not in check_experts, which also checks teachers: one without experts has the run's flags.
    if config.experts is None and (config.megatron.expert_tensor_parallel_size or 1) != 1:
        raise ConfigurationError(
            f"{config.typed('expert_tensor_parallel_size')} does nothing without --num-experts: drop it"
        )
    length = config.training.seq_length
    if cp > 1:
        require_multiple("seq_length", length, "context_parallel_size", cp, factor=2)
    if parallel.sequence_parallel and length // cp % tp:
        raise ConfigurationError(
            f"--sequence-parallel: {config.typed('seq_length')} / {config.typed('context_parallel_size')} must be a "
            f"multiple of {config.typed('tensor_model_parallel_size')}"
        )


def _check_stages(config: RunConfig) -> None:
    """Check that layers spread evenly over the stages, apart from given numbers for the first and the last stage.

    A layout of all stages was checked when it was read.
    """
    stages = config.parallel.pipeline_model_parallel_size
    ends = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    flags_of_ends = " and ".join(config.typed(name) for name in ends if name in config.megatron.given)
    if not flags_of_ends and "pipeline_model_parallel_layout" not in config.megatron.given:
        require_multiple("num_layers", config.transformer.num_layers, "pipeline_model_parallel_size", stages)
    if not flags_of_ends:
        return
    if config.parallel.virtual_pipeline_model_parallel_size is not None:
        raise ConfigurationError(
            f"{flags_of_ends} with {config.typed('num_layers_per_virtual_pipeline_stage')}: virtual stages have "
            "equally many layers; drop one"
        )
    layers_of_stages = config.layers_of_chunks
    if min(layers_of_stages) < 1 or sum(layers_of_stages) != config.transformer.num_layers:
        raise ConfigurationError(
            f"{flags_of_ends} with {config.typed('num_layers')} and {config.typed('pipeline_model_parallel_size')}: "
            "each stage needs a layer, and the stages between the ends equally many; change one of them"
        )


def check_batches(config: RunConfig) -> None:
    """Check that rollout batches split into mini-batches, these into micro-batches, and all of them over the ranks."""
    sequences = config.rollouts.sequences
    size = config.training.global_batch_size
    dp = config.data_parallel_size
    product = f"{_product(config, *_SEQUENCES)} = {sequences} sequences"
    if config.rollouts.grpo_prompts_per_step % dp:
        raise ConfigurationError(
            f"{config.typed('grpo_prompts_per_step')} must be a multiple of {dp} data-parallel ranks"
        )
    if sequences % size:
        raise ConfigurationError(f"{product} must be a multiple of {config.typed('global_batch_size')}")
    if config.training.rl_use_sequence_packing:
        _check_packing(config)
    else:
        _check_micro_batches(config)


def _check_packing(config: RunConfig) -> None:
    training = config.training
    room = training.rl_sequence_packing_bin_size
    unit = config.parallel.packing_unit
    dp = config.data_parallel_size
    if room < training.seq_length:
        raise ConfigurationError(
            f"{config.typed('rl_sequence_packing_bin_size')} must hold a whole sequence of {config.typed('seq_length')}"
        )
    if room % unit:
        raise ConfigurationError(
            f"{config.typed('rl_sequence_packing_bin_size')} must be a multiple of {unit}, for context and sequence "
            "parallelism"
        )
    if training.global_batch_size % dp:
        raise ConfigurationError(f"{config.typed('global_batch_size')} must be a multiple of {dp} data-parallel ranks")


def _check_micro_batches(config: RunConfig) -> None:
    size = config.training.global_batch_size
    dp = config.data_parallel_size
    at_once = dp * config.training.micro_batch_size
    if size % at_once:
        raise ConfigurationError(
            f"{config.typed('global_batch_size')} must be a multiple of {config.typed('micro_batch_size')} · {dp} "
            "data-parallel ranks"
        )
    if size // at_once % config.parallel.micro_batch_unit:
        raise ConfigurationError(
            f"virtual stages need a multiple of {config.parallel.micro_batch_unit} micro-batches "
            f"(--pipeline-model-parallel-size), got {size // at_once}: change --global-batch-size or "
            "--micro-batch-size"
        )


def check_steps(config: RunConfig, samples: bool) -> None:
    """Check numbers of optimizer steps: whole rollout batches between two events, and events that can come."""
    critic = config.critic
    last = config.training.train_iters
    steps = config.updates_per_rollout
    staleness = config.rollouts.rollout_staleness
    eval_interval = config.evaluation.eval_interval
    intervals = {
        "save_interval": config.checkpoints.save_interval,
        "ref_update_interval": config.reference.ref_update_interval,
        "num_critic_only_steps": critic and critic.num_critic_only_steps,
        "rollout_staleness": staleness if samples else None,
        "eval_interval": eval_interval,
    }
    for name, number in intervals.items():
        if number and number % steps:
            product = _product(config, *_SEQUENCES, "grpo_iterations")
            raise ConfigurationError(
                f"{flag(name)} {number} must be a multiple of the {steps} optimizer steps of a rollout batch "
                f"({product} / {config.typed('global_batch_size')})"
            )
    if eval_interval and staleness and not config.engine.rl_partial_rollouts and eval_interval % staleness:
        raise ConfigurationError(
            f"{config.typed('eval_interval')} must be a multiple of {config.typed('rollout_staleness')}, the optimizer "
            "steps after which the engine gets new weights"
        )
    if critic and critic.num_critic_only_steps >= last:
        raise ConfigurationError(f"{config.typed('num_critic_only_steps')} must be below {config.typed('train_iters')}")
    if critic and critic.critic_lr_warmup_iters >= config.schedule.lr_decay_iters:
        raise ConfigurationError(
            f"{config.typed('critic_lr_warmup_iters')} must be below {config.typed('lr_decay_iters')}"
        )
    if config.schedule.lr_warmup_init > config.optimizer.lr:
        raise ConfigurationError(f"{config.typed('lr_warmup_init')} must be at most {config.typed('lr')}")
    _check_profile(config)
    _check_rare_metrics(config)


def _check_profile(config: RunConfig) -> None:
    """Check that the profiled ranks are some of the run's."""
    logging = config.logging
    if not logging.profile:
        return
    world_size = config.launch.world_size
    for rank in logging.profile_ranks or ():
        if not 0 <= rank < world_size:
            raise ConfigurationError(f"--profile-ranks {rank} must be one of 0 to {world_size - 1}")


def _check_rare_metrics(config: RunConfig) -> None:
    """Refuse conditions on metrics that only some steps have, and no step of this run."""
    intervals = {
        "perf/save_seconds": ("--save-interval", config.checkpoints.save_interval),
        "perf/eval_seconds": ("--eval-interval", config.evaluation.eval_interval),
    }
    for text in config.guards.stop_if or ():
        metric = Condition.parse(text).metric
        name, interval = intervals.get(metric, ("", 1))
        if interval is None:
            raise ConfigurationError(f"--stop-if '{text}' does nothing without {name}: no step has {metric}")


def _product(config: RunConfig, *names: str) -> str:
    return " · ".join(map(config.typed, names))
