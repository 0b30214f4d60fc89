"""Checks of the model's Hugging Face architecture, and of the converter of its weights."""

from __future__ import annotations

import logging
from collections.abc import Collection

from megatron_rc.launch.errors import ConfigurationError, flag, has_module, pip_install, require
from megatron_rc.launch.flags.checks.megatron import model_flags
from megatron_rc.launch.flags.command import NONE_IF_ABSENT, values_of_directory
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.options import as_typed
from megatron_rc.launch.weights.architecture import read_architecture
from megatron_rc.launch.weights.converter import MBRIDGE
from megatron_rc.launch.weights.families import FAMILIES, find_family
from megatron_rc.launch.weights.family import check_transformers
from megatron_rc.launch.weights.megatron_bridge import BRIDGE, is_bridged

NO_BRIDGE = "none"
_FOREIGN = "drop it, or train from --load-rollouts without --load-hf and --save-hf"
# Settings of another model's directory that may differ from the policy's.
_MAY_DIFFER = ("hf_model_type", "max_position_embeddings", "sliding_window")
_log = logging.getLogger("megatron_rc")


def check_architecture(config: RunConfig, samples: bool) -> None:
    """Check that engines and Hugging Face directories have an architecture for this model, if they get its weights."""
    if is_bridged(config):
        return
    family = find_family(config)
    if config.model.hf_model_type and not family:
        fitting_names = [candidate.name for candidate in FAMILIES.values() if candidate.matches(config)]
        remedy = f"use {' or '.join(fitting_names)}" if fitting_names else "drop it"
        raise ConfigurationError(f"{config.typed('hf_model_type')} does not fit the flags of this model: {remedy}")
    if not _converts(config, samples):
        return
    check_transformers()
    unknown = model_flags(config)
    if unknown:
        raise ConfigurationError(
            f"{unknown[0]} is in no Hugging Face architecture here, so no engine can have this model: {_FOREIGN}"
        )
    if config.experts:
        _check_experts(config)
    if family is not None and family.stacked_expert:
        _check_stacked_experts(config)
    if family is None:
        raise ConfigurationError(
            "no Hugging Face architecture here has this combination of --normalization, --swiglu, "
            "--position-embedding-type, --rotary-percent, --rotary-interleaved, --no-rope-freq, --layer-norms, "
            "--disable-bias-linear, --add-qkv-bias, --attention-output-bias, --qk-layernorm, --qk-norm-over, "
            "--softmax-type, --window-size, --quick-geglu, --glu-linear-offset, --activation-func-clamp-value, "
            "--group-query-attention, --multi-latent-attention, --num-experts and the experts' router: use the flags "
            "of Llama (RMSNorm, --swiglu, rope, --disable-bias-linear), GPT-2 (Megatron's defaults) or another row of "
            "docs/models.md"
        )


def _check_experts(config: RunConfig) -> None:
    """Check that the experts' weights can be gathered, and have a parameter each."""
    # The first rank of each replica, which has the engine, must be the first of its expert tensor-parallel group.
    ranks = config.parallel.tensor_model_parallel_size * config.parallel.context_parallel_size
    if config.data_parallel_size > 1 and ranks % config.expert_tensor_parallel_size:
        raise ConfigurationError(
            f"--expert-tensor-parallel-size {config.expert_tensor_parallel_size} must divide the {ranks} tensor · "
            "context parallel ranks of a replica, because its first rank gathers the experts for engines and Hugging "
            "Face's files: give such a size"
        )
    if config.megatron.given.get("moe_grouped_gemm") and config.model.transformer_impl != "transformer_engine":
        raise ConfigurationError(
            "--moe-grouped-gemm needs --transformer-impl transformer_engine, whose experts have a parameter each: use "
            "it, or drop the grouped products"
        )


def _check_stacked_experts(config: RunConfig) -> None:
    """Check that one rank sends whole stacks of experts."""
    ranks = config.parallel.expert_model_parallel_size
    if ranks > 1 and config.engine.rollout_weight_transfer != "files":
        raise ConfigurationError(
            f"{config.typed('rollout_weight_transfer', 'expert_model_parallel_size')}: engines read the experts of "
            "this model as one tensor, but each rank sends its own; use --rollout-weight-transfer files, or "
            "--expert-model-parallel-size 1"
        )


def choose_bridge(config: RunConfig, samples: bool) -> RunConfig:
    """Fill in ``--weights-bridge``, with a line in the log on a GPU."""
    if config.checkpoints.weights_bridge is not None:
        return config
    problem = _mbridge_problem(config, samples)
    if not problem and not has_module("mbridge"):
        problem = f"needs mbridge, which is not installed here: {pip_install('bridge')}"
    if not config.launch.on_cpu and _converts(config, samples):
        if problem:
            _log.warning(
                "this program's own tables convert the weights; --weights-bridge %s would be refused: it %s",
                MBRIDGE,
                problem,
            )
        else:
            _log.warning("mbridge converts the weights; --weights-bridge none leaves that to this program's own tables")
    return config.changed(checkpoints={"weights_bridge": NO_BRIDGE if problem else MBRIDGE})


