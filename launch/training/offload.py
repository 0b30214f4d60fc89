"""Weights and states that wait in host memory while nothing on the device needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_rc.launch.weights.named_weights import named_weights


class Offload:
    """Some tensors, whose memory on the device is given back while they are away.

    A tensor keeps its shape, and what is a view of another stays one: the storage below them is emptied and filled
    again, to the last bit. Nothing may read or write them in between.

    Args:
        tensors: they are asked for whenever they go, so that new ones go too.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._host: dict[int, Tensor] = {}

    def away(self) -> None:
        """Copy them to the host, on a GPU to pinned memory, and give their memory back. Again: nothing."""
        if self._away:
            return
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in self._tensors()}
        before, self._host = self._host, {}
        for key, storage in storages.items():
            own = torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage)
            host = before.get(key)
            if host is None or host.numel() != own.numel():
                host = torch.empty(own.shape, dtype=torch.uint8, pin_memory=own.is_cuda)
            self._host[key] = host.copy_(own, non_blocking=True)
            self._away.append((storage, host))
        _wait()
        for storage, _ in self._away:
            storage.resize_(0)

    def back(self) -> None:
        """Bring them back. Again: nothing. Where the device's memory runs out, the rest stays away."""
        while self._away:
            storage, host = self._away[-1]
            storage.resize_(host.numel())
            torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage).copy_(host, non_blocking=True)
            self._away.pop()
        _wait()

    @contextmanager
    def here(self) -> Iterator[None]:
        """Inside they are on the device, afterwards away."""
        self.back()
        try:
            yield
        finally:
            self.away()


def tensors_of_model(model: Sequence[Any]) -> Iterator[Tensor]:
    """The weights of chunks under Megatron's DDP, and the buffers of their gradients."""
    for chunk in model:
        yield from (parameter.data for parameter in chunk.parameters())
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data


def tensors_of_optimizer(optimizer: Any, model: Sequence[Any]) -> Iterator[Tensor]:
    """Moments, and float32 copies of lower-precision weights, of Megatron's optimizer of these chunks."""
    weights = {tensor.untyped_storage()._cdata for tensor in tensors_of_model(model)}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        states = (value for state in part.optimizer.state.values() for value in state.values())
        copies = (parameter.data for group in part.optimizer.param_groups for parameter in group["params"])
        for tensor in (*states, *copies):
            if isinstance(tensor, Tensor) and tensor.dim() and tensor.untyped_storage()._cdata not in weights:
                yield tensor


@contextmanager
def exchanged(chunks: Sequence[torch.nn.Module], others: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Inside, two models of one shape have each other's weights; afterwards their own, to the last bit.

    Where the others lie on the host, the device needs no more memory than one weight's.
    """
    _exchange(chunks, others)
    try:
        yield
    finally:
        _exchange(chunks, others)


@torch.no_grad()
def _exchange(chunks: Sequence[torch.nn.Module], others: Sequence[torch.nn.Module]) -> None:
    for chunk, other in zip(chunks, others, strict=True):
        its = named_weights(other)
        for name, weight in named_weights(chunk).items():
            kept = weight.detach().clone()
            weight.copy_(its[name], non_blocking=True)
            _wait()
            its[name].copy_(kept)
            del kept


def _wait() -> None:
    """Until what was copied without waiting is there."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
