"""Tensors of files that stack the same tensor of all experts of a layer.

``experts.down_proj[3]`` is the name of an entry, that of expert 3 in ``experts.down_proj``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor


def name_and_entry(name: str) -> tuple[str, int | None]:
    """Name of the tensor in files, and the number of the entry in it; None: the whole tensor."""
    stored, _, entry = name.removesuffix("]").partition("[")
    return stored, int(entry) if entry else None


def stack_entries(tensors: Iterable[tuple[str, Tensor]], num_experts: int) -> Iterator[tuple[str, Tensor]]:
    """Yield names in files with whole tensors; entries of a stack, which may come in any order, are put together."""
    stacks: dict[str, Tensor] = {}
    missing: dict[str, int] = {}
    for name, tensor in tensors:
        stored, entry = name_and_entry(name)
        if entry is None:
            yield stored, tensor
            continue
        if stored not in stacks:
            stacks[stored] = tensor.new_empty(num_experts, *tensor.shape)
            missing[stored] = num_experts
        stacks[stored][entry] = tensor
        missing[stored] -= 1
        if not missing[stored]:
            yield stored, stacks.pop(stored)
