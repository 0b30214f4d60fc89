"""The CPU switch: Megatron-Core on processes without a GPU.

megatron.core contains ``device="cuda"``, ``torch.cuda.current_device()``, ``.cuda()`` and type names of CUDA tensors.
``cpu_backend()`` maps them to the CPU while it is active. It is used with ``--cpu`` or if no CUDA device exists, and
logs one line. Runs on GPUs never import this module.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo
from torch.utils._device import _device_constructors

logger = logging.getLogger(__name__)

# megatron-core 0.16 uses this name always, but defines it only with Transformer Engine.
_MAY_BE_MISSING = ("te_general_gemm",)


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _made_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with the CPU instead of a CUDA device and without pinned memory in its keyword arguments."""

    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            kwargs.pop("pin_memory", None)
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = torch.device("cpu")
        return function(*args, **kwargs)

    return make


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Stand-in for ``Tensor.to``."""
    if _is_cuda(kwargs.get("device")):
        kwargs["device"] = torch.device("cpu")
    on_cpu: list[Any] = [torch.device("cpu") if _is_cuda(argument) else argument for argument in args]
    return torch._C.TensorBase.to(tensor, *on_cpu, **kwargs)


def _type(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Stand-in for ``Tensor.type``: the optimizers group parameters by the names of CUDA tensors."""
    type_name = torch._C.TensorBase.type(tensor, *args, **kwargs)
    return type_name.replace("torch.", "torch.cuda.", 1) if isinstance(type_name, str) else type_name


def _tensor_replacements() -> Iterator[tuple[Any, str, Any]]:
    """Replacements for functions that make or move tensors; see :func:`_replacements`.

    A ``TorchFunctionMode`` would be shorter, but every call of torch would pass through it: a tenth of a small step.
    """
    # The cache of _device_constructors must hold torch's own functions.
    names_of_constructors = {function.__name__ for function in _device_constructors()}
    names_of_constructors |= {name for name in dir(torch) if name.endswith("_like")}
    for owner, names in (
        (torch, names_of_constructors),
        (Tensor, {name for name in dir(Tensor) if name.startswith("new_")}),
    ):
        for name in sorted(names):
            if hasattr(owner, name):
                yield owner, name, _made_on_cpu(getattr(owner, name))
    yield from ((Tensor, "cuda", lambda tensor, *_, **__: tensor), (Tensor, "to", _to), (Tensor, "type", _type))


class _Stream:
    """A stand-in for CUDA streams; work on the CPU is done when a call returns, so nothing waits."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: _Stream) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *_: Any) -> _Stream:
        """Return an object that can be waited for."""
        return self


def _on_one_device(make: Callable[..., None]) -> Callable[..., None]:
    """The constructor of gloo's groups, with the devices of the first group for all later ones.

    The thread of a device wakes up a hundred times a second, also without work, and Megatron makes 18 groups.
    """
    devices = list[Any]()

    def make_on_one(group: Any, store: Any, rank: int, size: int, timeout: timedelta | Any) -> None:
        chooses_devices = not isinstance(timeout, timedelta)  # by options in the place of the limit
        if chooses_devices or not devices:
            make(group, store, rank, size, timeout)
            if not chooses_devices:
                devices.extend(group.options._devices)
            return
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = devices
        options._timeout = timeout
        make(group, store, rank, size, options)

    return make_on_one


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Stand-in for ``maybe_move_tensor_to_cpu``: Megatron's own would not convert a CPU tensor to numpy."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _gather(equal: Callable[..., Tensor], part: Tensor, group: Any, sizes: Any = None, *rest: Any) -> Tensor:
    """Gather parts of different lengths along the first dimension; ``equal`` gathers parts of equal length."""
    if sizes is None:
        return equal(part, group, None, *rest)
    longest = max(1, *sizes)
    padding = part.new_zeros(longest - len(part), *part.shape[1:])
    everything = equal(torch.cat([part, padding]), group).split(longest)
    return torch.cat([rows[:size] for rows, size in zip(everything, sizes, strict=True)])


def _expert_replacements() -> Iterator[tuple[Any, str, Any]]:
    """Replacements for a mixture of experts; see :func:`_replacements`."""
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # Transformer Engine's matrix products need a GPU; None makes the router use torch's.
    yield moe_utils, "te_general_gemm", None
    # all_to_all_single needs the lengths as numbers, not as a tensor.
    yield token_dispatcher, "maybe_move_tensor_to_cpu", _on_host
    # A class attribute, so restore it at the end.
    yield token_dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", _Stream()
    # An expert's TP ranks get different numbers of tokens; gloo gathers equal numbers only.
    yield mappings, "_gather_along_first_dim", partial(_gather, mappings._gather_along_first_dim)


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    """(owner, attribute, stand-in) for every CUDA function that megatron.core calls."""
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer import multi_latent_attention

    # Separate from the CPU's generator, which draws the initial weights. Megatron uses the CUDA generator only for
    # dropout, which the flag checks refuse.
    generator = torch.Generator()
    stream = _Stream()
    cpu = torch.device("cpu")
    yield torch.cuda, "current_device", lambda: cpu
    for owner, name in ((torch.cuda, "get_rng_state"), (megatron_random, "_get_cuda_rng_state")):
        yield owner, name, lambda *_, **__: generator.get_state()
    for owner, name in ((torch.cuda, "set_rng_state"), (megatron_random, "_set_cuda_rng_state")):
        yield owner, name, lambda state, *_, **__: generator.set_state(state)
    yield torch.cuda, "manual_seed", generator.manual_seed
    yield torch.cuda, "Stream", _Stream
    yield torch.cuda, "stream", lambda _: contextlib.nullcontext()
    for name in ("current_stream", "default_stream"):
        yield torch.cuda, name, lambda *_: stream
    cuda = torch.cuda
    nvtx = torch.cuda.nvtx
    for owner, name in ((cuda, "synchronize"), (cuda, "empty_cache"), (nvtx, "range_push"), (nvtx, "range_pop")):
        yield owner, name, lambda *_, **__: None
    # megatron-core 0.16 believes that Transformer Engine is installed if its own wrapper module is.
    yield multi_latent_attention, "HAVE_TE", False
    yield from _expert_replacements()


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Context in which ``torch.compile`` returns functions unchanged.

    Megatron-Core compiles its fusions at import, and a CPU uses none of them. Imported in this context, they stay
    uncompiled for the life of the process. This saves loading the compiler, the longest part of a rank's start.
    """

    def as_written(function: Any = None, **_: Any) -> Any:
        return as_written if function is None else function

    with mock.patch.object(torch, "compile", as_written):
        yield


@contextlib.contextmanager
def cpu_backend() -> Iterator[None]:
    """Context in which megatron.core runs on the CPU; logs one line."""
    logger.warning("Megatron-Core runs on the CPU (gloo, local modules, no fusions): for tests and small models")
    with contextlib.ExitStack() as stack:
        # Import all modules first, before any replacement is active.
        groups = (ProcessGroupGloo, "__init__", _on_one_device(ProcessGroupGloo.__init__))
        for owner, attribute, stand_in in [*_replacements(), *_tensor_replacements(), groups]:
            create = attribute in _MAY_BE_MISSING
            stack.enter_context(mock.patch.object(owner, attribute, stand_in, create=create))
        yield
