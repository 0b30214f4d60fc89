"""RMSNorms of queries and keys over all heads together, for Megatron's layer specs; Megatron's own are over a head."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_rc.launch.training.models.split_over_tp import SplitOverTp


def use_norms_over_all_heads(layer: Any) -> None:
    """Norm queries and keys over all heads, in Megatron's spec of a layer."""
    attention = layer.self_attention.submodules
    attention.q_layernorm = QueryNorm
    attention.k_layernorm = KeyNorm


class WideNorm(SplitOverTp):
    """RMSNorm over the last two dimensions, heads and their width; each TP rank holds the weights of its own heads.

    Args:
        config: Megatron's config of the layers.
        heads: number of heads on all TP ranks.
        hidden_size: width of a head.
        eps: number that is added to the mean square.
    """

    def __init__(self, config: TransformerConfig, heads: int, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.eps = eps
        self.width = heads * hidden_size
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        own_width = self.width // self.tp_group.size()
        self.weight = torch.nn.Parameter(torch.ones(own_width, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, values: Tensor) -> Tensor:
        """The norm of [s, b, heads/tp, d], in the same form. Collectives: all-reduces of [s, b] over ``tp``."""
        own_heads = values.flatten(-2).float()
        squares = own_heads.square().sum(dim=-1, keepdim=True)
        # The sum is reduced in the forward; its gradients, which every rank's heads add to, in the backward.
        summed = reduce_from_tensor_model_parallel_region(squares, group=self.tp_group)
        squares = copy_to_tensor_model_parallel_region(summed, group=self.tp_group)
        normed = own_heads * torch.rsqrt(squares / self.width + self.eps)
        return (self.weight * normed).to(values.dtype).view_as(values)


class QueryNorm(WideNorm):
    """Norm of the queries."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(config, config.num_attention_heads, hidden_size, eps)


class KeyNorm(WideNorm):
    """Norm of the keys."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(config, config.num_query_groups, hidden_size, eps)
