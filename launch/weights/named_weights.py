"""What a model is made of, by name: its parameters, and the buffers that are kept with them."""

from __future__ import annotations

import torch
from torch import Tensor


def kept_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    """The buffers that are in the model's checkpoints: the bias of experts, which no optimizer moves."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def named_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and those buffers; writing to a tensor writes to the model. Tied parameters come once."""
    return {name: tensor.data for name, tensor in model.named_parameters()} | kept_buffers(model)
