"""A model's forward with a processor of its hidden states: Megatron-Core's own from 0.18 on, or a stand-in for it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_rc.launch.training.models.build import unwrap
from megatron_rc.parallel.processor import forward_of


def processed(
    model: torch.nn.Module, processor: Callable[..., Any], *inputs: Any, labels: Tensor, loss_mask: Tensor, **more: Any
) -> Any:
    """The processor's results on the last pipeline stage, hidden states on the others.

    Args:
        model: a chunk, in its wrappers or without.
        processor: called with the keyword arguments of Megatron's ``output_processor``.
        inputs: positional arguments of the forward.
        labels: [b, s/cp], for the processor.
        loss_mask: like the labels, for the processor.
        more: other keyword arguments of the forward.
    """
    chunk = unwrap(model)
    if _has_hook(type(chunk).forward):
        return model(*inputs, labels=labels, loss_mask=loss_mask, output_processor=processor, **more)
    if not chunk.post_process:
        return model(*inputs, **more)
    layer = chunk.output_layer
    results = []
    layer_forward = layer.forward
    scale = getattr(chunk, "_scale_logits", None)
    arguments = {"output_layer": layer, "labels": labels, "loss_mask": loss_mask, "config": chunk.config}

    def forward(hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        with forward_of(layer, layer_forward):  # the processor may call it
            results.append(processor(hidden_states=hidden, output_weight=weight, scale_logits=scale, **arguments))
        return hidden, None

    with forward_of(layer, forward):
        model(*inputs, **more)
    return results[0]


@functools.cache
def _has_hook(forward: Callable[..., Any]) -> bool:
    """Whether a model's forward takes an ``output_processor``."""
    return "output_processor" in inspect.signature(forward).parameters
