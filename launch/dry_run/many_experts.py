"""Many experts of a rank, counted by three: the first, the last, and all between them at once.

Experts work one after the other and are all alike. Most bytes live at once while the last one runs, or while the
gradient of the first one is made: these two are Megatron's own, with their weights. A module stands for those between.
It keeps as many bytes for the backward as they keep together, and has no weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from megatron_rc.launch.dry_run.live_bytes import LiveBytes

# Experts of a rank that are gone through one by one.
_FEW_EXPERTS = 3


@contextlib.contextmanager
def even_experts() -> Iterator[None]:
    """Inside this block Megatron's experts get equally many tokens each, and most of them are not made."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    with (
        mock.patch.object(SequentialMLP, "__init__", _with_few_experts(SequentialMLP.__init__)),
        mock.patch.object(SequentialMLP, "forward", _with_even_experts(SequentialMLP.forward)),
    ):
        yield


def number_of(parameter: Tensor) -> int:
    """Numbers in a parameter, with those of all experts that it stands for."""
    return parameter.numel() * int(getattr(parameter, "stands_for", 1))


def _with_few_experts(make: Any) -> Any:
    def run(self: Any, num_local_experts: int, *args: Any, **kwargs: Any) -> None:
        if num_local_experts <= _FEW_EXPERTS:
            make(self, num_local_experts, *args, **kwargs)
            return
        make(self, 2, *args, **kwargs)
        self.num_local_experts = num_local_experts
        first, last = self.local_experts
        for parameter in last.parameters():
            parameter.stands_for = num_local_experts - 1
        self.local_experts = nn.ModuleList([first, _Between(last, num_local_experts - 2), last])

    return run


def _with_even_experts(forward: Any) -> Any:
    def run(self: Any, hidden: Tensor, _: Any, probs: Tensor) -> Any:
        return forward(self, hidden, _Even(len(hidden), self.num_local_experts, len(self.local_experts)), probs)

    return run


class _Even:
    """Numbers of tokens of each module, where all experts have equally many."""

    def __init__(self, tokens: int, experts: int, modules: int) -> None:
        each, more = divmod(tokens, experts)
        shares = [each + (index < more) for index in range(experts)]
        self.shares = shares if modules == experts else [shares[0], sum(shares[1:-1]), shares[-1]]

    def tolist(self) -> list[int]:
        """As numbers."""
        return self.shares


class _Between(nn.Module):
    """Stands for so many experts; ``like`` is one of them, whose weights are counted where it stands itself."""

    def __init__(self, like: nn.Module, number: int) -> None:
        super().__init__()
        # In a tuple, where torch does not take it for a part of this module.
        self.like, self.number = (like,), number

    def forward(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """What the experts return: ``[t, h]``, and no bias."""
        share = -(-len(tokens) // self.number)
        if not share:
            return torch.empty_like(tokens), None
        with LiveBytes() as own:
            output, _ = self.like[0](tokens[:share], probs[:share])
        kept = own.live - output.untyped_storage().nbytes()
        dtype = output.dtype
        del output
        found: Tensor = _Kept.apply(tokens, probs, dtype, kept * len(tokens) // share)  # type: ignore[no-untyped-call]
        return found, None


class _Kept(torch.autograd.Function):
    """Holds so many bytes from the forward to the backward."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, probs: Tensor, dtype: torch.dtype, kept: int) -> Tensor:
        ctx.save_for_backward(tokens, probs)
        ctx.kept = tokens.new_empty(kept, dtype=torch.uint8)
        return torch.empty_like(tokens, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        # Expert by expert, what is kept goes and a gradient comes.
        ctx.kept = None
        tokens, probs = ctx.saved_tensors
        return torch.empty_like(tokens), torch.empty_like(probs), None, None
