"""GLM-4.5 (also 4.5-Air, 4.6 and 4.7): Llama's layers, DeepSeek-V3's experts and partly rotated heads.

GLM-4.7-Flash has DeepSeek-V3's layers.
"""

from __future__ import annotations

from megatron_rc.launch.weights.entries import entry
from megatron_rc.launch.weights.families.deepseek import latent_family
from megatron_rc.launch.weights.families.llama import ANY_LENGTH, gated_family
from megatron_rc.launch.weights.families.sigmoid_experts import (
    EXPERT_LAYER,
    dense_first,
    dense_first_by_layer,
    sigmoid_experts,
)
from megatron_rc.launch.weights.family import ExpertNames
from megatron_rc.launch.weights.rotary import rotary_row

GLM4_MOE = gated_family(
    "glm4_moe",
    "Glm4MoeConfig",
    (*ANY_LENGTH, *sigmoid_experts(dense_layers=dense_first(1), scaling=1.0, groups=1, chosen=1)),
    rotary=rotary_row(default_part=0.5),
    attention=(
        # The output projection has no bias.
        entry("attention_bias", "add-qkv-bias", default=False),
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
