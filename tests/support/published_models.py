"""A tiny model of every architecture, with the special settings of published models."""

import copy
import json

import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_rc.launch.weights.named_weights import named_weights
from tests.support.recorded_training import COMMON

GATED = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 30,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SMALL_GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 30}
EXPERTS = {"num_experts_per_tok": 2, "head_dim": 16, "tie_word_embeddings": False}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7}
# YaRN as publishers ship it for plain attention, with each further parameter in one of two.
ATTENTION_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
ATTENTION_YARN |= {"beta_fast": 2.0, "beta_slow": 0.5, "attention_factor": 1.25, "truncate": False}
SCALED_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
SCALED_YARN |= {"mscale": 1.0, "mscale_all_dim": 0.5}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0}
HALF = GATED["rope_parameters"] | {"partial_rotary_factor": 0.5}
DEEPSEEK = GATED | {
    **{"num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4},
    **{"v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2},
    **{"moe_intermediate_size": 24, "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
    **{"rope_parameters": YARN, "num_nextn_predict_layers": 0},
}
# As Moonlight: queries without compression, frequencies without scaling, experts from all groups.
MOONLIGHT = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_parameters": GATED["rope_parameters"]}
GLM = GATED | {
    **{"head_dim": 16, "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 8, "num_experts_per_tok": 3},
    **{"moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
    **{"rope_parameters": HALF, "num_nextn_predict_layers": 0},
}
# As GLM-4.5-Air: queries and keys without norms.
AIR = {"use_qk_norm": False, "routed_scaling_factor": 1.0}
# GLM-4.7-Flash's file has both forms of the entry about the first layers.
FLASH = DEEPSEEK | {"rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1, "rope_parameters": GATED["rope_parameters"]}
FLASH |= {"mlp_layer_types": ["dense", *["sparse"] * 3]}
# gpt-oss's YaRN has no truncate, and its full and sliding layers alternate.
GPT_OSS = GATED | {"intermediate_size": 20, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
GPT_OSS |= {"rope_parameters": {key: ATTENTION_YARN[key] for key in ATTENTION_YARN if key != "attention_factor"}}
GPT_OSS |= {"sliding_window": 5}
MODELS = {
    "llama": transformers.LlamaConfig(**GATED, tie_word_embeddings=True),
    "llama-untied": transformers.LlamaConfig(**GATED, tie_word_embeddings=False, rms_norm_eps=1e-4),
    "llama3": transformers.LlamaConfig(
        **GATED | {"rope_parameters": LLAMA3, "max_position_embeddings": 131072}, head_dim=16, tie_word_embeddings=True
    ),
    "llama-biases": transformers.LlamaConfig(**GATED | {"rope_parameters": LINEAR}, attention_bias=True, mlp_bias=True),
    "llama-yarn": transformers.LlamaConfig(**GATED | {"rope_parameters": ATTENTION_YARN}, attention_bias=True),
    "llama-dynamic": transformers.LlamaConfig(**GATED | {"rope_parameters": DYNAMIC}),
    "mistral": transformers.MistralConfig(**GATED, head_dim=16, sliding_window=None),
    "qwen2": transformers.Qwen2Config(**GATED, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**GATED, head_dim=16, tie_word_embeddings=False),
    "qwen3-biases": transformers.Qwen3Config(
        **GATED | {"rope_parameters": SCALED_YARN}, head_dim=16, attention_bias=True
    ),
    "gpt2": transformers.GPT2Config(**SMALL_GPT2),
    "gpt2-untied": transformers.GPT2Config(**SMALL_GPT2, tie_word_embeddings=False),
    "gpt2-gelu": transformers.GPT2Config(**SMALL_GPT2, activation_function="gelu"),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **GATED, **EXPERTS, num_experts=4, moe_intermediate_size=24, norm_topk_prob=True
    ),
    "qwen3_moe-unnormalised": transformers.Qwen3MoeConfig(
        **GATED, **EXPERTS, num_experts=4, moe_intermediate_size=24, norm_topk_prob=False
    ),
    "qwen3_moe-dense_layers": transformers.Qwen3MoeConfig(
        **GATED, **EXPERTS, num_experts=4, moe_intermediate_size=24, norm_topk_prob=True, mlp_only_layers=[1]
    ),
    "qwen2_moe": transformers.Qwen2MoeConfig(
        **GATED,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        decoder_sparse_step=2,
    ),
    # Its class changes the dictionary that it is given.
    "phi3": transformers.Phi3Config(**copy.deepcopy(GATED), pad_token_id=None, sliding_window=48),
    "seed_oss": transformers.SeedOssConfig(
        **GATED, head_dim=16, pad_token_id=None, attention_dropout=0.0, residual_dropout=0.0
    ),
    "smollm3": transformers.SmolLM3Config(**GATED, pad_token_id=None, no_rope_layers=[1, 0, 1, 0]),
    "olmo2": transformers.Olmo2Config(**GATED, pad_token_id=None, attention_bias=True),
    "olmo3": transformers.Olmo3Config(**GATED | {"rope_parameters": None}, pad_token_id=None),
    "glm4": transformers.Glm4Config(**GATED | {"rope_parameters": HALF}, head_dim=16, pad_token_id=None),
    "gpt_oss": transformers.GptOssConfig(**GPT_OSS),
    "mixtral": transformers.MixtralConfig(**GATED, **EXPERTS, num_local_experts=4),
    "deepseek_v3": transformers.DeepseekV3Config(**DEEPSEEK),
    "moonlight": transformers.DeepseekV3Config(**DEEPSEEK | MOONLIGHT),
    "glm4_moe": transformers.Glm4MoeConfig(**GLM),
    "glm4_moe_lite": transformers.Glm4MoeLiteConfig(**FLASH),
    "glm4_moe-air": transformers.Glm4MoeConfig(**GLM | AIR),
}


def save_random(config, folder, seed, max_shard_size="5GB"):
    """A random model as transformers saves it, with norms and biases that are neither 1 nor 0."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in named_weights(model).values():
            weight.add_(0.2 * torch.randn_like(weight))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def enlarge_gates(folder):
    """Scale the first weights and biases of gpt-oss's experts, so that activations pass the clamp at 7."""
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith(("gate_up_proj", "gate_up_proj_bias")):
            tensors[name] = tensors[name] * 6
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def words_of(folder, layout, *more):
    size = f"--micro-batch-size={min(8, 16 // layout.dp)}"
    return [
        *COMMON,
        f"--load-hf={folder}",
        "--tokenizer-type=CharacterTokenizer",
        f"--runs-dir={folder}/runs",
        size,
        *layout.flags(),
        *more,
    ]


def changed(folder, target, change):
    """A directory with a changed ``config.json``, from which entries that are ``...`` are removed."""
    config = json.loads((folder / "config.json").read_text()) | change
    remaining = {key: value for key, value in config.items() if value is not ...}
    (target / "config.json").write_text(json.dumps(remaining))
    return target
