"""The table of model families."""

from __future__ import annotations

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.weights.families.deepseek import DEEPSEEK_V3
from megatron_rc.launch.weights.families.glm import GLM4, GLM4_MOE, GLM4_MOE_LITE
from megatron_rc.launch.weights.families.gpt2 import GPT2
from megatron_rc.launch.weights.families.gpt_oss import GPT_OSS
from megatron_rc.launch.weights.families.llama import LLAMA_FAMILIES
from megatron_rc.launch.weights.families.olmo import OLMO2, OLMO3
from megatron_rc.launch.weights.families.phi import PHI3
from megatron_rc.launch.weights.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from megatron_rc.launch.weights.families.seed_oss import SEED_OSS
from megatron_rc.launch.weights.families.smollm3 import SMOLLM3
from megatron_rc.launch.weights.family import Family

FAMILIES = {
    family.name: family
    for family in (
        *LLAMA_FAMILIES,
        PHI3,
        SEED_OSS,
        SMOLLM3,
        OLMO2,
        OLMO3,
        QWEN2_MOE,
        QWEN3_MOE,
        DEEPSEEK_V3,
        GLM4,
        GLM4_MOE,
        GLM4_MOE_LITE,
        GPT_OSS,
        GPT2,
    )
}
# Reasons why the tables do not have some ``model_type``s, with the Megatron-Core that was tried.
_LINEAR = "megatron-core 0.19.2 needs Triton kernels of flash-linear-attention for its gated delta net: no CPU runs it"
NOT_IN_TABLES = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _LINEAR),
}
# Other values of ``model_type`` for the layers of a family, whose name an export has.
ALIASES = {"kimi_k2": DEEPSEEK_V3.name}


def family_of(config: RunConfig) -> Family:
    """Family of a run's model; RuntimeError if there is none, which the checks of the flags refuse."""
    family = find_family(config)
    if family is None:
        raise RuntimeError("no Hugging Face architecture here has these settings: call check_architecture() first")
    return family


def find_family(config: RunConfig) -> Family | None:
    """Family of a run's model, or None: the first that fits, or only ``--hf-model-type`` if that is given."""
    named = config.model.hf_model_type
    return next(
        (family for family in FAMILIES.values() if named in (None, family.name) and family.matches(config)), None
    )
