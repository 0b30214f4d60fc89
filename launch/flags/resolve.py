"""Settings from flags: values that a flag leaves open follow from the others.

A constant default is declared with its flag, in ``run_config/`` or ``parser.py``. ``checks/`` says which settings go
together.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
from pathlib import Path
from typing import Any

import torch

from megatron_rc.launch.errors import ConfigurationError, flag, has_module, require_multiple
from megatron_rc.launch.flags.idle import drop_idle, drop_idle_in_loss
from megatron_rc.launch.flags.parser import PENALTIES
from megatron_rc.launch.flags.resolve_task import choose_prompts, resolve_task
from megatron_rc.launch.flags.sources import check_sources
from megatron_rc.launch.run_config import RunConfig, flag_options, passed_through, sections_of
from megatron_rc.launch.run_config.layer_patterns import layers_of_layout
from megatron_rc.launch.run_config.megatron import ExpertSection
from megatron_rc.launch.run_config.options import Option, Section, is_met, options_of, out_of_range
from megatron_rc.launch.tasks import Task
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.flags import policy_loss_config_from_args, rollout_correction_config_from_args
from megatron_rc.settings.objective import resolve_objective

_log = logging.getLogger("megatron_rc")
_LAYERS_OF_A_CHUNK = "num_layers_per_virtual_pipeline_stage"
# Flags that a value of another flag cannot do without.
_COMPANIONS = {
    "recompute_granularity=full": ("recompute_method", "recompute_num_layers"),
    "lr_decay_style=WSD": ("lr_wsd_decay_iters",),
    "weight_decay_incr_style=linear|cosine": ("start_weight_decay", "end_weight_decay"),
    "overlong=penalise": ("overlong_buffer",),
}


def resolve(args: argparse.Namespace, world_size: int, *, engine: bool = True) -> tuple[RunConfig, Task]:
    """Make the settings and the task that the flags of ``parse_args`` describe; ``args`` is changed."""
    choose_prompts(args)
    absent = _fill_optional_sections(args)
    _resolve_samples(args)
    _check_values(args)
    drop_idle(args)
    check_sources(args)
    args.world_size = world_size
    args.knows_versions = (engine and not args.load_rollouts) or args.rollout_staleness is not None
    _resolve_launch(args)
    _resolve_stages(args)
    args.given = {}
    for name, field in passed_through().items():
        value = getattr(args, name)
        if value is not None:
            args.given[name] = value[0] if field.single and len(value) == 1 else value
    experts = None if "experts" in absent else _section(ExpertSection, args)
    correction, loss = _resolve_correction(args, experts)
    if "critic" not in absent:
        _resolve_critic(args, correction)
    task = resolve_task(args)
    for _, option in flag_options().values():
        if isinstance(option.most, str) or isinstance(option.below, str):
            _check_range(args, option)
    sections: dict[str, Any] = {
        name: None if name in absent else _section(kind, args) for name, kind, _ in sections_of(RunConfig)
    }
    config = RunConfig(**sections, correction=correction, loss=loss)
    drop_idle_in_loss(args, config)
    return config, task


def _section(section: type[Section], args: argparse.Namespace) -> Section:
    """Make a section; its fields are in the namespace under the names of their flags."""
    flags = {option.field: option for option in options_of(section)}
    values = {}
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        option = flags.get(field.name)
        value = getattr(args, option.flag if option else field.name)
        values[field.name] = not value if option and option.inverted else value
    return section(**values)


def _fill_optional_sections(args: argparse.Namespace) -> set[str]:
    """Give the flags of each optional section that is wanted their defaults; return the names of the others."""
    absent = set()
    for name, section, is_optional in sections_of(RunConfig):
        if not is_optional:
            continue
        if not is_met(section.NEEDS, args):  # type: ignore[attr-defined]
            absent.add(name)
            continue
        for option in options_of(section):
            if getattr(args, option.flag) is None:
                setattr(args, option.flag, option.default)
    return absent


def _resolve_samples(args: argparse.Namespace) -> None:
    """Fill in numbers of steps from numbers of sequences (``--train-samples``); the last may be a fraction."""
    total, size = args.train_samples, args.global_batch_size
    if total is None:
        return
    if not size or total < size:
        raise ConfigurationError(f"--train-samples {total} must be at least one --global-batch-size, got {size}")
    for steps in ("train_iters", "lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters"):
        samples = steps.replace("iters", "samples")
        if getattr(args, steps):
            raise ConfigurationError(
                f"{flag(steps)} {getattr(args, steps)} counts steps beside --train-samples: give {flag(samples)}"
            )
        number = getattr(args, samples)
        if number:
            setattr(args, steps, number // size if steps == "train_iters" or number % size == 0 else number / size)


def _check_values(args: argparse.Namespace) -> None:
    """Raise ConfigurationError for a value that is missing or out of its range, and a flag without its companions."""
    options = [option for _, option in flag_options().values()]
    for option in options:
        if option.required and getattr(args, option.flag) is None:
            raise ConfigurationError(f"{flag(option.flag)} is missing: give it as a flag or in the launch file")
    for option in options:
        _check_range(args, option)
    for need, names in _COMPANIONS.items():
        missing = [flag(name) for name in names if getattr(args, name) is None]
        if is_met(need, args) and missing:
            name, _, _ = need.partition("=")
            raise ConfigurationError(f"{flag(name)} {getattr(args, name)} needs {' and '.join(missing)}")


def _check_range(args: argparse.Namespace, option: Option) -> None:
    value = getattr(args, option.flag)
    words = out_of_range(option, value, args)
    if words:
        raise ConfigurationError(f"{flag(option.flag)} {value} {words}")


def _resolve_launch(args: argparse.Namespace) -> None:
    args.on_cpu = args.cpu or not (args.elsewhere or torch.cuda.is_available())
    args.run_name = args.run_name or (Path(args.config).stem if args.config else "ppo")
    has_engine = not args.on_cpu and (args.elsewhere or has_module("transformer_engine"))
    args.transformer_impl = args.transformer_impl or ("transformer_engine" if has_engine else "local")
    args.lr_decay_iters = args.lr_decay_iters or args.train_iters
    size = args.micro_batch_size * args.seq_length
    args.rl_sequence_packing_bin_size = args.rl_sequence_packing_bin_size or size
    args.ffn_hidden_size = args.ffn_hidden_size or 4 * args.hidden_size
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    if not args.group_query_attention:
        args.num_query_groups = args.num_attention_heads
    if args.kv_channels is None:
        require_multiple("hidden_size", args.hidden_size, "num_attention_heads", args.num_attention_heads)
        args.kv_channels = args.hidden_size // args.num_attention_heads
    if args.num_experts is not None:
        args.moe_ffn_hidden_size = args.moe_ffn_hidden_size or args.ffn_hidden_size


def _resolve_stages(args: argparse.Namespace) -> None:
    """Work out the model chunks of a pipeline stage from the layout of all stages, or from the layers of a chunk."""
    name, pp = _LAYERS_OF_A_CHUNK, args.pipeline_model_parallel_size
    layers = getattr(args, name)
    args.virtual_pipeline_model_parallel_size = None
    if getattr(args, "pipeline_model_parallel_layout", None) is not None:
        args.virtual_pipeline_model_parallel_size = _chunks_of_layout(args)
        return
    if layers is None:
        return
    if layers <= 0:
        raise ConfigurationError(f"{flag(name)} {layers} must be positive")
    if pp == 1:
        raise ConfigurationError(f"{flag(name)} {layers} needs --pipeline-model-parallel-size above 1")
    require_multiple("num_layers", args.num_layers, name, layers, factor=pp)
    chunks = args.num_layers // pp // layers
    # One chunk a stage is the plain schedule.
    args.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None


def _chunks_of_layout(args: argparse.Namespace) -> int | None:
    """Model chunks of a pipeline stage; None for the plain schedule, which has one."""
    layout, pp, other = args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size, _LAYERS_OF_A_CHUNK
    typed = f"--pipeline-model-parallel-layout {layout}"
    if pp == 1:
        raise ConfigurationError(f"{typed} needs --pipeline-model-parallel-size above 1")
    if getattr(args, other) is not None:
        raise ConfigurationError(f"{typed} gives each stage its layers: drop {flag(other)} {getattr(args, other)}")
    try:
        chunks = len(layers_of_layout(layout, pp, args.num_layers)) // pp
    except ValueError as error:
        raise ConfigurationError(
            f"{typed} with --num-layers {args.num_layers} and --pipeline-model-parallel-size {pp}: {error}; write E, "
            "then t for each layer, then L, and | between stages, such as Et|ttL"
        ) from error
    return chunks if chunks > 1 else None


def _resolve_correction(
    args: argparse.Namespace, experts: ExpertSection | None
) -> tuple[RolloutCorrectionConfig, PolicyLossConfig]:
    auxiliary = experts is not None and experts.has_auxiliary_losses
    try:
        correction = rollout_correction_config_from_args(args.command_line, args.launch_file)
        _resolve_coefficients(args, correction)
        # With its algorithm, so that an error about another setting of it names the flag.
        algorithm = args.policy_loss or (correction.loss_type if correction.bypass_mode else "ppo_clip")
        objective = policy_loss_config_from_args(argparse.Namespace(**{**vars(args), "policy_loss": algorithm}))
        if correction.bypass_mode and algorithm != correction.loss_type:
            raise ConfigurationError(
                f"--policy-loss {objective.algorithm} contradicts {correction.loss_type}, the objective in bypass "
                f"mode: give --loss-type {objective.algorithm} instead"
            )
        return correction, resolve_objective(correction, objective, has_auxiliary_losses=auxiliary)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def _resolve_coefficients(args: argparse.Namespace, correction: RolloutCorrectionConfig) -> None:
    """Set penalties that were not given to Megatron-LM's weights, or to 0 if the correction excludes penalties.

    Batch normalisation inside the loss scales all finished gradients by one factor, the penalties' gradients too.
    """
    excluded = correction.rollout_is_batch_normalize and correction.corrects_in_loss
    for name, default in PENALTIES.items():
        if getattr(args, name) is not None:
            continue
        setattr(args, name, 0.0 if excluded else default)
        if excluded and default:
            _log.warning("%s is 0, not %s: --rollout-is-batch-normalize in the loss excludes it", flag(name), default)


def _resolve_critic(args: argparse.Namespace, correction: RolloutCorrectionConfig) -> None:
    args.critic_lr = args.lr if args.critic_lr is None else args.critic_lr
    args.critic_min_lr = min(args.min_lr, args.critic_lr) if args.critic_min_lr is None else args.critic_min_lr
    if args.correct_values is None:
        args.correct_values = "none" if correction.corrects_in_loss else "mask"
