"""Values that an engine's rounded weights have, as vLLM 0.33 quantises bf16 or fp16 weights when it loads them.

Each function takes a weight [out, in] in the dtype that the engine loads, and returns the values that the quantised
weight stands for, float32. vLLM keeps embeddings, norms, the router and the output layer in the loaded dtype
(``vllm/model_executor/layers/quantization/online/base.py``). It joins the projections of queries, keys and values, and
of gate and up, in one layer, so that fp8 by tensor has one scale for all of them: give the joined weight, as Megatron's
``linear_qkv`` and ``linear_fc1`` are.

A TP shard needs the scale of the whole weight: ``over_ranks`` takes the largest absolute values of this shard and
returns those over all shards, an element-wise maximum over the TP group; without it the weight is whole. Rows or
columns that are whole on this rank need none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatron_rc.attribution.names import place_of

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448
INT8_MAX = 127
BLOCK = 128

Reduce = Callable[[Tensor], Tensor]


def bf16(weight: Tensor) -> Tensor:
    """Round to bfloat16: the values of an engine that loads weights as bfloat16."""
    return weight.bfloat16().float()


def fp8_per_tensor(weight: Tensor, over_ranks: Reduce | None = None) -> Tensor:
    """Round to fp8 (e4m3) with one scale: vLLM's ``--quantization fp8_per_tensor``.

    ``Fp8PerTensorOnlineLinearMethod`` in vLLM's ``online/fp8.py``; its kernel multiplies by the scale's reciprocal
    (``csrc/quantization/w8a8/fp8``).
    """
    largest = _largest(weight.float(), None, over_ranks)
    scale = largest / FP8_MAX
    reciprocal = torch.where(scale > 0, 1 / scale, 0.0)
    return _to_fp8(weight.float() * reciprocal) * scale


def fp8_per_channel(weight: Tensor, over_ranks: Reduce | None = None) -> Tensor:
    """Round to fp8 (e4m3) with a scale for each output: vLLM's ``--quantization fp8_per_channel``.

    ``_fp8_channel_scale`` and ``_fp8_quant_per_channel`` in vLLM's ``online/fp8.py``, which divide.
    """
    largest = _largest(weight.float(), 1, over_ranks)
    scale = (largest / FP8_MAX).clamp(min=1 / (FP8_MAX * 512))
    return _to_fp8(weight.float() / scale) * scale


def fp8_per_block(weight: Tensor, block: int = BLOCK) -> Tensor:
    """Round to fp8 (e4m3) with a scale for each ``block`` × ``block`` part: vLLM's ``--quantization fp8_per_block``.

    ``per_block_cast_to_fp8`` in vLLM's ``vllm/utils/deep_gemm.py``, with blocks of 128. Blocks begin at the weight's
    first row and column. A TP shard has the whole weight's blocks if the dimension that is cut is a multiple of
    ``block`` on each rank.
    """
    rows, columns = weight.shape
    padding = (0, -columns % block, 0, -rows % block)
    padded = torch.nn.functional.pad(weight.float(), padding)
    # [blocks of rows, block, blocks of columns, block]
    blocks = padded.unflatten(1, (-1, block)).unflatten(0, (-1, block))
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(min=1e-4) / FP8_MAX
    # vLLM multiplies by the reciprocal; a division would round otherwise.
    rounded: Tensor = _to_fp8(blocks * (1 / scale)) * scale
    return rounded.flatten(2, 3).flatten(0, 1)[:rows, :columns]


def int8_per_channel(weight: Tensor, over_ranks: Reduce | None = None) -> Tensor:
    """Round to int8 with a scale for each output: vLLM's ``--quantization int8_per_channel_weight_only``, of experts.

    ``Int8OnlineMoEMethod`` in vLLM's ``online/int8.py``, which divides in the weight's own dtype.
    """
    largest = _largest(weight, 1, over_ranks)
    scale = largest / INT8_MAX
    # A row of zeros has scale 0.
    steps = torch.where(scale > 0, weight / scale, 0.0).round().clamp(-INT8_MAX, INT8_MAX)
    return steps.float() * scale.float()


def _largest(weight: Tensor, dim: int | None, over_ranks: Reduce | None) -> Tensor:
    """The largest absolute value of the weight, or of each row, over all shards."""
    largest = weight.abs().amax() if dim is None else weight.abs().amax(dim=dim, keepdim=True)
    return largest if over_ranks is None else over_ranks(largest)


def _to_fp8(values: Tensor) -> Tensor:
    return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()


def quantized(weights: Mapping[str, Tensor], rounding: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return an engine's weights under Hugging Face's names: linear layers rounded as vLLM joins them, all else bf16.

    Queries, keys and values are one layer of vLLM, and so are gate and up; an expert's gate and up as well.

    Args:
        weights: the trainer's whole weights by name. Memory: another copy of them in float32.
        rounding: one of the functions above.
    """
    rounded: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if name in rounded:
            continue
        if not _is_linear(name, weight):
            rounded[name] = bf16(weight)
            continue
        names = [sibling for sibling in _joined_names(name) if sibling in weights]
        parts = [weights[sibling] for sibling in names]
        values = rounding(torch.cat([part.bfloat16() for part in parts]))
        rounded.update(zip(names, values.split([len(part) for part in parts]), strict=True))
    return rounded


def _is_linear(name: str, weight: Tensor) -> bool:
    return weight.dim() == 2 and place_of(name).kind in ("attention", "mlp", "experts")


def _joined_names(name: str) -> list[str]:
    """The names of the projections that vLLM joins with this one, in its order."""
    path, _, projection = name.removesuffix(".weight").rpartition(".")
    for joined in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3")):
        if projection in joined:
            return [f"{path}.{sibling}.weight" for sibling in joined]
    return [name]
