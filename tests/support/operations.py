"""The operations that a function asks PyTorch for: what a host does one after the other to keep a GPU busy."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# Operations that start no kernel.
VIEWS = frozenset(
    """
    view expand slice select detach unsqueeze squeeze t transpose alias as_strided permute split split_with_sizes unbind
    reshape
    """.split()
)


class Operations(TorchDispatchMode):
    """Counts operations by name while it is active; on a CPU those of the backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: collections.Counter[str] = collections.Counter()

    @property
    def total(self) -> int:
        """All operations, views among them."""
        return self.by_name.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        self.by_name[name] += 1
        return func(*args, **(kwargs or {}))


def count_operations(function: Callable[[], object]) -> collections.Counter[str]:
    """The operations of one call of the function by name, without views."""
    with Operations() as operations:
        function()
    return collections.Counter({name: count for name, count in operations.by_name.items() if name not in VIEWS})
