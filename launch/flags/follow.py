"""Values that follow from other flags: defaults that are no constants. ``task_of_run.py`` has those of the task."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

import torch

from megatron_rc.launch.errors import ConfigurationError, flag, has_module, require_multiple
from megatron_rc.launch.flags.command import Command, Values
from megatron_rc.launch.flags.parser import LOSS_DEFAULTS, defaults
from megatron_rc.launch.run_config import flag_options, passed_through
from megatron_rc.launch.run_config.layer_patterns import layers_of_layout
from megatron_rc.launch.run_config.options import check_range
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.flags import policy_loss_config_from_args, rollout_correction_config_from_args
from megatron_rc.settings.objective import resolve_objective

_log = logging.getLogger("megatron_rc")
# Numbers of steps that --train-samples and its companions give as numbers of sequences.
_STEPS = ("train_iters", "lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")


def check_given(values: Values) -> None:
    """Raise ConfigurationError for a required flag that is missing, and for a number out of its range."""
    for name, (_, option) in flag_options().items():
        value = values[option.flag]
        is_counted_in_samples = name == "train-iters" and values.train_samples is not None
        if option.required and value is None and not is_counted_in_samples:
            raise ConfigurationError(f"--{name} is missing: give it as a flag or in the launch file")
        check_range(option, value)


def with_steps(values: Values) -> Values:
    """Return the values with numbers of steps from numbers of sequences; all but the last step may be fractions."""
    samples = values.train_samples
    if samples is None:
        return values
    size = values.global_batch_size
    if samples < size:
        raise ConfigurationError(f"--train-samples {samples} must be at least one --global-batch-size, got {size}")
    steps: dict[str, float] = {}
    for name in _STEPS:
        flag_of_samples = name.replace("iters", "samples")
        if values[name]:
            raise ConfigurationError(
                f"{flag(name)} {values[name]} counts steps beside --train-samples: give {flag(flag_of_samples)}"
            )
        number = values[flag_of_samples]
        if number:
            is_whole = name == "train_iters" or number % size == 0
            steps[name] = number // size if is_whole else number / size
    return values.also(steps)


def with_what_follows(values: Values, world_size: int, *, samples: bool, elsewhere: bool) -> Values:
    """Return the values with the defaults that follow from the machine and from other flags, except the task's.

    Args:
        values: values of all flags.
        world_size: number of processes.
        samples: an engine of this run samples the rollouts.
        elsewhere: the run is for other machines, which have GPUs.
    """
    on_cpu = values.cpu or not (elsewhere or torch.cuda.is_available())
    has_transformer_engine = not on_cpu and (elsewhere or has_module("transformer_engine"))
    usual_layers = "transformer_engine" if has_transformer_engine else "local"
    run_name = Path(values.config).stem if values.config else "ppo"
    critic_lr = values.critic_lr or values.lr
    critic_min_lr = values.critic_min_lr
    if critic_min_lr is None:
        critic_min_lr = min(values.min_lr, critic_lr)
    return with_model_defaults(values).also(
        {
            "on_cpu": on_cpu,
            "world_size": world_size,
            "run_name": values.run_name or run_name,
            "transformer_impl": values.transformer_impl or usual_layers,
            "lr_decay_iters": values.lr_decay_iters or values.train_iters,
            "rl_sequence_packing_bin_size": values.rl_sequence_packing_bin_size
            or values.micro_batch_size * values.seq_length,
            "knows_versions": samples or values.rollout_staleness is not None,
            "virtual_pipeline_model_parallel_size": _virtual_stages(values),
            "critic_lr": critic_lr,
            "critic_min_lr": critic_min_lr,
            "teacher_temperature": values.teacher_temperature or values.rl_default_temperature,
        }
    )


def with_model_defaults(values: Values) -> Values:
    """Return the values with the sizes of the model that follow from others: of the policy, or of a teacher."""
    ffn_hidden_size = values.ffn_hidden_size or 4 * values.hidden_size
    more: dict[str, Any] = {
        "max_position_embeddings": values.max_position_embeddings or values.seq_length,
        "swiglu": values.swiglu or values.quick_geglu,
        "ffn_hidden_size": ffn_hidden_size,
        "moe_ffn_hidden_size": values.moe_ffn_hidden_size or ffn_hidden_size,
    }
    if not values.group_query_attention:
        more["num_query_groups"] = values.num_attention_heads
    if values.kv_channels is None:
        require_multiple("hidden_size", values.hidden_size, "num_attention_heads", values.num_attention_heads)
        more["kv_channels"] = values.hidden_size // values.num_attention_heads
    return values.also(more)


def given_to_megatron(command: Command) -> dict[str, Any]:
    """Return the given fields of Megatron's configs that no section has."""
    fields = {}
    for name, value in command.given.items():
        # A flag without a default here is one of Megatron-Core's own fields.
        if name in defaults():
            continue
        field = passed_through()[name]
        if isinstance(value, tuple):
            value = value[0] if field.single and len(value) == 1 else list(value)
        fields[name] = value
    return fields


