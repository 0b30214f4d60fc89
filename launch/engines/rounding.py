"""Weights rounded to a narrower type at every sync, so that the mismatch with the trainer is a real one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_rc.launch.weights.checkpoint_names import is_expert
from megatron_rc.launch.weights.named_weights import kept_buffers

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
INT8_MAX = 127
DTYPES = ("fp32", "bf16", "fp8-e4m3", "int8")


class Rounding:
    """Rounds the weights of a ``transformers`` model to one of ``DTYPES``; the values of ``model`` are not used."""

    def __init__(self, model: torch.nn.Module, dtype: str) -> None:
        self.dtype = dtype
        self._transposed = _linear_weights(model)
        self._exact = set(kept_buffers(model))

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """Round the weight of this name; float32."""
        if name in self._exact:  # the bias of experts, which engines keep in float32
            return tensor.float()
        if self._transposed.get(name):
            return round_weight(tensor.t(), self.dtype, True).t()
        is_bias = name.endswith("bias")
        return round_weight(tensor, self.dtype, name in self._transposed or (is_expert(name) and not is_bias))


def round_weight(
    tensor: Tensor, dtype: str, quantizable: bool, over_ranks: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Round to the values that ``dtype`` can hold; float32.

    ``fp8-e4m3`` and ``int8`` use one float32 scale for each output row of a linear layer, as engines do. Embeddings,
    norms and the output layer are bfloat16 with these types. An engine that computes in bfloat16 rounds again. The
    weight of a linear layer is ``quantizable``: its shape is [out, in], of stacked experts [experts, in, out]. If a
    shard has some columns of it alone, ``over_ranks`` makes the largest values [out, 1] of the shard those of all
    shards.
    """
    tensor = tensor.float()
    if dtype == "fp32":
        return tensor
    if dtype == "bf16" or not quantizable:
        return tensor.bfloat16().float()
    largest = tensor.abs().amax(dim=1, keepdim=True).clamp(min=1e-12)
    if over_ranks is not None:
        largest = over_ranks(largest)
    if dtype == "int8":
        return (tensor / largest * INT8_MAX).round() * (largest / INT8_MAX)
    scale = largest / FP8_MAX
    return (tensor / scale).to(torch.float8_e4m3fn).float() * scale


def _linear_weights(model: torch.nn.Module) -> dict[str, bool]:
    """Names of linear layers' weights, and whether they are stored [in, out] as in GPT-2's Conv1D; experts excepted."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()  # type: ignore[operator]
    return {
        f"{name}.weight": isinstance(module, Conv1D)
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D)) and module is not head
    }
