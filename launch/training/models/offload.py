"""Offloading of weights and optimizer states to host memory while the device does not need them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_rc.launch.weights.named_weights import named_weights


class Offload:
    """Offloads tensors by emptying and refilling their storages, bit for bit.

    Shapes and views between tensors stay valid. Nothing may read or write the tensors while they are offloaded.

    Args:
        tensors: returns the tensors; called at each offload, so that new ones are included.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._host: dict[int, Tensor] = {}

    def away(self) -> None:
        """Copy the tensors to the host (pinned memory for a GPU) and free their memory; no effect if already away."""
        if self._away:
            return
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in self._tensors()}
        before = self._host
        self._host = {}
        for key, storage in storages.items():
            bytes_on_device = torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage)
            host = before.get(key)
            if host is None or host.numel() != bytes_on_device.numel():
                host = torch.empty(bytes_on_device.shape, dtype=torch.uint8, pin_memory=bytes_on_device.is_cuda)
            self._host[key] = host.copy_(bytes_on_device, non_blocking=True)
            self._away.append((storage, host))
        _wait()
        for storage, _ in self._away:
            storage.resize_(0)

    def back(self) -> None:
        """Copy the tensors back; no effect if already back. If device memory runs out, the rest stays away."""
        while self._away:
            storage, host = self._away[-1]
            storage.resize_(host.numel())
            torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage).copy_(host, non_blocking=True)
            self._away.pop()
        _wait()

    @contextmanager
    def here(self) -> Iterator[None]:
        """Context with the tensors on the device; afterwards they are offloaded."""
        self.back()
        try:
            yield
        finally:
            self.away()


def tensors_of_model(model: Sequence[Any]) -> Iterator[Tensor]:
    """Weights and gradient buffers of chunks under Megatron's DDP."""
    for chunk in model:
        yield from (parameter.data for parameter in chunk.parameters())
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data


def tensors_of_optimizer(optimizer: Any, model: Sequence[Any]) -> Iterator[Tensor]:
    """Tensors of these chunks' optimizer: moments, and float32 copies of weights in lower precision."""
    weights = {tensor.untyped_storage()._cdata for tensor in tensors_of_model(model)}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        states = (value for state in part.optimizer.state.values() for value in state.values())
        copies = (parameter.data for group in part.optimizer.param_groups for parameter in group["params"])
        for tensor in (*states, *copies):
            if isinstance(tensor, Tensor) and tensor.dim() and tensor.untyped_storage()._cdata not in weights:
                yield tensor


@contextmanager
def exchanged(chunks: Sequence[torch.nn.Module], others: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Context in which two models of one shape have each other's weights, bit for bit.

    If ``others`` are on the host, the device needs extra memory for one weight only.
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
            before = weight.detach().clone()
            weight.copy_(its[name], non_blocking=True)
            _wait()
            its[name].copy_(before)
            del before


def _wait() -> None:
    """Wait for the non-blocking copies."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
