"""A pretended GPU: the launcher takes its GPU path with CPU tensors that say they are on a GPU.

Like a GPU and nccl it refuses operations on tensors of two devices, and host tensors in a collective. ``far_device``
does so for the correction alone, and counts waits of the host. The numbers are the CPU's; kernels, streams and the
GPU's memory are not simulated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten
_COPIES = (aten.copy_.default, aten._to_copy.default)
_INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)
_JOINING = (aten.cat.default, aten.stack.default)  # refuse even single numbers of the host
_DEVICE, _IS_CUDA = Tensor.device.__get__, Tensor.is_cuda.__get__
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


class _Refusing(TorchDispatchMode):
    """The mode that refuses what a GPU would refuse; results of GPU tensors are on the GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        near = [value for value in given if not is_there(value)]
        if func.namespace == "c10d":
            if near and "barrier" not in func.name():
                raise RuntimeError(f"{func}: nccl was given a tensor of the host")
            return func(*args, **(kwargs or {}))
        some = len(near) < len(given)
        mixed = [value for value in near if value.dim() or func in _JOINING]
        if func in _INDEXING:
            # A GPU takes indices from the host.
            mixed = [value for value in mixed if any(value is other for other in (args[0], *args[2:3]))]
        if some and mixed and func not in _COPIES:
            raise RuntimeError(f"{func}: expected all tensors to be on one device, found cuda:0 and cpu")
        found = func(*args, **(kwargs or {}))
        return _put(found) if some and func is not aten.copy_.default else found


class _Answering(TorchFunctionMode):
    """The mode that answers for a tensor's device, and moves tensors between the two devices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == _DEVICE:
            return GPU if is_there(args[0]) else func(*args)
        if func == _IS_CUDA:
            return is_there(args[0])
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda." if is_there(args[0]) else "torch.", 1)
        if func in (Tensor.cuda, Tensor.cpu):
            return _moved(args[0], GPU if func is Tensor.cuda else CPU)
        if func is Tensor.pin_memory:
            return args[0].clone()
        if func is Tensor.numpy and is_there(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if func is Tensor.to:
            return _to(*args, **kwargs)
        kwargs.pop("pin_memory", None)
        device = kwargs.get("device")
        if device is None:
            return func(*args, **kwargs)
        return _put(func(*args, **kwargs | {"device": CPU}), _means_gpu(device))


def _to(tensor: Tensor, *args: Any, device: Any = None, dtype: Any = None, copy: bool = False, **_: Any) -> Tensor:
    for value in args:
        if isinstance(value, Tensor):
            device, dtype = GPU if is_there(value) else CPU, value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        elif value is not None and not isinstance(value, bool):
            device = value
    return _moved(torch._C.TensorBase.to(tensor, dtype or tensor.dtype, copy=copy), device)


def _moved(tensor: Tensor, device: Any) -> Tensor:
    if device is None or _means_gpu(device) == is_there(tensor):
        return tensor
    return _put(torch._C.TensorBase.to(tensor, tensor.dtype, copy=True), _means_gpu(device))


class _HostGenerator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> _HostGenerator:
        return super().__new__(cls, "cpu")


def _stand_ins(mode: _Answering) -> Iterator[tuple[Any, str, Any]]:
    """(owner, attribute, stand-in) of functions that need a GPU."""
    import torch.distributed as dist

    from megatron_rc.launch.training.batches import advantages
    from megatron_rc.launch.training.models import cpu
    from megatron_rc.parallel import groups, kernels
    from megatron_rc.training import rollout_correction

    yield from cpu._replacements()
    for name, answer in (("current_device", 0), ("is_available", True), ("device_count", 1), ("set_device", None)):
        yield torch.cuda, name, lambda *_, answer=answer: answer
    yield torch.cuda, "get_device_name", lambda *_: "NVIDIA H200"
    yield torch.cuda, "get_device_capability", lambda *_: (9, 0)
    yield torch.cuda, "max_memory_allocated", lambda *_: 2**30
    yield torch, "Generator", _HostGenerator
    for name in ("_cuda_graph_capture_health_check", "_accelerator_graph_capture_health_check"):
        yield torch.optim.Optimizer, name, lambda _: None
    initialize, run_backward = dist.init_process_group, torch.autograd._engine_run_backward
    yield dist, "init_process_group", lambda _, **rest: initialize("gloo", **rest)
    yield dist.distributed_c10d, "_get_object_coll_device", lambda _: "cuda"  # as with nccl
    for module in (groups, rollout_correction, advantages):
        yield module, "group_device", lambda group: CPU if group is None else GPU
    yield kernels, "uses_triton", lambda _: False

    def backward(*args: Any, **kwargs: Any) -> Any:
        with mode:  # a mode does not see its own calls
            return run_backward(*args, **kwargs)

    yield torch.autograd, "_engine_run_backward", backward


@contextlib.contextmanager
def tagged_gpu() -> Iterator[None]:
    """Pretend a GPU inside this block; for a process of its own that has not imported Megatron."""
    from megatron_rc.launch.training.models import cpu

    mode = _Answering()
    with contextlib.ExitStack() as stack:
        stack.enter_context(cpu.without_compiler())
        import megatron_rc.launch.training.loop  # noqa: F401

        for owner, name, stand_in in list(_stand_ins(mode)):
            stack.enter_context(mock.patch.object(owner, name, stand_in, create=True))
        stack.enter_context(mode)
        stack.enter_context(_Refusing())
        yield
