"""Checks of the model's distribution over the ranks, and of batches."""

from __future__ import annotations

from megatron_rc.launch.errors import flag, require_multiple
from megatron_rc.launch.flags.checks.refuse import refuse
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.numerics import NUM_SEQUENCE_IDS

_MOST_MINI_BATCHES = 1024
_SEQUENCES = "{grpo_prompts_per_step} · {grpo_group_size}"


def check_parallelism(config: RunConfig) -> None:
    """Check the number of processes, and tensor, pipeline, sequence and context parallelism."""
    parallel, length, world = config.parallel, config.training.seq_length, config.launch.world_size
    tp, cp, size = parallel.tensor_model_parallel_size, parallel.context_parallel_size, parallel.model_size
    layout = "{tensor_model_parallel_size} · {pipeline_model_parallel_size} · {context_parallel_size}"
    wrong = {
        layout + " needs {size} processes, got {world}: start more, or split less": world < size,
        layout + " = {size} does not divide {world} processes: start a multiple of it": world % size,
    }
    refuse(config, wrong, size=size, world=world)
    _check_stages(config)
    uneven = "{sequence_parallel}: {seq_length} / {context_parallel_size} must be a multiple of "
    refuse(config, {uneven + "{tensor_model_parallel_size}": parallel.sequence_parallel and length // cp % tp})
    if cp > 1:
        require_multiple("seq_length", length, "context_parallel_size", cp, factor=2)


def _check_stages(config: RunConfig) -> None:
    """Check that layers spread evenly over the stages, apart from given numbers for the first and the last stage.

    A layout of all stages was checked when it was read; Megatron refuses it beside such numbers.
    """
    layers, pp = config.transformer.num_layers, config.parallel.pipeline_model_parallel_size
    ends = dict(zip(("first", "last"), config.megatron.layers_at_ends, strict=True))
    given = {f"--decoder-{end}-pipeline-num-layers {n}": n for end, n in ends.items() if n is not None}
    if "pipeline_model_parallel_layout" in config.megatron.given:
        return
    if not given:
        require_multiple("num_layers", layers, "pipeline_model_parallel_size", pp)
        return
    left, others = layers - sum(given.values()), pp - len(given)
    wrong = {
        "{flags} must be positive": min(given.values()) <= 0,
        "{flags} needs --pipeline-model-parallel-size above 1: give both, or neither": pp == 1,
        "{flags} with --num-layers-per-virtual-pipeline-stage: virtual stages have equally many layers; drop one": (
            config.parallel.virtual_pipeline_model_parallel_size is not None
        ),
        "{num_layers} without {flags} leaves {left} layers, which do not spread evenly over {others} other pipeline "
        "stages: change one of them": left < others or (left % others if others else left),
    }
    refuse(config, wrong, flags=" and ".join(given), left=left, others=others)


def check_batches(config: RunConfig) -> None:
    """Check that rollout batches split into mini-batches, these into micro-batches, and all of them over the ranks."""
    sequences, size, dp = config.rollouts.sequences, config.training.global_batch_size, config.data_parallel_size
    product = _SEQUENCES + " = {sequences} sequences"
    wrong = {
        "{grpo_prompts_per_step} must be a multiple of {dp} data-parallel ranks": (
            config.rollouts.grpo_prompts_per_step % dp
        ),
        product + ": a rollout batch has at most {most}": sequences > NUM_SEQUENCE_IDS,
        product + " must be a multiple of {global_batch_size}": sequences % size,
        product + " make {batches} batches of {global_batch_size}: at most {most_batches} are possible; make them "
        "larger": sequences // size > _MOST_MINI_BATCHES,
    }
    numbers = {"most": NUM_SEQUENCE_IDS, "most_batches": _MOST_MINI_BATCHES, "batches": sequences // size}
    refuse(config, wrong, dp=dp, sequences=sequences, **numbers)
    _check_micro_batches(config)


def _check_micro_batches(config: RunConfig) -> None:
    training, parallel, dp = config.training, config.parallel, config.data_parallel_size
    size, packs = training.global_batch_size, training.rl_use_sequence_packing
    at_once, factor = (dp, "") if packs else (dp * training.micro_batch_size, "{micro_batch_size} · ")
    room, unit, virtual = training.rl_sequence_packing_bin_size, parallel.packing_unit, parallel.micro_batch_unit
    wrong = {
        "{rl_sequence_packing_bin_size} must hold a whole sequence of {seq_length}": (
            packs and room < training.seq_length
        ),
        "{rl_sequence_packing_bin_size} must be a multiple of {unit}, for context and sequence parallelism": (
            packs and room % unit
        ),
        "{global_batch_size} must be a multiple of " + factor + "{dp} data-parallel ranks": size % at_once,
        "virtual stages need a multiple of {virtual} micro-batches (--pipeline-model-parallel-size), got {number}: "
        "change --global-batch-size or --micro-batch-size": not packs and size // at_once % virtual,
    }
    refuse(config, wrong, dp=dp, unit=unit, virtual=virtual, number=size // at_once)


def check_intervals(config: RunConfig, samples: bool) -> None:
    """Check that whole rollout batches lie between saves, updates of the reference, the critic's start and syncs."""
    critic, steps = config.critic, config.updates_per_rollout
    interval, staleness = config.evaluation.eval_interval, config.rollouts.rollout_staleness
    intervals = {
        "save_interval": config.checkpoints.save_interval,
        "ref_update_interval": config.reference.ref_update_interval,
        "num_critic_only_steps": critic and critic.num_critic_only_steps,
        "rollout_staleness": staleness if samples else None,
        "eval_interval": interval,
    }
    product = f"({_SEQUENCES} · {{grpo_iterations}} / {{global_batch_size}})"
    wrong = {
        f"{flag(name)} {number} must be a multiple of the {steps} optimizer steps of a rollout batch {product}": (
            number and number % steps
        )
        for name, number in intervals.items()
    }
    wrong[
        "{eval_interval} must be a multiple of {rollout_staleness}, the optimizer steps after which the engine gets "
        "new weights"
    ] = interval and staleness and not config.engine.rl_partial_rollouts and interval % staleness
    refuse(config, wrong)