def _virtual_stages(values: Values) -> int | None:
    """Return the model chunks of a pipeline stage; None for the plain schedule, which has one."""
    stages = values.pipeline_model_parallel_size
    layers = values.num_layers_per_virtual_pipeline_stage
    layout = values.get("pipeline_model_parallel_layout")
    chunks = 1
    if layout is not None:
        try:
            chunks = len(layers_of_layout(layout, stages, values.num_layers)) // stages
        except ValueError as error:
            raise ConfigurationError(
                f"--pipeline-model-parallel-layout {layout} with --num-layers {values.num_layers} and "
                f"--pipeline-model-parallel-size {stages}: {error}; write E, then t for each layer, then L, and | "
                "between stages, such as Et|ttL"
            ) from error
    elif layers is not None:
        name = "num_layers_per_virtual_pipeline_stage"
        require_multiple("num_layers", values.num_layers, name, layers, factor=stages)
        chunks = values.num_layers // stages // layers
    return chunks if chunks > 1 else None


def correction_and_loss(command: Command, values: Values) -> tuple[RolloutCorrectionConfig, PolicyLossConfig]:
    """Return the correction, and the objective that goes with it."""
    auxiliary = values.num_experts is not None and bool(values.moe_aux_loss_coeff or values.moe_z_loss_coeff)
    try:
        correction = rollout_correction_config_from_args(
            argparse.Namespace(**command.typed), argparse.Namespace(**command.in_file)
        )
        # The algorithm is always named, so that an error about another setting of it names the flag.
        algorithm = values.policy_loss or (correction.loss_type if correction.bypass_mode else "ppo_clip")
        chosen = {**values, **_loss_defaults(values, correction), "policy_loss": algorithm}
        loss = policy_loss_config_from_args(argparse.Namespace(**chosen))
        if correction.bypass_mode and algorithm != correction.loss_type:
            raise ConfigurationError(
                f"--policy-loss {loss.algorithm} contradicts {correction.loss_type}, the objective in bypass mode: "
                f"give --loss-type {loss.algorithm} instead"
            )
        return correction, resolve_objective(correction, loss, has_auxiliary_losses=auxiliary)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def _loss_defaults(values: Values, correction: RolloutCorrectionConfig) -> dict[str, float]:
    """Return the bounds and penalties that were not given: Megatron-LM's.

    Batch normalisation inside the loss scales all finished gradients by one factor, the penalties' gradients too: a
    correction with it excludes penalties.
    """
    missing = {name: default for name, default in LOSS_DEFAULTS.items() if values[name] is None}
    if not (correction.rollout_is_batch_normalize and correction.corrects_in_loss):
        return missing
    for name in ("grpo_kl_beta", "grpo_entropy_term_weight"):
        default = missing.get(name)
        if default:
            _log.warning("%s is 0, not %s: --rollout-is-batch-normalize in the loss excludes it", flag(name), default)
        if default is not None:
            missing[name] = 0.0
    return missing
