"""The critic's last layer: one value per token instead of logits."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class ValueHead(torch.nn.Module):
    """A linear layer from hidden states to values, with the interface of GPTModel's output layer.

    Each TP rank has the whole weight [1, h]. With sequence parallelism each sees its own tokens, and Megatron sums the
    gradients of parameters marked ``sequence_parallel`` over the TP group. The weight begins as N(0, 1 / (h + 1)²), so
    that a new critic's values are near 0 (Huang et al. 2024, "The N+ Implementation Details of RLHF with PPO").
    """

    def __init__(self, config: TransformerConfig, seed: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.sequence_parallel = config.sequence_parallel
        # An own generator gives the same weight on every rank.
        drawn = torch.randn(1, width, generator=torch.Generator().manual_seed(seed), device="cpu") / (width + 1)
        self.weight = torch.nn.Parameter(drawn.to(config.params_dtype))
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """[s/cp, b, 1] float32, equal on all tensor-parallel ranks, from [s/cp, b, h] or slices [s/cp/tp, b, h]."""
        values = torch.nn.functional.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            # All ranks compute the same loss after this, so each takes its slice of the gradient, without a sum.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
