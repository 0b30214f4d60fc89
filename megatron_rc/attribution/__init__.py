"""The parameters that make engine and trainer differ, found by one forward and one backward pass.

docs/attribution.md has the mathematics and its limits.
"""

from megatron_rc.attribution.megatron import megatron_shards
from megatron_rc.attribution.midpoint import attribute
from megatron_rc.attribution.quantization import (
    bf16,
    fp8_per_block,
    fp8_per_channel,
    fp8_per_tensor,
    int8_per_channel,
    quantized,
)
from megatron_rc.attribution.result import Attribution
from megatron_rc.attribution.shards import Shard, shards_of

__all__ = [
    "Attribution",
    "Shard",
    "attribute",
    "bf16",
    "fp8_per_block",
    "fp8_per_channel",
    "fp8_per_tensor",
    "int8_per_channel",
    "megatron_shards",
    "quantized",
    "shards_of",
]
