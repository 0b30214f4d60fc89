"""The parameters that a rank holds, and what it counts of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Elements whose products are added at a time, in float64.
_BLOCK = 2**24


@dataclass(frozen=True)
class Shard:
    """A parameter, or a rank's part of one.

    Attributes:
        name: name in the whole model, the same on each rank that has a part or a copy.
        weight: the parameter that the forward pass reads. Its gradient is ``weight.main_grad`` if there is one, as
            under Megatron's DDP, or else ``weight.grad``.
        counted: elements of the flat weight whose products this rank adds; None: all. Over all ranks of the sum each
            summand of the gradient must be counted once: copies with equal gradients on one rank alone, partial
            gradients on each.
    """

    name: str
    weight: torch.nn.Parameter
    counted: range | None = None

    @property
    def gradient(self) -> Tensor | None:
        """The gradient, of the weight's shape; None if the pass left none."""
        gradient: Tensor | None = getattr(self.weight, "main_grad", None)
        return self.weight.grad if gradient is None else gradient

    def clear_gradient(self) -> None:
        """Remove the gradient; Megatron's buffer becomes 0."""
        self.weight.grad = None
        buffer: Tensor | None = getattr(self.weight, "main_grad", None)
        if buffer is not None:
            buffer.zero_()
            # Megatron's hook adds nothing to a buffer that a fused kernel is said to have filled.
            self.weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def product(self, difference: Tensor) -> Tensor:
        """Return ⟨gradient, difference⟩ over the counted elements, 0-D float64."""
        total = torch.zeros((), dtype=torch.float64, device=self.weight.device)
        gradient = self.gradient
        if gradient is None:
            return total

        counted = range(self.weight.numel()) if self.counted is None else self.counted
        flat_gradient = gradient.detach().reshape(-1)[counted.start : counted.stop]
        flat_difference = difference.reshape(-1)[counted.start : counted.stop]
        for gradient_block, difference_block in zip(
            flat_gradient.split(_BLOCK), flat_difference.split(_BLOCK), strict=True
        ):
            total += gradient_block.double() @ difference_block.double()
        return total


def shards_of(model: torch.nn.Module) -> list[Shard]:
    """Return the parameters of a model that lies whole in this process; tied parameters come once.

    If other processes have copies of the model, either each of them has the gradients of its own tokens alone and all
    are in the sum's group, or the gradients are added up already and there is no group.
    """
    return [Shard(name, weight) for name, weight in model.named_parameters()]
