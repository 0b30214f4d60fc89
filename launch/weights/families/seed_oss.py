"""Seed-OSS: Llama's layers, with a separate entry for each bias."""

from __future__ import annotations

from megatron_rc.launch.weights.biases import bias_row
from megatron_rc.launch.weights.entries import written
from megatron_rc.launch.weights.families.llama import ANY_LENGTH, DENSE, NO_QK_NORMS, gated_family

SEED_OSS = gated_family(
    "seed_oss",
    "SeedOssConfig",
    # Published configs have dropout, which a policy must not have.
    (*DENSE, *ANY_LENGTH, *(written(name, 0.0) for name in ("attention_dropout", "residual_dropout"))),
    attention=(bias_row(qkv="attention_bias", output="attention_out_bias", mlp="mlp_bias", default=True), *NO_QK_NORMS),
    default_groups=8,
    default_head_dim=128,
)
