"""What the ``config.json`` of a Hugging Face directory says of the model, as flags."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_rc.launch.errors import ConfigurationError

Flags = dict[str, str]


def read_architecture(folder: str | Path) -> Flags:
    """Flag names without dashes, and their values as they would be typed; ``true`` and ``false`` for switches.

    Raises:
        ConfigurationError: no such file, an architecture that is not known, or one with a feature that GPTModel would
            not reproduce.
    """
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigurationError(
            f"--load-hf {folder}: {path.name} cannot be read ({error}); give the directory of a Hugging Face model"
        ) from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in _READERS:
        raise ConfigurationError(
            f"--load-hf {folder}: model_type {kind!r} is not known; known are {', '.join(sorted(_READERS))}"
        )
    try:
        return _READERS[kind](config)
    except (KeyError, TypeError) as error:
        raise ConfigurationError(f"--load-hf {folder}: {path.name} lacks {error}") from error
    except _UnknownFeatureError as error:
        raise ConfigurationError(f"--load-hf {folder}: {error}; GPTModel would not compute the same") from error


class _UnknownFeatureError(Exception):
    """A setting under which our GPTModel would be another function."""


def _gated(kind: str) -> Callable[[Mapping[str, Any]], Flags]:
    """Llama and its descendants."""

    def read(config: Mapping[str, Any]) -> Flags:
        heads = config["num_attention_heads"]
        _must_be(config, "hidden_act", "silu")
        for name in ("use_sliding_window", "mlp_bias", *(("attention_bias",) if kind != "qwen2" else ())):
            _must_be(config, name, False, default=False)
        return {
            "num-layers": str(config["num_hidden_layers"]),
            "hidden-size": str(config["hidden_size"]),
            "ffn-hidden-size": str(config["intermediate_size"]),
            "num-attention-heads": str(heads),
            "group-query-attention": "true",
            "num-query-groups": str(config.get("num_key_value_heads") or heads),
            "kv-channels": str(config.get("head_dim") or config["hidden_size"] // heads),
            "max-position-embeddings": str(config["max_position_embeddings"]),
            "position-embedding-type": "rope",
            "rotary-base": str(_rotary_base(config)),
            "normalization": "RMSNorm",
            "norm-epsilon": str(config["rms_norm_eps"]),
            "swiglu": "true",
            "disable-bias-linear": "true",
            "add-qkv-bias": "true" if kind == "qwen2" else "false",
            "qk-layernorm": "true" if kind == "qwen3" else "false",
            "untie-embeddings-and-output-weights": "false" if config.get("tie_word_embeddings") else "true",
            "vocab-size": str(config["vocab_size"]),
        }

    return read


def _mixtral(config: Mapping[str, Any]) -> Flags:
    _must_be(config, "sliding_window", None)
    _must_be(config, "router_jitter_noise", 0.0, default=0.0)
    return _gated("mixtral")(config) | _experts(config, config["intermediate_size"], normalised=True)


def _qwen3_moe(config: Mapping[str, Any]) -> Flags:
    # Layers without experts, by period or by list.
    _must_be(config, "decoder_sparse_step", 1, default=1)
    if config.get("mlp_only_layers"):
        _must_be(config, "mlp_only_layers", [])
    normalised = config.get("norm_topk_prob", False)
    return _gated("qwen3")(config) | _experts(config, config["moe_intermediate_size"], normalised)


def _experts(config: Mapping[str, Any], width: int, normalised: bool) -> Flags:
    experts = config["num_local_experts"] if "num_local_experts" in config else config["num_experts"]
    return {
        "num-experts": str(experts),
        "moe-ffn-hidden-size": str(width),
        "moe-router-topk": str(config["num_experts_per_tok"]),
        "moe-router-pre-softmax": "false" if normalised else "true",
    }


def _gpt2(config: Mapping[str, Any]) -> Flags:
    _must_be(config, "activation_function", "gelu", default="gelu_new")
    _must_be(config, "scale_attn_weights", True, default=True)
    _must_be(config, "scale_attn_by_inverse_layer_idx", False, default=False)
    return {
        "group-query-attention": "false",
        "kv-channels": str(config["n_embd"] // config["n_head"]),
        "position-embedding-type": "learned_absolute",
        "normalization": "LayerNorm",
        "swiglu": "false",
        "add-qkv-bias": "false",
        "qk-layernorm": "false",
        "num-layers": str(config["n_layer"]),
        "hidden-size": str(config["n_embd"]),
        "ffn-hidden-size": str(config.get("n_inner") or 4 * config["n_embd"]),
        "num-attention-heads": str(config["n_head"]),
        "max-position-embeddings": str(config["n_positions"]),
        "norm-epsilon": str(config["layer_norm_epsilon"]),
        "untie-embeddings-and-output-weights": "false" if config.get("tie_word_embeddings", True) else "true",
        "vocab-size": str(config["vocab_size"]),
    }


def _rotary_base(config: Mapping[str, Any]) -> int:
    """Written by transformers 5 as ``rope_parameters``, before as ``rope_theta`` and ``rope_scaling``."""
    parameters = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    scaling = config.get("rope_scaling") or parameters
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise _UnknownFeatureError(f"rotary embeddings of type {kind!r}")
    base = float(parameters["rope_theta"])
    if base != int(base):
        raise _UnknownFeatureError(f"rope_theta {base} is no whole number")
    return int(base)


def _must_be(config: Mapping[str, Any], name: str, value: Any, default: Any = None) -> None:
    found = config.get(name, default)
    if found != value:
        raise _UnknownFeatureError(f"{name} is {found!r}, not {value!r}")


_READERS: dict[str, Callable[[Mapping[str, Any]], Flags]] = {
    "llama": _gated("llama"),
    "qwen2": _gated("qwen2"),
    "qwen3": _gated("qwen3"),
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt2": _gpt2,
}
