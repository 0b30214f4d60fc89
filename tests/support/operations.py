"""The operations that a function asks PyTorch for: what a host does one after the other to keep a GPU busy."""

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
    """Counts the operations inside of its ``with`` block, without views, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name not in VIEWS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def count_operations(function: Callable[[], object]) -> collections.Counter[str]:
    """The operations of one call of the function, by name."""
    with Operations() as operations:
        function()
    return operations.counts
