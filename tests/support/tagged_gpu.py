"""The launcher's GPU path on the pretended GPU of ``far_device``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tests.support.by_sequence import attention_by_sequence
from tests.support.far_device import CPU, GPU, Answering, FarDevice, run_backward


class _HostGenerator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> _HostGenerator:
        return super().__new__(cls, "cpu")


def _stand_ins(mode: Answering, device: FarDevice) -> Iterator[tuple[Any, str, Any]]:
    """(owner, attribute, stand-in) of functions that need a GPU."""
    import torch.distributed as dist

    from megatron_rc.launch.training.batches import advantages
    from megatron_rc.launch.training.models import cpu, local_layers
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
    initialize = dist.init_process_group
    yield dist, "init_process_group", lambda _, **options: initialize("gloo", **options)
    yield from _object_collectives(dist, device)
    for module in (groups, rollout_correction, advantages):
        yield module, "group_device", lambda group: CPU if group is None else GPU
    yield kernels, "uses_triton", lambda _: False
    yield local_layers, "_varlen_function", lambda: attention_by_sequence
    yield torch.autograd, "_engine_run_backward", run_backward(mode)


def _object_collectives(dist: Any, device: FarDevice) -> Iterator[tuple[Any, str, Any]]:
    """Collectives of objects go over the device, as with nccl, but in groups that ask for gloo."""
    new_group = dist.new_group

    def remember(*arguments: Any, backend: str | None = None, **options: Any) -> Any:
        group = new_group(*arguments, backend=backend, **options)
        if backend == "gloo":
            device.groups_of_gloo.add(group.group_name)
        return group

    def device_of(group: Any) -> str:
        return "cpu" if group is not None and group.group_name in device.groups_of_gloo else "cuda"

    yield dist, "new_group", remember
    yield dist.distributed_c10d, "_get_object_coll_device", device_of


@contextlib.contextmanager
def tagged_gpu() -> Iterator[FarDevice]:
    """Pretend a GPU inside this block; for a process of its own that has not imported Megatron."""
    from megatron_rc.launch.training.models import cpu

    device = FarDevice()
    mode = Answering(device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(cpu.without_compiler())
        import megatron_rc.launch.training.loop  # noqa: F401

        for owner, name, stand_in in list(_stand_ins(mode, device)):
            stack.enter_context(mock.patch.object(owner, name, stand_in, create=True))
        stack.enter_context(_threads_on(mode, device))
        stack.enter_context(mode)
        stack.enter_context(device)
        yield device


def _threads_on(mode, device):
    """A patch: threads of engines compute on the device too; a mode of torch holds in one thread alone."""
    from megatron_rc.launch.rollouts.work_threads import WorkThreads

    work = WorkThreads._work

    def work_on_the_device(self):
        with mode, device:
            work(self)

    return mock.patch.object(WorkThreads, "_work", work_on_the_device)