def check_bridge(config: RunConfig, samples: bool) -> None:
    """Check that ``--weights-bridge`` can convert this model's weights, and has weights to convert."""
    problem = ""
    if is_bridged(config):
        problem = _megatron_bridge_problem(config)
    elif config.checkpoints.weights_bridge == MBRIDGE:
        problem = _mbridge_problem(config, samples)
    if problem:
        raise ConfigurationError(f"{config.typed('weights_bridge')} {problem}")
    if config.checkpoints.weights_bridge == MBRIDGE:
        require("mbridge", config.typed("weights_bridge"), "bridge")


def _mbridge_problem(config: RunConfig, samples: bool) -> str:
    """Return why mbridge, if it is installed, cannot convert this run's weights, with the remedy; empty: it can."""
    family = find_family(config)
    is_tied = not config.model.untie_embeddings_and_output_weights
    if config.model.transformer_impl != "transformer_engine":
        return (
            f"needs --transformer-impl transformer_engine, got {config.model.transformer_impl}: use it "
            f"({pip_install('gpu')}), or drop the bridge"
        )
    if config.model.is_hybrid:
        return "knows the names of GPTModel alone: use --model gpt, not hybrid, or drop the bridge"
    if config.engine.rollout_weight_transfer != "files":
        way = config.typed("rollout_weight_transfer")
        return f"collects all weights on one rank, with {way} each stage sends its own: give --weights-bridge none"
    if not _converts(config, samples):
        return "does nothing without an engine, --load-hf or --save-hf: drop it"
    if family is None or not family.in_bridge:
        convertible = ", ".join(candidate.name for candidate in FAMILIES.values() if candidate.in_bridge)
        return f"converts {convertible}, not {family and family.name}: drop it"
    if config.model.attention_output_bias or (family.name == "llama" and config.transformer.add_bias_linear):
        return "does not know the biases of the attention's output and of the MLP: drop it"
    if family.name == "llama" and is_tied and config.parallel.pipeline_model_parallel_size > 1:
        return (
            "needs an output layer on the last stage, which a tied Llama does not have: use "
            "--pipeline-model-parallel-size 1, or drop it"
        )
    return ""


def _megatron_bridge_problem(config: RunConfig) -> str:
    """Return why Megatron-Bridge cannot make the run's model, with the remedy; empty: it can.

    It makes the model of a directory that no table has, with Transformer Engine's layers.
    """
    folder = config.checkpoints.load_hf
    if folder is None or read_architecture(folder).get("weights-bridge") != BRIDGE:
        return "is for a --load-hf whose model_type no table here has: drop it"
    if config.model.transformer_impl != "transformer_engine":
        return "makes Transformer Engine's layers: drop --transformer-impl local"
    if config.model.is_hybrid:
        return "makes its own kind of model: drop --model hybrid"
    if config.critic is not None:
        return "makes no critic: use another --advantage-estimator than gae"
    if config.engine.rollout_weight_transfer != "files":
        way = config.typed("rollout_weight_transfer")
        return f"collects all weights on one rank, with {way} each stage sends its own: use files"
    if config.model.padded_vocab_size != config.model.vocab_size:
        tp = config.parallel.tensor_model_parallel_size
        return (
            f"converts no padded vocabulary: give a --tensor-model-parallel-size that divides the "
            f"{config.model.vocab_size} tokens, not {tp}"
        )
    return ""


def _converts(config: RunConfig, samples: bool) -> bool:
    files = config.checkpoints
    of_critic = config.critic and config.critic.critic_load_hf
    return bool(samples or files.load_hf or files.save_hf or config.reference.ref_load_hf or of_critic)


def check_other_models(config: RunConfig) -> None:
    """Refuse a reference policy's or critic's directory whose config.json describes another model than the policy's."""
    reference = config.reference.ref_load_hf
    if reference:
        _check_architecture_of(config, "--ref-load-hf", reference, _MAY_DIFFER)
    critic = config.critic and config.critic.critic_load_hf
    if critic:
        # The value head takes the place of the output layer.
        may_differ = (*_MAY_DIFFER, "untie_embeddings_and_output_weights")
        _check_architecture_of(config, "--critic-load-hf", critic, may_differ)


def _check_architecture_of(config: RunConfig, directory_flag: str, folder: str, may_differ: Collection[str]) -> None:
    """Refuse a directory whose architecture differs from the policy's in a setting that is not in ``may_differ``.

    Names of settings have underscores.
    """
    described = values_of_directory(folder, directory_flag)
    window = described.get("sliding_window")
    if window and config.training.seq_length > window:
        raise ConfigurationError(
            f"{directory_flag} {folder} is a model whose attention reaches {window} tokens, which is not limited here, "
            f"but {config.typed('seq_length')} is longer: use shorter sequences"
        )
    for name in dict.fromkeys([*described, *NONE_IF_ABSENT]):
        value = config.value_of(name.replace("_", "-"))
        other_value = described.get(name)
        # A switch of a section that the policy does not have is None, which means off.
        if name in may_differ or value == other_value or (value is None and other_value is False):
            continue
        other_model = f"without {flag(name)}" if other_value is None else f"with {as_typed(name, other_value)}"
        raise ConfigurationError(
            f"{directory_flag} {folder} is a model {other_model}, but the policy has {value}: give a model of the "
            "policy's architecture"
        )
