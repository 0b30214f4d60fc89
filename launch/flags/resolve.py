"""From flags to settings: what a flag leaves open is worked out from the others.

A default that is a constant stands with its flag: with its field in ``run_config/``, or in ``parser.py``. Which
settings go together is in ``checks/``.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import logging
from pathlib import Path
from typing import Any

import torch

from megatron_rc.launch.errors import ConfigurationError, flag, require_multiple
from megatron_rc.launch.flags.idle import check_idle
from megatron_rc.launch.flags.parser import PENALTIES
from megatron_rc.launch.flags.resolve_critic import resolve_critic
from megatron_rc.launch.flags.resolve_data import choose_prompts
from megatron_rc.launch.flags.resolve_samples import resolve_samples
from megatron_rc.launch.flags.resolve_task import resolve_task
from megatron_rc.launch.run_config import RunConfig, passed_through, sections_of
from megatron_rc.launch.run_config.critic import CriticSection
from megatron_rc.launch.run_config.megatron import ExpertSection, LatentSection
from megatron_rc.launch.run_config.options import Section, options_of, out_of_range
from megatron_rc.launch.tasks import Task
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.flags import policy_loss_config_from_args, rollout_correction_config_from_args
from megatron_rc.settings.objective import resolve_objective

_log = logging.getLogger("megatron_rc")


def resolve(args: argparse.Namespace, world_size: int, *, engine: bool = True) -> tuple[RunConfig, Task]:
    """The settings that the flags describe, and the task that they name.

    Args:
        args: as ``parse_args`` gives them; written to.
        world_size: number of processes.
        engine: rollouts are sampled by an engine of this run, unless they are read.

    Raises:
        ConfigurationError: a value that is missing or out of its range, or a flag that does nothing beside the others.
    """
    resolve_samples(args)
    _check_values(args)
    choose_prompts(args)
    args.world_size = world_size
    args.knows_versions = (engine and not args.load_rollouts) or args.rollout_staleness is not None
    _resolve_launch(args)
    _resolve_layers(args)
    _resolve_stages(args)
    _resolve_experts(args)
    _resolve_optional(args, LatentSection, "multi_latent_attention")
    _resolve_packing(args)
    args.given = {name: _single(args, name) for name in passed_through() if getattr(args, name) is not None}
    experts = None if args.num_experts is None else _section(ExpertSection, args)
    latent = _section(LatentSection, args) if args.multi_latent_attention else None
    correction, loss = _resolve_correction(args, experts)
    has_critic = resolve_critic(args, correction)
    critic = _section(CriticSection, args) if has_critic else None
    check_idle(args, loss)
    task = resolve_task(args)
    kinds = {name: kind for name, kind, is_optional in sections_of(RunConfig) if not is_optional}
    sections: dict[str, Any] = {"experts": experts, "latent": latent, "critic": critic}
    sections |= {name: _section(kind, args) for name, kind in kinds.items()}
    return RunConfig(**sections, correction=correction, loss=loss), task


def _section(section: type[Section], args: argparse.Namespace) -> Section:
    """The section, its fields under the names of their flags in the namespace."""
    flags = {option.field: option for option in options_of(section)}
    values = {}
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        option = flags.get(field.name)
        value = getattr(args, option.flag if option else field.name)
        values[field.name] = not value if option and option.inverted else value
    return section(**values)


def _check_values(args: argparse.Namespace) -> None:
    """Raise ConfigurationError for a value that is wrong by itself."""
    options = [option for _, section, _ in sections_of(RunConfig) for option in options_of(section)]
    for option in options:
        if option.required and getattr(args, option.flag) is None:
            raise ConfigurationError(f"{flag(option.flag)} is missing: give it as a flag or in the launch file")
    if args.num_layers_per_virtual_pipeline_stage is not None and args.num_layers_per_virtual_pipeline_stage <= 0:
        raise ConfigurationError(
            f"--num-layers-per-virtual-pipeline-stage {args.num_layers_per_virtual_pipeline_stage} must be positive"
        )
    for option in options:
        value = getattr(args, option.flag)
        words = out_of_range(option, value)
        if words:
            raise ConfigurationError(f"{flag(option.flag)} {value} {words}")


def _resolve_launch(args: argparse.Namespace) -> None:
    args.on_cpu = args.cpu or not (args.elsewhere or torch.cuda.is_available())
    args.run_name = args.run_name or (Path(args.config).stem if args.config else "ppo")
    has_engine = args.elsewhere or importlib.util.find_spec("transformer_engine") is not None
    args.transformer_impl = args.transformer_impl or (
        "transformer_engine" if has_engine and not args.on_cpu else "local"
    )
    args.lr_decay_iters = args.lr_decay_iters or args.train_iters


def _resolve_layers(args: argparse.Namespace) -> None:
    args.ffn_hidden_size = args.ffn_hidden_size or 4 * args.hidden_size
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    if not args.group_query_attention:
        args.num_query_groups = args.num_attention_heads
    if args.kv_channels is None:
        require_multiple("hidden_size", args.hidden_size, "num_attention_heads", args.num_attention_heads)
        args.kv_channels = args.hidden_size // args.num_attention_heads


def _resolve_stages(args: argparse.Namespace) -> None:
    """Model chunks of a pipeline stage, from the layers of a chunk."""
    chunk, pp = args.num_layers_per_virtual_pipeline_stage, args.pipeline_model_parallel_size
    args.virtual_pipeline_model_parallel_size = None
    if chunk is None:
        return
    if pp == 1:
        raise ConfigurationError(
            f"--num-layers-per-virtual-pipeline-stage {chunk} needs --pipeline-model-parallel-size above 1"
        )
    name = "num_layers_per_virtual_pipeline_stage"
    require_multiple("num_layers", args.num_layers, name, chunk, factor=pp)
    chunks = args.num_layers // pp // chunk
    # One chunk a stage is the plain schedule.
    args.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None


def _resolve_optional(args: argparse.Namespace, section: type, switch: str) -> None:
    """Without the flag that brings a section none of its others may be given; with it they have their defaults."""
    is_there = bool(getattr(args, switch))
    for option in options_of(section):
        value = getattr(args, option.flag)
        if not is_there and value is not None and option.flag != switch:
            words = flag(option.flag) if value is True else f"{flag(option.flag)} {value}"
            raise ConfigurationError(f"{words} does nothing without {flag(switch)}: give both, or neither")
        if is_there and value is None:
            setattr(args, option.flag, option.default)


def _resolve_experts(args: argparse.Namespace) -> None:
    _resolve_optional(args, ExpertSection, "num_experts")
    if args.num_experts is not None:
        args.moe_ffn_hidden_size = args.moe_ffn_hidden_size or args.ffn_hidden_size


def _single(args: argparse.Namespace, name: str) -> Any:
    """A given value; of some flags a list of one word stands for the word."""
    value = getattr(args, name)
    return value[0] if passed_through()[name].single and len(value) == 1 else value


def _resolve_packing(args: argparse.Namespace) -> None:
    size = args.rl_sequence_packing_bin_size
    if size is not None and not args.rl_use_sequence_packing:
        raise ConfigurationError(
            f"--rl-sequence-packing-bin-size {size} does nothing without --rl-use-sequence-packing: give both, or "
            "neither"
        )
    args.rl_sequence_packing_bin_size = size or args.micro_batch_size * args.seq_length


def _resolve_correction(
    args: argparse.Namespace, experts: ExpertSection | None
) -> tuple[RolloutCorrectionConfig, PolicyLossConfig]:
    auxiliary = experts is not None and experts.has_auxiliary_losses
    try:
        correction = rollout_correction_config_from_args(args.command_line, args.launch_file)
        _resolve_coefficients(args, correction)
        objective = policy_loss_config_from_args(args)
        if correction.bypass_mode and objective.algorithm not in (None, correction.loss_type):
            raise ConfigurationError(
                f"--policy-loss {objective.algorithm} contradicts {correction.loss_type}, the objective in bypass "
                f"mode: give --loss-type {objective.algorithm} instead"
            )
        return correction, resolve_objective(correction, objective, has_auxiliary_losses=auxiliary)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def _resolve_coefficients(args: argparse.Namespace, correction: RolloutCorrectionConfig) -> None:
    """Weights of the penalties that were not given: Megatron-LM's, or 0 where there can be none.

    Batch normalisation inside the loss scales all gradients by one factor when they are done, penalties' among them.
    """
    excluded = correction.rollout_is_batch_normalize and correction.corrects_in_loss
    for name, default in PENALTIES.items():
        if getattr(args, name) is not None:
            continue
        setattr(args, name, 0.0 if excluded else default)
        if excluded and default:
            _log.warning(
                "%s is 0, not %s: --rollout-is-batch-normalize inside the loss excludes it", flag(name), default
            )
