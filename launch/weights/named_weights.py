"""Weights of a model by name: its parameters, and the buffers that checkpoints keep."""

from __future__ import annotations

import torch
from torch import Tensor


def kept_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    """Buffers in the model's checkpoints, such as the routers' expert bias."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def named_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and kept buffers by name; tied ones once. Writing to a tensor writes to the model."""
    return {name: tensor.data for name, tensor in model.named_parameters()} | kept_buffers(model)
