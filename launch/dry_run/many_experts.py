"""Many experts of a rank, built as three modules: the first, the last, and one for all experts between them.

Experts run one after the other, and all need the same. The peak comes while the last one runs forward, or the first
one backward. So these two are Megatron's own experts. The module between them keeps the bytes that the other experts
together keep for the backward, and has no weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from megatron_rc.launch.dry_run.live_bytes import LiveBytes

# Up to this number of experts on a rank, all are built.
_FEW_EXPERTS = 3


@contextlib.contextmanager
def even_experts() -> Iterator[None]:
    """Inside this block each expert gets the same number of tokens, and only two experts of a rank are built."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    with (
        mock.patch.object(SequentialMLP, "__init__", _with_few_experts(SequentialMLP.__init__)),
        mock.patch.object(SequentialMLP, "forward", _with_even_experts(SequentialMLP.forward)),
    ):
        yield


def number_of(parameter: Tensor) -> int:
    """Size of a parameter, times the number of experts that it stands for."""
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
    """Tokens of each module if all experts get the same number; has the one method of a tensor that Megatron calls."""

    def __init__(self, tokens: int, experts: int, modules: int) -> None:
        each, more = divmod(tokens, experts)
        shares = [each + (index < more) for index in range(experts)]
        self.shares = shares if modules == experts else [shares[0], sum(shares[1:-1]), shares[-1]]

    def tolist(self) -> list[int]:
        """Tokens of each module."""
        return self.shares


class _Between(nn.Module):
    """Stands for ``number`` experts that are equal to ``like``; has no weights, since ``like`` counts them."""

    def __init__(self, like: nn.Module, number: int) -> None:
        super().__init__()
        # In a tuple, so that torch does not register it as a submodule.
        self.like, self.number = (like,), number

    def forward(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """The experts' output ``[t, h]``, and no bias."""
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
    """Holds ``kept`` bytes from the forward to the backward."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, probs: Tensor, dtype: torch.dtype, kept: int) -> Tensor:
        ctx.save_for_backward(tokens, probs)
        ctx.kept = tokens.new_empty(kept, dtype=torch.uint8)
        return torch.empty_like(tokens, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        # The experts free their bytes one by one while their gradients appear.
        ctx.kept = None
        tokens, probs = ctx.saved_tensors
        return torch.empty_like(tokens), torch.empty_like(probs), None, None
