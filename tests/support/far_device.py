"""A device other than the CPU, on a machine with only a CPU: tensors whose memory the CPU may not simply use.

Like a GPU it refuses operations on tensors of two devices. It counts the operations for which a host would wait for a
GPU: a number or a tensor that comes back, shapes that depend on data, and tensors sent from ordinary memory. The
numbers are the CPU's.
"""

from __future__ import annotations

import collections
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

NAME = "far"
aten = torch.ops.aten
# Operations with a result, or its shape, that the host must know.
_DATA_SHAPES = (aten.nonzero.default, aten.masked_select.default, aten.repeat_interleave.Tensor, aten.bincount.default)
_DATA_SHAPES += (aten._unique2.default, aten.unique_dim.default, aten.equal.default)
_INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)


class FarTensor(torch.Tensor):
    """A tensor on the far device; ``near`` holds its numbers."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> FarTensor:
        found = torch.Tensor._make_wrapper_subclass(
            cls,
            near.shape,
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            device=torch.device(NAME, 0),
            requires_grad=near.requires_grad,
        )
        found.near = near
        return found

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"FarTensor({self.near!r})"

    def tolist(self) -> Any:
        """The numbers as nested lists; the host waits for them."""
        return self.to("cpu").tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} outside of far_device()")


class FarDevice(TorchDispatchMode):
    """The mode that computes on the far device.

    Attributes:
        waits: the operations for which the host waited, and their lines in the library.
        kernels: number of operations, without views and empty tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: collections.Counter[str] = collections.Counter()
        self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        flat, _ = tree_flatten((args, kwargs))
        given = [value for value in flat if isinstance(value, Tensor)]
        far = [value for value in given if isinstance(value, FarTensor)]
        target = kwargs.get("device")
        goes_far = bool(far) if target is None else torch.device(target).type == NAME
        if not far and not goes_far:
            return func(*args, **kwargs)
        self._check(func, given, far)
        self._count(func, args, kwargs, len(far) < len(given), goes_far)
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        args, kwargs = tree_map(_near, (args, kwargs))
        found = func(*args, **kwargs)
        return self._result(found, far, goes_far)

    def _check(self, func: Any, given: list[Tensor], far: list[Tensor]) -> None:
        """Refuse CPU tensors beside far ones, except single numbers, and indices of a far tensor."""
        mixed = [value for value in given if not isinstance(value, FarTensor) and value.dim()]
        if far and mixed and func not in (aten.copy_.default, *_INDEXING):
            raise RuntimeError(f"{func}: expected all tensors to be on one device, found {NAME} and cpu")

    def _count(self, func: Any, args: Any, kwargs: Any, from_cpu: bool, goes_far: bool) -> None:
        leaves = from_cpu or not goes_far
        # The host need not wait for tensors that it sends with non_blocking.
        asynchronous = goes_far and (kwargs.get("non_blocking") or (func is aten.copy_.default and args[2:] == (True,)))
        sent = func in (aten._to_copy.default, aten.copy_.default, *_INDEXING) and leaves and not asynchronous
        flags = func in _INDEXING and any(_is_flags(index) for index in args[1])
        shaped = func in _DATA_SHAPES and kwargs.get("output_size") is None
        if func is aten._local_scalar_dense.default or shaped or sent or flags or not goes_far:
            self.waits[f"{func} at {_place()}"] += 1
        if not func.is_view and "empty" not in func.name():
            self.kernels += 1

    def _result(self, found: Any, far: list[Tensor], goes_far: bool) -> Any:
        """The result; of an in-place operation the tensor that was passed."""
        known = {id(value.near): value for value in far if isinstance(value, FarTensor)}

        def wrap(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return known.get(id(value)) if id(value) in known else (FarTensor(value) if goes_far else value)

        return tree_map(wrap, found)


class _SentThere(TorchFunctionMode):
    """``torch.tensor`` makes its numbers on the CPU and sends them, which no dispatch mode sees."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if func is torch.tensor and device is not None and torch.device(device).type == NAME:
            return func(*args, **kwargs | {"device": "cpu"}).to(device)
        return func(*args, **kwargs)


def _near(value: Any) -> Any:
    return value.near if isinstance(value, FarTensor) else value


def _is_flags(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _place() -> str:
    """The line of the library that called the operation."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if "megatron_rc" in path.parts and "tests" not in path.parts:
            return f"{path.name}:{frame.lineno}"
    return "a test"


@contextmanager
def far_device() -> Iterator[FarDevice]:
    """Make the device ``"far"`` exist inside this block."""
    _register()
    with _SentThere(), FarDevice() as device:
        yield device


def _register() -> None:
    from torch.utils import backend_registration

    if torch._C._get_privateuse1_backend_name() != NAME:
        set_up: Callable[..., None] = backend_registration._setup_privateuseone_for_python_backend
        set_up(NAME)
