"""Checks of HybridModel and of its Mamba layers."""

from __future__ import annotations

import re

from megatron_rc.launch.errors import ConfigurationError, has_module
from megatron_rc.launch.flags.checks.refuse import refuse
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.megatron_fields import core_folder

_KERNELS = ("mamba_ssm", "causal_conv1d", "einops")


def check_hybrid(config: RunConfig) -> None:
    """Check that HybridModel is installed, and can do what the other flags ask for."""
    core, pattern, is_hybrid = core_folder(), config.model.hybrid_layer_pattern, config.model.is_hybrid
    mlps = ["E" if has_experts else "-" for has_experts in config.layers_with_experts]
    is_of_the_layers = pattern is None or re.fullmatch("".join(f"[M*]{mlp}" for mlp in mlps), pattern)
    wrong = {
        "{model} needs megatron-core 0.18 or newer, which needs Python 3.12; the one installed has no HybridModel: "
        "install such a version, or use --model gpt": (
            is_hybrid and (core is None or not (core / "models" / "hybrid").is_dir())
        ),
        "{model} does not go with {defer_embedding_wgrad_compute}, which GPTModel alone reads: drop one of them": (
            is_hybrid and config.megatron.given.get("defer_embedding_wgrad_compute")
        ),
        "{hybrid_layer_pattern} is the pattern of a HybridModel: give --model hybrid": pattern and not is_hybrid,
        "{hybrid_layer_pattern} must have two letters for each of the {layers} layers: M or *, then the layers' "
        "{mlps} by --moe-layer-freq": not is_of_the_layers,
    }
    refuse(config, wrong, layers=len(mlps), mlps="".join(mlps))
    given = [name for name in config.megatron.given if name.startswith("mamba_")]
    if config.has_mamba:
        _check_mamba(config)
    elif given:
        refuse(config, {f"{{{given[0]}}} is of Mamba layers: give a --hybrid-layer-pattern with M, or drop it": True})


def _check_mamba(config: RunConfig) -> None:
    """Check that the kernels of Mamba layers are installed, and that heads and groups can be divided over the ranks."""
    missing = [name for name in _KERNELS if not has_module(name)]
    if missing:
        raise ConfigurationError(
            f"--hybrid-layer-pattern with M needs {' and '.join(missing)}, which are kernels for CUDA: "
            "pip install --no-build-isolation mamba-ssm causal-conv1d"
        )
    given, parallel = config.megatron.given, config.parallel
    width, tp, cp = given.get("mamba_head_dim", 64), parallel.tensor_model_parallel_size, parallel.context_parallel_size
    heads = given.get("mamba_num_heads") or 2 * config.transformer.hidden_size // width
    groups = given.get("mamba_num_groups", 8)
    of_rank = groups // tp
    wrong = {
        "{hybrid_layer_pattern} has Mamba layers, whose state would go on from one packed sequence to the next: drop "
        "{rl_use_sequence_packing}": config.training.rl_use_sequence_packing,
        "{hybrid_layer_pattern} has Mamba layers, which do not go with {multi_latent_attention}: drop one of them": (
            config.latent
        ),
        "--mamba-head-dim {width} must divide twice {hidden_size}, or give --mamba-num-heads": (
            not given.get("mamba_num_heads") and 2 * config.transformer.hidden_size % width
        ),
        "--mamba-num-heads {heads} must be a multiple of --mamba-num-groups {groups} and of tensor · context parallel "
        "ranks": heads % groups or heads % (tp * cp),
        "--mamba-num-groups {groups} must be a multiple of {tensor_model_parallel_size}; a rank's groups must divide "
        "{context_parallel_size}, or be a multiple of it": groups % tp or (of_rank % cp and cp % of_rank),
    }
    refuse(config, wrong, width=width, heads=heads, groups=groups)
