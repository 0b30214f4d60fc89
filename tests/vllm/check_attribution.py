"""The values of rounded weights are those of vLLM's own functions, bit for bit."""

import pytest
import torch
from vllm.model_executor.layers.quantization.online import fp8
from vllm.utils import deep_gemm

from megatron_rc.attribution import fp8_per_block, fp8_per_channel


@pytest.mark.parametrize("size", [1, 1e-3, 1e-7])
@pytest.mark.parametrize("shape", [(256, 384), (200, 300), (1, 5), (64, 1000)], ids=str)
def test_fp8_is_vllms(shape, size):
    weight = (size * torch.randn(shape, generator=torch.Generator().manual_seed(0))).bfloat16()

    values, scale = deep_gemm.per_block_cast_to_fp8(weight)
    blocks = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    assert torch.equal(fp8_per_block(weight), values.float() * blocks)

    scale = fp8._fp8_channel_scale(weight.abs().amax(dim=-1, keepdim=True))
    assert torch.equal(fp8_per_channel(weight), fp8._fp8_quant_per_channel(weight, scale).float() * scale)
