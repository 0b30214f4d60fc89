"""Which combinations of flags work: checked in one process, before any process group is made.

Everything here depends on the flags, the files they name and the number of processes alone, so every rank comes to the
same verdict.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from pathlib import Path

import torch

from megatron_rc.arguments import policy_loss_config_from_args, rollout_correction_config_from_args
from megatron_rc.correction import resolve_objective
from megatron_rc.launch.batches import bin_unit
from megatron_rc.launch.engines.choice import SERVERS
from megatron_rc.launch.errors import ConfigurationError, require
from megatron_rc.launch.recorded import find_rollouts
from megatron_rc.launch.tasks import Task, make_task
from megatron_rc.launch.weights import find_family

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
    *("rollout_concurrency", "rollout_timeout", "rollout_attempts"),
)
_NOT_NEGATIVE = (
    *("min_lr", "lr_warmup_iters", "weight_decay", "clip_grad", "sgd_momentum", "seed"),
    *("moe_aux_loss_coeff", "moe_z_loss_coeff"),
)
# Megatron-LM's, for a mixture of experts. None: what it follows from, or that there is none.
_EXPERT_DEFAULTS = {
    "moe_ffn_hidden_size": None,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "moe_token_dispatcher_type": "allgather",
}


def validate_args(args: argparse.Namespace, world_size: int, *, engine: bool = True) -> Task:
    """Check the flags, fill in what follows from them, and make the task.

    Args:
        args: as ``parse_args`` gives them; written to.
        world_size: number of processes.
        engine: the default rollout engine serves this model, so it must know the architecture; False where rollouts
            come from elsewhere.

    Derived fields: ``data_parallel_size``, ``updates_per_rollout``, ``on_cpu``,
    ``virtual_pipeline_model_parallel_size``, ``correction`` (RolloutCorrectionConfig), ``loss`` (PolicyLossConfig), and
    every default that depends on another flag.

    Raises:
        ConfigurationError: one sentence: the flag, its value and the remedy.
    """
    for module in ("megatron.core", "transformers", "tokenizers", "tensorboard", "matplotlib", "tqdm"):
        require(module, "training", "launch")
    _check_numbers(args)
    _fill_defaults(args)
    _check_parallelism(args, world_size)
    _check_model(args)
    _check_experts(args)
    _check_engine(args, engine and not args.load_rollouts)
    _check_batches(args)
    _check_rollouts(args)
    _check_rollout_engine(args)
    _check_optimizer(args)
    _check_environment(args)
    try:
        args.correction = rollout_correction_config_from_args(args)
        objective = policy_loss_config_from_args(args)
        args.loss = resolve_objective(args.correction, objective, has_auxiliary_losses=_has_auxiliary_losses(args))
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    task = _check_task(args)
    _check_folders(args)
    return task


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_numbers(args: argparse.Namespace) -> None:
    for name in _REQUIRED:
        if getattr(args, name) is None:
            raise ConfigurationError(f"{_flag(name)} is missing: give it as a flag or in the launch file")
    for name in _POSITIVE:
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigurationError(f"{_flag(name)} {value} must be positive")
    for name in _NOT_NEGATIVE:
        value = getattr(args, name)
        if value is not None and not 0 <= value < float("inf"):
            raise ConfigurationError(f"{_flag(name)} {value} must be 0 or more")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(args, name) < 1:
            raise ConfigurationError(f"{_flag(name)} {getattr(args, name)} must lie in [0, 1)")


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
                    f"{_flag(name)} {getattr(args, name)} does nothing without --num-experts: give both, or neither"
                )
        return
    for name, default in {**_EXPERT_DEFAULTS, "moe_ffn_hidden_size": args.ffn_hidden_size}.items():
        if getattr(args, name) is None:
            setattr(args, name, default)


def _divides(args: argparse.Namespace, what: str, by: str, *, factor: int = 1) -> None:
    value, divisor = getattr(args, what), getattr(args, by) * factor
    if value % divisor:
        times = f"{factor} · " if factor > 1 else ""
        raise ConfigurationError(f"{_flag(what)} {value} must be a multiple of {times}{_flag(by)} = {divisor}")


def _check_parallelism(args: argparse.Namespace, world_size: int) -> None:
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    cp = args.context_parallel_size
    model = tp * pp * cp
    layout = f"--tensor-model-parallel-size {tp} · --pipeline-model-parallel-size {pp} · --context-parallel-size {cp}"
    if world_size < model:
        raise ConfigurationError(f"{layout} needs {model} processes, got {world_size}: start more, or split less")
    if world_size % model:
        raise ConfigurationError(f"{layout} = {model} does not divide {world_size} processes: start a multiple of it")
    args.data_parallel_size = world_size // model
    args.virtual_pipeline_model_parallel_size = None
    _divides(args, "num_layers", "pipeline_model_parallel_size")
    chunk = args.num_layers_per_virtual_pipeline_stage
    if chunk is not None:
        if pp == 1:
            raise ConfigurationError(
                f"--num-layers-per-virtual-pipeline-stage {chunk} needs --pipeline-model-parallel-size above 1"
            )
        _divides(args, "num_layers", "num_layers_per_virtual_pipeline_stage", factor=pp)
        chunks = args.num_layers // pp // chunk
        # One chunk a stage is the plain schedule.
        args.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None
    if args.sequence_parallel and tp == 1:
        raise ConfigurationError("--sequence-parallel needs --tensor-model-parallel-size above 1: drop it")
    if args.sequence_parallel and args.seq_length // cp % tp:
        raise ConfigurationError(
            f"--sequence-parallel: --seq-length {args.seq_length} / --context-parallel-size {cp} must be a multiple of "
            f"--tensor-model-parallel-size {tp}"
        )
    if cp > 1:
        _divides(args, "seq_length", "context_parallel_size", factor=2)
    if args.use_distributed_optimizer and args.optimizer != "adam":
        raise ConfigurationError(
            f"--use-distributed-optimizer works with --optimizer adam only, got {args.optimizer}: drop one of them"
        )


def _check_model(args: argparse.Namespace) -> None:
    _divides(args, "num_attention_heads", "tensor_model_parallel_size")
    _divides(args, "num_query_groups", "tensor_model_parallel_size")
    _divides(args, "num_attention_heads", "num_query_groups")
    _divides(args, "ffn_hidden_size", "tensor_model_parallel_size")
    if args.kv_channels is None:
        _divides(args, "hidden_size", "num_attention_heads")
        args.kv_channels = args.hidden_size // args.num_attention_heads
    if args.position_embedding_type == "rope" and args.kv_channels % 2:
        raise ConfigurationError(f"rotary embeddings need an even head width, got {args.kv_channels}: --kv-channels")
    if args.seq_length > args.max_position_embeddings:
        raise ConfigurationError(
            f"--seq-length {args.seq_length} is longer than --max-position-embeddings {args.max_position_embeddings}"
        )
    for name in ("attention_dropout", "hidden_dropout"):
        if getattr(args, name) != 0:
            raise ConfigurationError(
                f"{_flag(name)} {getattr(args, name)} must be 0: π_old and π_θ would differ by noise"
            )
    if args.recompute_granularity == "full" and not (args.recompute_method and args.recompute_num_layers):
        raise ConfigurationError("--recompute-granularity full needs --recompute-method and --recompute-num-layers")
    if args.recompute_granularity != "full" and (args.recompute_method or args.recompute_num_layers):
        raise ConfigurationError(
            "--recompute-method and --recompute-num-layers do nothing without --recompute-granularity full"
        )


def _check_engine(args: argparse.Namespace, engine: bool) -> None:
    """Which architecture the rollout engine has for this model, in ``model_family``; None: none."""
    family = find_family(args) if args.num_experts is None else None
    args.model_family = family.name if family else None
    if not engine or family:
        return
    if args.num_experts is not None:
        raise ConfigurationError(
            f"--num-experts {args.num_experts}: the rollout engine has no architecture with experts; train on "
            "--load-rollouts, or give Trainer the rollouts of an engine of your own"
        )
    raise ConfigurationError(
        "no Hugging Face architecture has this combination of --normalization, --swiglu, "
        "--position-embedding-type, --disable-bias-linear and --group-query-attention: use RMSNorm with --swiglu, "
        "rope and --disable-bias-linear (Llama), or Megatron's defaults (GPT-2)"
    )


def _check_experts(args: argparse.Namespace) -> None:
    if args.num_experts is None:
        return
    _check_expert_parallelism(args)
    _check_router(args)
    if not args.on_cpu:
        # Megatron's router multiplies with it.
        require("transformer_engine", f"--num-experts {args.num_experts} on a GPU", "gpu")


def _check_expert_parallelism(args: argparse.Namespace) -> None:
    """Megatron splits every expert over the TP ranks, and spreads the experts over data and CP ranks."""
    ep, tp, experts = args.expert_model_parallel_size, args.tensor_model_parallel_size, args.num_experts
    _divides(args, "num_experts", "expert_model_parallel_size")
    _divides(args, "moe_ffn_hidden_size", "tensor_model_parallel_size")
    ranks = args.data_parallel_size * args.context_parallel_size
    if ranks % ep:
        raise ConfigurationError(
            f"--expert-model-parallel-size {ep} must divide the {ranks} data · context parallel ranks of each stage"
        )
    if tp > 1 and not args.sequence_parallel:
        raise ConfigurationError(
            f"--num-experts {experts} with --tensor-model-parallel-size {tp} needs --sequence-parallel: Megatron does "
            "not train experts without it"
        )
    if tp > 1 and not args.disable_bias_linear:
        raise ConfigurationError(
            f"--num-experts {experts} with --tensor-model-parallel-size {tp} needs --disable-bias-linear: Megatron has "
            "no bias in experts that are split"
        )
    uneven = args.rl_use_sequence_packing and args.data_parallel_size > 1
    if args.moe_token_dispatcher_type == "allgather" and ep > 1 and uneven:
        raise ConfigurationError(
            "--moe-token-dispatcher-type allgather needs equally many tokens on all data-parallel ranks, which "
            "--rl-use-sequence-packing does not give: use alltoall"
        )


def _check_router(args: argparse.Namespace) -> None:
    topk, experts = args.moe_router_topk, args.num_experts
    if not 2 <= topk <= experts:
        raise ConfigurationError(
            f"--moe-router-topk {topk} must lie in [2, {experts}]: the weight of a single expert would always be 1, "
            f"and there are --num-experts {experts}"
        )
    if args.moe_router_load_balancing_type == "none" and args.moe_aux_loss_coeff:
        raise ConfigurationError(
            f"--moe-aux-loss-coeff {args.moe_aux_loss_coeff} does nothing with --moe-router-load-balancing-type none: "
            "use aux_loss, or drop it"
        )
    shards = args.context_parallel_size * args.tensor_model_parallel_size
    if args.calculate_per_token_loss and _has_auxiliary_losses(args) and shards > 1 and _weakens_auxiliary_losses():
        raise ConfigurationError(
            f"--calculate-per-token-loss divides the experts' auxiliary losses by {shards}, the tensor · context "
            "parallel ranks, in megatron-core before 0.19: drop it, the gradients are otherwise the same"
        )


def _has_auxiliary_losses(args: argparse.Namespace) -> bool:
    return bool(args.moe_aux_loss_coeff or args.moe_z_loss_coeff)


def _weakens_auxiliary_losses() -> bool:
    """Whether Megatron's router scales them by its own share of the tokens where the gradients are divided by all."""
    from megatron.core.package_info import MAJOR, MINOR

    return (MAJOR, MINOR) < (0, 19)


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
    parallel = args.data_parallel_size * (1 if args.rl_use_sequence_packing else args.micro_batch_size)
    if args.rl_use_sequence_packing and args.global_batch_size % parallel:
        raise ConfigurationError(
            f"--global-batch-size {args.global_batch_size} must be a multiple of the {parallel} data-parallel ranks"
        )
    if args.global_batch_size % parallel:
        raise ConfigurationError(
            f"--global-batch-size {args.global_batch_size} must be a multiple of --micro-batch-size "
            f"{args.micro_batch_size} · {args.data_parallel_size} data-parallel ranks"
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


def _check_rollouts(args: argparse.Namespace) -> None:
    if not args.load_rollouts:
        return
    if args.save_rollouts:
        raise ConfigurationError(
            f"--save-rollouts {args.save_rollouts} would write again what --load-rollouts {args.load_rollouts} reads: "
            "drop one of them"
        )
    try:
        batches = len(find_rollouts(args.load_rollouts))
    except ValueError as error:
        raise ConfigurationError(f"--load-rollouts {error}") from error
    if batches * args.updates_per_rollout < args.train_iters:
        raise ConfigurationError(
            f"--load-rollouts {args.load_rollouts} holds {batches} rollout batches, which make "
            f"{batches * args.updates_per_rollout} optimizer steps: --train-iters {args.train_iters} is more"
        )


def _check_rollout_engine(args: argparse.Namespace) -> None:
    engine, is_server = args.rollout_engine, args.rollout_engine in SERVERS
    if engine == "vllm":
        require("vllm", "--rollout-engine vllm", "vllm")
        if args.rollout_dtype == "fp8-e4m3":
            raise ConfigurationError("--rollout-dtype fp8-e4m3 is not what --rollout-engine vllm takes: fp32 or bf16")
    if not is_server:
        for name in ("rollout_url", "rollout_model"):
            if getattr(args, name) is not None:
                raise ConfigurationError(
                    f"{_flag(name)} {getattr(args, name)} does nothing with --rollout-engine {engine}: name a server"
                )
        if args.rollout_weights_dir is not None and engine != "vllm":
            raise ConfigurationError(
                f"--rollout-weights-dir {args.rollout_weights_dir} does nothing with --rollout-engine {engine}: drop it"
            )
        return
    if args.rollout_model is not None and engine != "vllm-server":
        raise ConfigurationError(f"--rollout-model {args.rollout_model} is for --rollout-engine vllm-server: drop it")
    for name in ("rollout_url", "rollout_weights_dir"):
        if getattr(args, name) is None:
            raise ConfigurationError(f"--rollout-engine {engine} needs {_flag(name)}")
    urls = len(args.rollout_url.split(","))
    if urls != args.data_parallel_size:
        raise ConfigurationError(
            f"--rollout-url names {urls} servers for {args.data_parallel_size} data-parallel ranks: each needs one of "
            "its own, which gets its weights"
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


def _check_task(args: argparse.Namespace) -> Task:
    task = make_task(args.task, args.seed)
    args.max_response_length = args.max_response_length or task.max_response_length
    if args.max_response_length >= args.seq_length:
        raise ConfigurationError(
            f"--max-response-length {args.max_response_length} leaves no room for a prompt in --seq-length "
            f"{args.seq_length}"
        )
    room = args.seq_length - args.max_response_length
    for problem in task.problems(0, args.grpo_prompts_per_step):
        length = len(task.tokenizer.encode(problem.prompt).ids)
        if length > room:
            raise ConfigurationError(
                f"--seq-length {args.seq_length} is too short for --task {args.task}: a prompt of {length} tokens and "
                f"a response of up to {args.max_response_length} do not fit"
            )
    tokens = task.tokenizer.get_vocab_size()
    args.vocab_size = args.vocab_size or tokens
    if args.vocab_size < tokens:
        raise ConfigurationError(f"--vocab-size {args.vocab_size} is smaller than the tokenizer's {tokens} tokens")
    tp = args.tensor_model_parallel_size
    multiple = args.make_vocab_size_divisible_by * tp
    if args.padded_vocab_size is None:
        args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
    if args.padded_vocab_size % tp:
        raise ConfigurationError(
            f"--padded-vocab-size {args.padded_vocab_size} must be a multiple of --tensor-model-parallel-size {tp}"
        )
    if args.padded_vocab_size < args.vocab_size:
        raise ConfigurationError(
            f"--padded-vocab-size {args.padded_vocab_size} is smaller than the vocabulary of {args.vocab_size}"
        )
    return task


def _check_folders(args: argparse.Namespace) -> None:
    folders = [(f"--runs-dir {args.runs_dir}", Path(args.runs_dir) / args.run_name)]
    for name in ("save", "tensorboard_dir", "save_rollouts", "rollout_weights_dir"):
        if path := getattr(args, name):
            folders.append((f"{_flag(name)} {path}", Path(path)))
    for flag, folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ConfigurationError(
                f"{flag} cannot be written to ({error.strerror}): choose another folder"
            ) from error
    if args.load and not Path(args.load).is_dir() and args.load != args.save:
        raise ConfigurationError(f"--load {args.load}: no such folder")
