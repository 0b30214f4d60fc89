"""Many experts of a rank, built as three modules: the first, the last, and one for all experts between them.

Experts run one after the other, and all need the same. The peak comes while the last one runs forward, or the first
one backward. So these two are Megatron's own experts. The module between them keeps the bytes that the other experts
together keep for the backward, and has no weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
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

    make, forward = SequentialMLP.__init__, SequentialMLP.forward

    def make_few(self: Any, num_local_experts: int, *args: Any, **kwargs: Any) -> None:
        if num_local_experts <= _FEW_EXPERTS:
            make(self, num_local_experts, *args, **kwargs)
            return
        make(self, 2, *args, **kwargs)
        self.num_local_experts = num_local_experts
        first, last = self.local_experts
        for parameter in last.parameters():
            parameter.stands_for = num_local_experts - 1
        self.local_experts = nn.ModuleList([first, _Between(last, num_local_experts - 2), last])

    def forward_evenly(self: Any, hidden: Tensor, _: Any, probs: Tensor) -> Any:
        each, more = divmod(len(hidden), self.num_local_experts)
        shares = [each + (index < more) for index in range(self.num_local_experts)]
        if len(self.local_experts) < len(shares):
            shares = [shares[0], sum(shares[1:-1]), shares[-1]]
        # Of the tensor with the number of tokens of each expert, Megatron calls this method alone.
        return forward(self, hidden, SimpleNamespace(tolist=lambda: shares), probs)

    patch = partial(mock.patch.object, SequentialMLP)
    with patch("__init__", make_few), patch("forward", forward_evenly):
        yield


def number_of(parameter: Tensor) -> int:
    """Size of a parameter, times the number of experts that it stands for."""
    return parameter.numel() * int(getattr(parameter, "stands_for", 1))


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
