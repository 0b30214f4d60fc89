"""Checks of the model's Hugging Face architecture, and of the converter of its weights."""

from __future__ import annotations

import logging

from megatron_rc.launch.errors import ConfigurationError, pip_install, require
from megatron_rc.launch.flags.checks.megatron import model_flags
from megatron_rc.launch.flags.checks.refuse import refuse
from megatron_rc.launch.run_config import RunConfig, flag_options
from megatron_rc.launch.weights.architecture import read_architecture
from megatron_rc.launch.weights.converter import MBRIDGE
from megatron_rc.launch.weights.families import FAMILIES, find_family
from megatron_rc.launch.weights.family import check_transformers

NO_BRIDGE = "none"
_FOREIGN = "drop it, or train from --load-rollouts without --load-hf and --save-hf"
# Settings of a directory that do not change the function of the model.
_NAMES_ALONE = ("hf-model-type", "max-position-embeddings", "sliding-window")
_log = logging.getLogger("megatron_rc")


def check_architecture(config: RunConfig, samples: bool) -> None:
    """Check that engines and Hugging Face directories have an architecture for this model, if they get its weights."""
    family, unknown = find_family(config), model_flags(config)
    fitting = [family.name for family in FAMILIES.values() if family.matches(config)]
    remedy = f"use {' or '.join(fitting)}" if fitting else "drop it"
    unfit = "{hf_model_type} does not fit the flags of this model: {remedy}"
    refuse(config, {unfit: config.model.hf_model_type and not family}, remedy=remedy)
    if not _converts(config, samples):
        return
    check_transformers()
    etp, parallel = config.expert_tensor_parallel_size, config.parallel
    # The first rank of each replica, which has the engine, must be the first of its expert tensor-parallel group.
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    wrong = {
        f"{{found[0]}} is in no Hugging Face architecture here, so no engine can have this model: {_FOREIGN}": unknown,
        "{expert_tensor_parallel_size} must divide the {ranks} tensor · context parallel ranks of a replica, because "
        "its first rank gathers the experts for engines and Hugging Face's files: give such a size": (
            config.experts and config.data_parallel_size > 1 and ranks % etp
        ),
        "{moe_grouped_gemm} needs --transformer-impl transformer_engine, whose experts have a parameter each: use it, "
        "or drop the grouped products": config.experts and _has_legacy_experts(config),
        "no Hugging Face architecture here has this combination of --normalization, --swiglu, "
        "--position-embedding-type, --rotary-percent, --disable-bias-linear, --add-qkv-bias, --qk-layernorm, "
        "--group-query-attention, --multi-latent-attention, --num-experts and the experts' router: use the flags of "
        "Llama (RMSNorm, --swiglu, rope, --disable-bias-linear), GPT-2 (Megatron's defaults) or another row of "
        "docs/models.md": family is None,
    }
    refuse(config, wrong, ranks=ranks)


def _has_legacy_experts(config: RunConfig) -> bool:
    """Whether Megatron keeps all experts of a rank in one parameter, which the tables of weights do not know."""
    grouped = config.megatron.given.get("moe_grouped_gemm")
    return bool(grouped) and config.model.transformer_impl != "transformer_engine"


def choose_bridge(config: RunConfig, samples: bool) -> RunConfig:
    """Fill in ``--weights-bridge``, with a line in the log on a GPU."""
    files = config.checkpoints
    if files.weights_bridge is not None:
        return config
    chosen = config.changed(checkpoints={"weights_bridge": MBRIDGE})
    words = "mbridge converts the weights; --weights-bridge none leaves that to this program's own tables"
    try:
        check_bridge(chosen, samples)
    except ConfigurationError as reason:
        chosen = config.changed(checkpoints={"weights_bridge": NO_BRIDGE})
        words = f"this program's own tables convert the weights: {reason}"
    if not config.launch.on_cpu and _converts(config, samples):
        _log.warning("%s", words)
    return chosen


def check_bridge(config: RunConfig, samples: bool) -> None:
    """Check that ``--weights-bridge`` can convert this model's weights, and has weights to convert."""
    if config.checkpoints.weights_bridge != MBRIDGE:
        return
    family, known = find_family(config), [other.name for other in FAMILIES.values() if other.in_bridge]
    tied = not config.model.untie_embeddings_and_output_weights
    foreign = {
        "{weights_bridge} needs --transformer-impl transformer_engine, got {impl}: use it ({install}), or drop the "
        "bridge": config.model.transformer_impl != "transformer_engine",
        "{weights_bridge} knows the names of GPTModel alone, got {model}: use --model gpt, or drop the bridge": (
            config.model.is_hybrid
        ),
        "{weights_bridge} collects all weights on one rank, with {rollout_weight_transfer} each stage sends its own: "
        "give --weights-bridge none": config.engine.rollout_weight_transfer != "files",
    }
    refuse(config, foreign, impl=config.model.transformer_impl, install=pip_install("gpu"))
    require("mbridge", f"--weights-bridge {MBRIDGE}", "bridge")
    wrong = {
        "{weights_bridge} does nothing without an engine, --load-hf or --save-hf: drop it": not _converts(
            config, samples
        ),
        "{weights_bridge} converts {known}, not {name}: drop it": family is None or not family.in_bridge,
        "{weights_bridge} needs an output layer on the last stage, which a tied Llama does not have: use "
        "--pipeline-model-parallel-size 1, or drop it": (
            family and family.name == "llama" and tied and config.parallel.pipeline_model_parallel_size > 1
        ),
    }
    refuse(config, wrong, known=", ".join(known), name=family and family.name)


def _converts(config: RunConfig, samples: bool) -> bool:
    files = config.checkpoints
    others = (config.reference.ref_load_hf, config.critic and config.critic.critic_load_hf)
    return bool(samples or files.load_hf or files.save_hf or any(others))


def check_reference(config: RunConfig) -> None:
    """Refuse a directory whose shapes or numbers make another function than the policy's."""
    folder = config.reference.ref_load_hf
    if not folder:
        return
    for name, word in read_architecture(folder, "--ref-load-hf").items():
        if name in _NAMES_ALONE or name not in flag_options():
            continue
        kind, value = flag_options()[name][1].kind, config.value_of(name)
        if kind is bool:
            value = bool(value)  # None if the section of the switch is absent
        words = (
            "{ref_load_hf} is a model with --{name} {word}, but the policy has {value}: the reference must have the "
        )
        differs = value != (word == "true" if kind is bool else kind(word))
        refuse(config, {words + "policy's architecture": differs}, name=name, word=word, value=value)
