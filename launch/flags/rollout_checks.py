"""Where rollouts come from, and which engines can serve them; see ``validation.py``."""

from __future__ import annotations

import argparse

from megatron_rc.launch.engines.factory import SERVERS
from megatron_rc.launch.errors import ConfigurationError, flag, require
from megatron_rc.launch.rollouts.recorded import find_rollouts
from megatron_rc.launch.weights import find_family


def check_architecture(args: argparse.Namespace, engine: bool) -> None:
    """Which architecture the rollout engine has for this model, in ``model_family``; None: none."""
    family = find_family(args)
    args.model_family = family.name if family else None
    engine = engine or args.load_hf is not None
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


def check_staleness(args: argparse.Namespace, sampled: bool) -> None:
    """How old rollouts may be, in optimizer steps; fills in ``knows_versions``.

    Args:
        args: the flags.
        sampled: this run's engine samples. What another run or program wrote counts its own steps, unless the user says
            otherwise.
    """
    given, steps = args.rollout_staleness, args.updates_per_rollout
    args.knows_versions = sampled or given is not None
    if sampled and given and given % steps:
        raise ConfigurationError(
            f"--rollout-staleness {given} counts optimizer steps, of which each rollout batch makes {steps}: give a "
            f"multiple of {steps}, that is {steps} for every rollout batch that may be sampled ahead"
        )


def check_versions_known(args: argparse.Namespace) -> None:
    """What looks at versions needs them, and bounds by staleness rollouts that are that old; after the correction."""
    scale, given = args.correction.staleness_scale, args.correction.rollout_staleness_scale
    looking = [f"--rollout-staleness-scale {given}"] * (scale is not None)
    looking += ["--proximal-interpolation"] * args.correction.proximal_interpolation
    if looking and not args.knows_versions:
        raise ConfigurationError(
            f"{looking[0]} needs rollouts whose versions are steps of this run: say so with --rollout-staleness K, or "
            "drop it"
        )
    if scale is None:
        return
    oldest = args.rollout_staleness or 0
    if scale.steps[-1] > oldest:
        raise ConfigurationError(
            f"--rollout-staleness-scale {given} has bounds for a staleness of {scale.steps[-1]}, --rollout-staleness "
            f"allows {oldest}: raise that, or drop these bounds"
        )


def check_rollout_engine(args: argparse.Namespace) -> None:
    """The engine, its servers and its folder."""
    engine, is_server = args.rollout_engine, args.rollout_engine in SERVERS
    if engine == "vllm":
        require("vllm", "--rollout-engine vllm", "vllm")
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
