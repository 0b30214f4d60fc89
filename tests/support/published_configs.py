"""``config.json`` as publishers ship it, of every family, and the rotary entries that an export of it must have.

``config_files`` has one file a family. Sizes are small, and there is no padding token: the classes' own ones are beyond
the small vocabulary. All other entries are the publishers' own, from before transformers 5 except GLM-4.7-Flash's;
``qwen3-yarn`` is as Qwen's page says for long contexts. The expected entries are typed by hand from these files.
"""

import json

from tests.support.paths import ROOT

CONFIG_FILES = sorted((ROOT / "tests" / "support" / "config_files").glob("*.json"))
PUBLISHED = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in CONFIG_FILES}
_LLAMA3 = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
_YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
_QWENS_YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
_GPT_OSS_YARN = {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
_OLMOS = {"rope_type": "default", "rope_theta": 500000.0}
_ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def _plain(theta, **more):
    """Entries without scaling."""
    parameters = {"rope_type": "default", "rope_theta": theta} | more
    return {"rope_parameters": parameters, "rope_theta": theta, "rope_scaling": None} | more


# Entries in which readers of different ages differ; ``...``: the file must not have the entry.
WRITTEN = {
    "llama-2": _plain(10000.0) | {"partial_rotary_factor": ...},
    "llama-3.2": {
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0} | _LLAMA3,
        "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "llama3", "type": "llama3"} | _LLAMA3,
    },
    "mistral-v0.3": _plain(1000000.0) | {"sliding_window": None},
    "qwen2.5": _plain(1000000.0) | {"use_sliding_window": False},
    "qwen3": _plain(1000000.0) | {"head_dim": 16},
    "qwen3-moe": _plain(1000000.0) | {"num_experts": 8, "num_local_experts": 8, "head_dim": 16},
    "qwen3-yarn": {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000000.0} | _QWENS_YARN,
        "rope_theta": 1000000.0,
        "rope_scaling": {"rope_type": "yarn", "type": "yarn"} | _QWENS_YARN,
    },
    "deepseek-coder": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 4.0},
        "rope_theta": 100000.0,
        "rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 4.0},
        "attention_bias": False,
    },
    "phi-4": _plain(250000.0, partial_rotary_factor=1.0) | {"sliding_window": None},
    "seed-oss": _plain(10000000.0) | {"attention_bias": True, "attention_out_bias": False, "head_dim": 16},
    "smollm3": _plain(5000000.0) | {"no_rope_layers": [1, 0]},
    "olmo-2": _plain(500000.0) | {"attention_bias": False},
    "olmo-3": {
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _OLMOS),
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 4096,
    },
    "glm-4-0414": _plain(10000.0, partial_rotary_factor=0.5) | {"attention_bias": True, "head_dim": 16},
    "qwen1.5-moe": _plain(1000000.0) | {"num_experts": 8, "qkv_bias": True, "decoder_sparse_step": 1},
    "mixtral": _plain(1000000.0) | {"num_local_experts": 4, "num_experts": ...},
    "deepseek-v3": {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0} | _YARN,
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "yarn", "type": "yarn"} | _YARN,
        "moe_layer_freq": 1,
    }
    | _ROUTER,
    "moonlight": _plain(50000.0) | _ROUTER | {"moe_layer_freq": 1},
    "glm-4.5": _plain(1000000.0, partial_rotary_factor=0.5) | _ROUTER,
    "glm-4.7-flash": _plain(1000000.0) | _ROUTER | {"moe_layer_freq": 1},
    "gpt-oss": {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0} | _GPT_OSS_YARN,
        "rope_theta": 150000.0,
        "rope_scaling": {"rope_type": "yarn", "type": "yarn"} | _GPT_OSS_YARN,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 20,
        "num_local_experts": 8,
        "quantization_config": ...,
    },
    "gpt2": {"rope_parameters": ..., "rope_theta": ..., "rope_scaling": ...},
}
