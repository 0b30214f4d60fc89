"""Bytes of live tensors, and their peak."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations inside the block make, until nothing refers to them.

    It sees neither the scratch memory inside an operation nor tensors from before the block.

    Attributes:
        live: bytes now.
        peak: the largest ``live`` so far; may be reset.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # The result may be a view of an older tensor.
        older = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in self._sizes and storage._cdata not in older:
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        size = storage.nbytes()
        weakref.finalize(storage, self._remove, key)
        self._sizes[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)

    def _remove(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    return (value.untyped_storage() for value in tree_leaves(values) if isinstance(value, Tensor))
