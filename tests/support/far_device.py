"""A pretended GPU: CPU tensors that say they are on a GPU, on a machine with only a CPU.

Like a GPU and nccl it refuses operations on tensors of two devices, and host tensors in a collective. It counts the
operations for which a host would wait for a GPU: a number or a tensor that comes back, shapes that depend on data, and
tensors sent from ordinary memory. The numbers are the CPU's; kernels, streams and the GPU's memory are not simulated.
``tagged_gpu`` lets the launcher take its GPU path on it.
"""

from __future__ import annotations

import collections
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
aten = torch.ops.aten
# Operations with a result, or its shape, that the host must know.
_DATA_SHAPES = (aten.nonzero.default, aten.masked_select.default, aten.repeat_interleave.Tensor, aten.bincount.default)
_DATA_SHAPES += (aten._unique2.default, aten.unique_dim.default, aten.equal.default)
_INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)
_JOINING = (aten.cat.default, aten.stack.default)  # refuse even single numbers of the host
_DEVICE = Tensor.device.__get__
_IS_CUDA = Tensor.is_cuda.__get__
# Storages on the GPU. While a weak reference is held, no other storage gets the same address.
_there: dict[int, StorageWeakRef] = {}


def is_there(tensor: Tensor) -> bool:
    """Whether a tensor counts as on the GPU."""
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()._cdata in _there


def _put(values: Any, there: bool = True) -> Any:
    for tensor in tree_leaves(values):
        if isinstance(tensor, Tensor):
            with torch._C.DisableTorchFunction():
                storage = tensor.untyped_storage()
                if there:
                    _there.setdefault(storage._cdata, StorageWeakRef(storage))
                else:
                    _there.pop(storage._cdata, None)
    return values


def _means_gpu(device: Any) -> bool:
    return not isinstance(device, bool) and (isinstance(device, int) or torch.device(device).type == "cuda")


def _group_names(arguments: Any) -> set[str]:
    """Names of the process groups among the arguments of a collective."""
    names = set()
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            names.add(torch.distributed.ProcessGroup.unbox(argument).group_name)
    return names


class FarDevice(TorchDispatchMode):
    """The mode that refuses what a GPU would refuse; results of GPU tensors are on the GPU.

    Attributes:
        waits: the operations for which the host waited, and their lines in the library.
        kernels: number of operations, without views and empty tensors.
        groups_of_gloo: names of process groups that take tensors of the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: collections.Counter[str] = collections.Counter()
        self.kernels = 0
        self.groups_of_gloo: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        near = [value for value in tensors if not is_there(value)]
        if func.namespace == "c10d":
            is_over_gloo = len(near) == len(tensors) and self.groups_of_gloo.intersection(_group_names(args))
            if near and "barrier" not in func.name() and not is_over_gloo:
                raise RuntimeError(f"{func}: nccl was given a tensor of the host")
            return func(*args, **kwargs)
        if len(near) == len(tensors):
            return func(*args, **kwargs)
        self._check(func, args, near)
        self._count(func, args, kwargs, bool(near))
        result = func(*args, **kwargs)
        return result if func is aten.copy_.default else _put(result)

    def _check(self, func: Any, args: Any, near: list[Tensor]) -> None:
        """Refuse CPU tensors beside those of the GPU, except single numbers and the indices of a tensor."""
        mixed = [value for value in near if value.dim() or func in _JOINING]
        if func in _INDEXING:
            mixed = [value for value in mixed if any(value is allowed for allowed in (args[0], *args[2:3]))]
        if mixed and func not in (aten.copy_.default, aten._to_copy.default):
            raise RuntimeError(f"{func}: expected all tensors to be on one device, found cuda:0 and cpu")

    def _count(self, func: Any, args: Any, kwargs: Any, mixed: bool) -> None:
        crosses = mixed and (func in _INDEXING or func is aten.copy_.default)
        # The host need not wait for tensors that it sends with non_blocking.
        crosses &= not (func is aten.copy_.default and args[2:] == (True,) and is_there(args[0]))
        flags = func in _INDEXING and any(_is_flags(index) for index in args[1])
        shaped = func in _DATA_SHAPES and kwargs.get("output_size") is None
        if func is aten._local_scalar_dense.default or shaped or flags or crosses:
            self.wait(func)
        self.kernels += not (func.is_view or "empty" in func.name())

    def wait(self, func: Any) -> None:
        """Count a wait of the host, and remember the line of the library that called the operation."""
        frames = [(Path(frame.filename), frame.lineno) for frame in reversed(traceback.extract_stack())]
        lines_of_library = (
            f"{p.name}:{line}" for p, line in frames if "megatron_rc" in p.parts and "tests" not in p.parts
        )
        self.waits[f"{func} at {next(lines_of_library, 'a test')}"] += 1


def _is_flags(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


class Answering(TorchFunctionMode):
    """The mode that answers for a tensor's device, and moves tensors between the two devices."""

    def __init__(self, device: FarDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == _DEVICE:
            return GPU if is_there(args[0]) else func(*args)
        if func == _IS_CUDA:
            return is_there(args[0])
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda." if is_there(args[0]) else "torch.", 1)
        if func in (Tensor.cuda, Tensor.cpu):
            return self._moved(args[0], GPU if func is Tensor.cuda else CPU)
        if func is Tensor.pin_memory:
            return args[0].clone()
        if func is Tensor.tolist:
            return func(self._moved(args[0], CPU))
        if func is Tensor.numpy and is_there(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if func is Tensor.to:
            return self._to(*args, **kwargs)
        kwargs.pop("pin_memory", None)
        device = kwargs.get("device")
        if device is None:
            return func(*args, **kwargs)
        result = func(*args, **kwargs | {"device": CPU})
        if func in (torch.tensor, torch.as_tensor):  # made on the host, and sent
            return self._moved(result, device)
        if _means_gpu(device) and isinstance(result, Tensor):
            self.device.kernels += "empty" not in func.__name__
        return _put(result, _means_gpu(device))

    def _to(
        self,
        tensor: Tensor,
        *args: Any,
        device: Any = None,
        dtype: Any = None,
        non_blocking: bool = False,
        copy: bool = False,
        **_: Any,
    ) -> Tensor:
        for value in args:
            if isinstance(value, Tensor):
                device = GPU if is_there(value) else CPU
                dtype = value.dtype
            elif isinstance(value, torch.dtype):
                dtype = value
            elif value is not None and not isinstance(value, bool):
                device = value
        return self._moved(torch._C.TensorBase.to(tensor, dtype or tensor.dtype, copy=copy), device, non_blocking)

    def _moved(self, tensor: Tensor, device: Any, non_blocking: bool = False) -> Tensor:
        if device is None or _means_gpu(device) == is_there(tensor):
            return tensor
        self.device.kernels += 1
        if not (non_blocking and _means_gpu(device)):
            self.device.wait("to")
        return _put(torch._C.TensorBase.to(tensor, tensor.dtype, copy=True), _means_gpu(device))


@contextmanager
def far_device() -> Iterator[FarDevice]:
    """Pretend the device :data:`GPU` inside this block, without Triton."""
    from megatron_rc.parallel import kernels

    device = FarDevice()
    mode = Answering(device)
    backward = mock.patch.object(torch.autograd, "_engine_run_backward", run_backward(mode))
    with mode, device, backward, mock.patch.object(kernels, "uses_triton", return_value=False):
        yield device


def run_backward(mode: Answering) -> Callable[..., Any]:
    """PyTorch's backward with the mode, which does not see its own calls."""
    run = torch.autograd._engine_run_backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run(*args, **kwargs)

    return backward
