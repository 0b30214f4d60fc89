"""Which combinations of flags work: checked in one process, before any process group is made.

Everything here depends on the flags, the files they name and the number of processes alone, so every rank comes to the
same verdict.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import tempfile
from pathlib import Path

import torch

from megatron_rc.correction.objective import resolve_objective
from megatron_rc.launch.errors import ConfigurationError, flag, require
from megatron_rc.launch.flags.model_checks import (
    asks_for_auxiliary_losses,
    check_experts,
    check_model,
    check_parallelism,
)
from megatron_rc.launch.flags.rollout_checks import (
    check_architecture,
    check_rollout_engine,
    check_rollouts,
    check_staleness,
    check_versions_known,
)
from megatron_rc.launch.flags.task_checks import check_task
from megatron_rc.launch.tasks import Task
from megatron_rc.launch.training.micro_batches import bin_unit
from megatron_rc.launch.weights.bridge import check_bridge
from megatron_rc.settings.flags import policy_loss_config_from_args, rollout_correction_config_from_args

_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "train_iters", "global_batch_size", "lr")
_POSITIVE = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "num_experts", "moe_ffn_hidden_size", "moe_router_topk"),
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "num_query_groups"),
    *("num_layers_per_virtual_pipeline_stage", "distributed_timeout_minutes", "recompute_num_layers"),
    *("seq_length", "max_position_embeddings", "rotary_base", "vocab_size", "make_vocab_size_divisible_by"),
    *("micro_batch_size", "global_batch_size", "train_iters", "lr", "lr_decay_iters", "save_interval", "log_interval"),
    *("max_response_length", "grpo_prompts_per_step", "grpo_group_size", "grpo_iterations", "rl_default_temperature"),
    *("padded_vocab_size", "norm_epsilon", "init_method_std", "adam_eps", "rl_sequence_packing_bin_size"),
    *("rollout_concurrency", "rollout_timeout", "rollout_attempts", "rollout_check_tolerance"),
    *("eval_interval", "eval_problems"),
)
_NOT_NEGATIVE = (
    *("min_lr", "lr_warmup_iters", "weight_decay", "clip_grad", "sgd_momentum", "seed"),
    *("moe_aux_loss_coeff", "moe_z_loss_coeff", "rollout_staleness"),
)
# Megatron-LM's.
_COEFFICIENTS = {"grpo_kl_beta": 0.001, "grpo_entropy_term_weight": 0.0}
# Megatron-LM's, for a mixture of experts. None: what it follows from, or that there is none.
_EXPERT_DEFAULTS = {
    "moe_ffn_hidden_size": None,
    "moe_router_topk": 2,
    "moe_router_pre_softmax": False,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "moe_token_dispatcher_type": "allgather",
}


_log = logging.getLogger("megatron_rc")


def validate_args(args: argparse.Namespace, world_size: int, *, engine: bool = True) -> Task:
    """Check the flags, fill in what follows from them, and make the task.

    Args:
        args: as ``parse_args`` gives them; written to.
        world_size: number of processes.
        engine: the default rollout engine serves this model, so it must know the architecture; False where rollouts
            come from elsewhere.

    Derived fields: ``data_parallel_size``, ``updates_per_rollout``, ``on_cpu``, ``knows_versions`` (the versions of the
    rollouts are steps of this run),
    ``virtual_pipeline_model_parallel_size``, ``correction`` (RolloutCorrectionConfig), ``loss`` (PolicyLossConfig), and
    every default that depends on another flag.

    Raises:
        ConfigurationError: one sentence: the flag, its value and the remedy.
    """
    for module in ("megatron.core", "transformers", "tokenizers", "tensorboard", "matplotlib", "tqdm"):
        require(module, "training", "launch")
    _check_numbers(args)
    _fill_defaults(args)
    check_parallelism(args, world_size)
    check_model(args)
    check_experts(args)
    check_architecture(args, engine and not args.load_rollouts)
    _check_batches(args)
    check_rollouts(args)
    check_staleness(args, engine and not args.load_rollouts)
    check_rollout_engine(args)
    _check_optimizer(args)
    _check_environment(args)
    check_bridge(args, engine and not args.load_rollouts)
    try:
        args.correction = rollout_correction_config_from_args(args.command_line, args.launch_file)
        _fill_coefficients(args)
        objective = policy_loss_config_from_args(args)
        args.loss = resolve_objective(args.correction, objective, has_auxiliary_losses=asks_for_auxiliary_losses(args))
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    check_versions_known(args)
    task = check_task(args)
    _check_folders(args)
    return task


def _check_numbers(args: argparse.Namespace) -> None:
    for name in _REQUIRED:
        if getattr(args, name) is None:
            raise ConfigurationError(f"{flag(name)} is missing: give it as a flag or in the launch file")
    for name in _POSITIVE:
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigurationError(f"{flag(name)} {value} must be positive")
    for name in _NOT_NEGATIVE:
        value = getattr(args, name)
        if value is not None and not 0 <= value < float("inf"):
            raise ConfigurationError(f"{flag(name)} {value} must be 0 or more")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(args, name) < 1:
            raise ConfigurationError(f"{flag(name)} {getattr(args, name)} must lie in [0, 1)")


def _fill_defaults(args: argparse.Namespace) -> None:
    args.on_cpu = args.cpu or not torch.cuda.is_available()
    args.ffn_hidden_size = args.ffn_hidden_size or 4 * args.hidden_size
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    args.lr_decay_iters = args.lr_decay_iters or args.train_iters
    args.run_name = args.run_name or (Path(args.config).stem if args.config else "ppo")
    has_te = importlib.util.find_spec("transformer_engine") is not None
    args.transformer_impl = args.transformer_impl or ("transformer_engine" if has_te and not args.on_cpu else "local")
    if args.group_query_attention is False:
        args.num_query_groups = args.num_attention_heads
    _fill_expert_defaults(args)


def _fill_expert_defaults(args: argparse.Namespace) -> None:
    if args.num_experts is None:
        for name, nothing in {**dict.fromkeys(_EXPERT_DEFAULTS), "expert_model_parallel_size": 1}.items():
            if getattr(args, name) != nothing:
                raise ConfigurationError(
                    f"{flag(name)} {getattr(args, name)} does nothing without --num-experts: give both, or neither"
                )
        return
    for name, default in {**_EXPERT_DEFAULTS, "moe_ffn_hidden_size": args.ffn_hidden_size}.items():
        if getattr(args, name) is None:
            setattr(args, name, default)


def _fill_coefficients(args: argparse.Namespace) -> None:
    """Weights of the penalties that were not given: Megatron-LM's, or 0 where there can be none.

    Batch normalisation inside the loss scales all gradients by one factor when they are done, penalties' among them.
    """
    correction = args.correction
    excluded = correction.rollout_is_batch_normalize and correction.corrects_in_loss
    for name, default in _COEFFICIENTS.items():
        if getattr(args, name) is not None:
            continue
        setattr(args, name, 0.0 if excluded else default)
        if excluded and default:
            _log.warning(
                "%s is 0, not %s: --rollout-is-batch-normalize inside the loss excludes it", flag(name), default
            )


def _check_batches(args: argparse.Namespace) -> None:
    rollouts = args.grpo_prompts_per_step * args.grpo_group_size
    if args.grpo_prompts_per_step % args.data_parallel_size:
        raise ConfigurationError(
            f"--grpo-prompts-per-step {args.grpo_prompts_per_step} must be a multiple of the {args.data_parallel_size} "
            "data-parallel ranks"
        )
    if rollouts % args.global_batch_size:
        raise ConfigurationError(
            f"--grpo-prompts-per-step {args.grpo_prompts_per_step} · --grpo-group-size {args.grpo_group_size} = "
            f"{rollouts} sequences do not split into batches of --global-batch-size {args.global_batch_size}"
        )
    tokens = args.global_batch_size * args.seq_length
    if args.calculate_per_token_loss and tokens >= 2**31:
        raise ConfigurationError(
            f"--calculate-per-token-loss counts the {tokens} tokens of --global-batch-size {args.global_batch_size} "
            f"sequences of --seq-length {args.seq_length} in 32 bits: drop it, the gradients are the same"
        )
    _check_packing(args)
    parallel, factor = args.data_parallel_size, ""
    if not args.rl_use_sequence_packing:
        parallel, factor = parallel * args.micro_batch_size, f"--micro-batch-size {args.micro_batch_size} · "
    if args.global_batch_size % parallel:
        raise ConfigurationError(
            f"--global-batch-size {args.global_batch_size} must be a multiple of {factor}{args.data_parallel_size} "
            "data-parallel ranks"
        )
    args.updates_per_rollout = rollouts // args.global_batch_size * args.grpo_iterations
    pp = args.pipeline_model_parallel_size
    micro_batches = args.global_batch_size // parallel
    if args.virtual_pipeline_model_parallel_size and micro_batches % pp and not args.rl_use_sequence_packing:
        raise ConfigurationError(
            f"virtual stages need a multiple of {pp} micro-batches (--pipeline-model-parallel-size), got "
            f"{micro_batches}: change --global-batch-size or --micro-batch-size"
        )
    if args.save_interval and args.save_interval % args.updates_per_rollout:
        raise ConfigurationError(
            f"--save-interval {args.save_interval} must be a multiple of the {args.updates_per_rollout} optimizer "
            "steps of a rollout batch, so that a resumed run takes the same steps"
        )


def _check_packing(args: argparse.Namespace) -> None:
    size = args.rl_sequence_packing_bin_size
    if not args.rl_use_sequence_packing:
        if size is not None:
            raise ConfigurationError(
                f"--rl-sequence-packing-bin-size {size} does nothing without --rl-use-sequence-packing: give both, or "
                "neither"
            )
        return
    args.rl_sequence_packing_bin_size = size = size or args.micro_batch_size * args.seq_length
    if size < args.seq_length:
        raise ConfigurationError(
            f"--rl-sequence-packing-bin-size {size} must hold a whole sequence of --seq-length {args.seq_length}"
        )
    if size % bin_unit(args):
        raise ConfigurationError(
            f"--rl-sequence-packing-bin-size {size} must be a multiple of {bin_unit(args)}, for context and sequence "
            "parallelism"
        )


def _check_optimizer(args: argparse.Namespace) -> None:
    if args.min_lr > args.lr:
        raise ConfigurationError(f"--min-lr {args.min_lr} is above --lr {args.lr}")
    if args.lr_warmup_iters >= args.lr_decay_iters:
        raise ConfigurationError(
            f"--lr-warmup-iters {args.lr_warmup_iters} must be below --lr-decay-iters {args.lr_decay_iters}"
        )
    if args.save_interval and not args.save:
        raise ConfigurationError(f"--save-interval {args.save_interval} does nothing without --save DIR")
    if (args.finetune or args.no_load_optim) and not args.load:
        raise ConfigurationError("--finetune and --no-load-optim do nothing without --load DIR")
    if args.no_save_optim and not args.save:
        raise ConfigurationError("--no-save-optim does nothing without --save DIR")


def _check_environment(args: argparse.Namespace) -> None:
    if args.transformer_impl == "transformer_engine":
        if args.on_cpu:
            raise ConfigurationError("--transformer-impl transformer_engine needs a CUDA device: use local on the CPU")
        require("transformer_engine", "--transformer-impl transformer_engine", "gpu")
    if args.wandb_exp_name and not args.wandb_project:
        raise ConfigurationError("--wandb-exp-name does nothing without --wandb-project")
    if args.wandb_project:
        require("wandb", "--wandb-project", "wandb")


def _check_folders(args: argparse.Namespace) -> None:
    folders = [(f"--runs-dir {args.runs_dir}", Path(args.runs_dir) / args.run_name)]
    for name in ("save", "tensorboard_dir", "save_rollouts", "rollout_weights_dir"):
        if path := getattr(args, name):
            folders.append((f"{flag(name)} {path}", Path(path)))
    for given, folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ConfigurationError(
                f"{given} cannot be written to ({error.strerror}): choose another folder"
            ) from error
    if args.load and not Path(args.load).is_dir() and args.load != args.save:
        raise ConfigurationError(f"--load {args.load}: no such folder")
