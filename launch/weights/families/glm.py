"""GLM-4-0414, and GLM-4.5 (also 4.5-Air, 4.6 and 4.7), with partly rotated heads; GLM-4.7-Flash.

GLM-4-0414 rotates neighbouring dimensions, and has norms before and after attention and MLP. GLM-4.5 has Llama's layers
with DeepSeek-V3's experts, GLM-4.7-Flash DeepSeek-V3's layers.
"""

from __future__ import annotations

from megatron_rc.launch.weights.biases import BIASES_OF_ATTENTION, bias_row
from megatron_rc.launch.weights.conversions import WHOLE
from megatron_rc.launch.weights.entries import always, entry
from megatron_rc.launch.weights.families.deepseek import latent_family
from megatron_rc.launch.weights.families.llama import (
    ALL_ROTATED,
    ANY_LENGTH,
    ATTENTION,
    DENSE,
    NO_QK_NORMS,
    NORM_RULES,
    gated_family,
)
from megatron_rc.launch.weights.families.phi import STACKED_MLP
from megatron_rc.launch.weights.families.sigmoid_experts import (
    EXPERT_LAYER,
    dense_first,
    dense_first_by_layer,
    sigmoid_experts,
)
from megatron_rc.launch.weights.family import ExpertNames, Rule
from megatron_rc.launch.weights.rotary import rotary_row

_LAYER = "model.layers.{layer}."
GLM4 = gated_family(
    "glm4",
    "Glm4Config",
    (*DENSE, *ANY_LENGTH),
    # GPTModel's YaRN rotates halves of whole heads.
    rotary=rotary_row(default_part=0.5, kinds=("llama3", "linear", "dynamic")),
    attention=(bias_row(qkv="attention_bias", default=True, unused=("mlp_bias",)), *NO_QK_NORMS),
    layout=(always("layer-norms", "around"), always("rotary-interleaved", True), *ALL_ROTATED),
    default_groups=2,
    default_head_dim=128,
    rules=(
        *NORM_RULES,
        Rule(
            ("self_attention.linear_proj.post_layernorm.weight",),
            (f"{_LAYER}post_self_attn_layernorm.weight",),
            WHOLE,
        ),
        Rule(("mlp.linear_fc2.post_layernorm.weight",), (f"{_LAYER}post_mlp_layernorm.weight",), WHOLE),
        *ATTENTION,
        *BIASES_OF_ATTENTION,
    ),
    mlp_rules=STACKED_MLP,
)
GLM4_MOE = gated_family(
    "glm4_moe",
    "Glm4MoeConfig",
    (*ANY_LENGTH, *sigmoid_experts(dense_layers=dense_first(1), scaling=1.0, groups=1, chosen=1)),
    rotary=rotary_row(default_part=0.5),
    attention=(
        # The output projection has no bias.
        bias_row(qkv="attention_bias", unused=("mlp_bias",)),
        entry("use_qk_norm", "qk-layernorm", default=False),
    ),
    default_groups=8,
    expert_layer=EXPERT_LAYER,
    expert_names=ExpertNames(),
)
GLM4_MOE_LITE = latent_family(
    "glm4_moe_lite",
    "Glm4MoeLiteConfig",
    sigmoid_experts(dense_layers=dense_first_by_layer(1), scaling=1.8, groups=1, chosen=1),
    default_q_lora_rank=768,
)
