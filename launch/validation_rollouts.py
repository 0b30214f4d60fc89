"""Where rollouts come from, and which engines can serve them; see ``validation.py``."""

from __future__ import annotations

import argparse

from megatron_rc.launch.engines.choice import SERVERS
from megatron_rc.launch.errors import ConfigurationError, flag, require
from megatron_rc.launch.recorded import find_rollouts
from megatron_rc.launch.weights import find_family


def check_architecture(args: argparse.Namespace, engine: bool) -> None:
    """Which architecture the rollout engine has for this model, in ``model_family``; None: none."""
    family = find_family(args)
    args.model_family = family.name if family else None
    if not engine or family:
        return
    raise ConfigurationError(
        "no Hugging Face architecture has this combination of --normalization, --swiglu, "
        "--position-embedding-type, --disable-bias-linear, --add-qkv-bias, --qk-layernorm, --group-query-attention, "
        "--num-experts and --moe-router-pre-softmax: use RMSNorm with --swiglu, rope and --disable-bias-linear (Llama; "
        "with --add-qkv-bias Qwen2, with --qk-layernorm Qwen3; with --num-experts Mixtral, with both of the latter "
        "Qwen3-MoE), or Megatron's defaults (GPT-2)"
    )


def check_rollouts(args: argparse.Namespace) -> None:
    """Rollouts that are read instead of sampled."""
    if not args.load_rollouts:
        return
    if args.save_rollouts:
        raise ConfigurationError(
            f"--save-rollouts {args.save_rollouts} would write again what --load-rollouts {args.load_rollouts} reads: "
            "drop one of them"
        )
    if args.rollout_engine != "transformers":
        raise ConfigurationError(
            f"--rollout-engine {args.rollout_engine} does nothing with --load-rollouts {args.load_rollouts}: drop one"
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


def check_rollout_engine(args: argparse.Namespace) -> None:
    """The engine, its servers and its folder."""
    engine, is_server = args.rollout_engine, args.rollout_engine in SERVERS
    if engine == "vllm":
        require("vllm", "--rollout-engine vllm", "vllm")
        if args.rollout_dtype == "fp8-e4m3":
            raise ConfigurationError("--rollout-dtype fp8-e4m3 is not what --rollout-engine vllm takes: fp32 or bf16")
    if not is_server:
        for name in ("rollout_url", "rollout_model"):
            if getattr(args, name) is not None:
                raise ConfigurationError(
                    f"{flag(name)} {getattr(args, name)} does nothing with --rollout-engine {engine}: name a server"
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
            raise ConfigurationError(f"--rollout-engine {engine} needs {flag(name)}")
    urls = len(args.rollout_url.split(","))
    if urls != args.data_parallel_size:
        raise ConfigurationError(
            f"--rollout-url names {urls} servers for {args.data_parallel_size} data-parallel ranks: each needs one of "
            "its own, which gets its weights"
        )
