"""A pool of processes that stays up for the whole run and forms one process group after the other.

Importing torch and Megatron takes seconds a process, so ranks are forked once from a server that has loaded them. They
meet under a fresh name in one store. Groups of earlier layouts are kept until the ranks are renewed: closing one of
gloo's connections waits for a thread that wakes every ten milliseconds, and a layout has dozens of connections.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.distributed import TCPStore

COLLECTIVE_SECONDS = 180
VICTIM_SECONDS = 1
# Layouts after which the ranks are renewed: groups of earlier layouts hold about forty descriptors each on eight ranks.
RENEWED = 16


@dataclass(frozen=True)
class Layout:
    """Number of ranks that split each dimension; experts are split over ``ep`` of the data and context ranks.

    ``etp``: ranks that share one expert's matrices; 0: as many as share the others'. ``vpp``: each stage has two
    virtual ones, of one layer unless ``stages``, a ``--pipeline-model-parallel-layout``, says otherwise.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    vpp: bool = False
    sp: bool = False
    ep: int = 1
    etp: int = 0
    stages: str = ""

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    def flags(self) -> list[str]:
        """The launcher's flags that make this layout."""
        flags = [
            f"--tensor-model-parallel-size={self.tp}",
            f"--pipeline-model-parallel-size={self.pp}",
            f"--context-parallel-size={self.cp}",
            f"--expert-model-parallel-size={self.ep}",
        ]
        if self.etp:
            flags.append(f"--expert-tensor-parallel-size={self.etp}")
        if self.sp:
            flags.append("--sequence-parallel")
        if self.stages:
            flags.append(f"--pipeline-model-parallel-layout={self.stages}")
        elif self.vpp:
            flags.append("--num-layers-per-virtual-pipeline-stage=1")
        return flags

    def __str__(self) -> str:
        names = ("tp", "cp", "pp", "dp", "ep")
        parts = [f"{name}{getattr(self, name)}" for name in names if getattr(self, name) > 1]
        if self.etp:
            parts.append(f"etp{self.etp}")
        if self.vpp:
            parts.append("vpp")
        if self.sp:
            parts.append("sp")
        if self.stages:
            parts.append(self.stages)
        return "-".join(parts) or "single"


class RankFailure(AssertionError):
    """The first rank that failed, with its traceback."""


def server_context() -> Any:
    """The context whose processes are forked with a rank's modules already loaded, by a server that loads them now."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    forkserver.ensure_running()
    return context


class RankPool:
    """Runs one function on several ranks at once."""

    def __init__(self) -> None:
        self.context = server_context()
        # Port 0: any free port.
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.workers: list[tuple[Any, Connection]] = []
        self.meetings = 0
        self.layout: Layout | None = None

    def run(self, function: Callable[..., Any], layout: Layout, *args: Any, timeout: float = 400) -> list[Any]:
        """The results of ``function(*args)`` on the layout's ranks, in rank order.

        The function is found by its module and name. Megatron's groups are the layout's.
        """
        if layout != self.layout:
            self.meetings += 1
            if self.meetings % RENEWED == 0:
                self.close()
        while len(self.workers) < layout.world:
            self._start()
        self.layout = layout
        meeting = (self.store.port, f"meeting-{self.meetings}")
        connections = [connection for _, connection in self.workers[: layout.world]]
        for rank, connection in enumerate(connections):
            connection.send((layout, rank, meeting))
            # Anew for each: memory that tensors share, such as a parameter's, is handed over once.
            connection.send_bytes(Copying.dumps((function, args)))
        return self._collect(connections, timeout)

    def close(self, seconds: float = 5) -> None:
        """End the workers; workers that do not leave in time are killed."""
        for _, connection in self.workers:
            connection.close()
        for process, _ in self.workers:
            process.join(seconds)
            process.kill()
            process.join()
        self.workers = []
        self.layout = None

    def _start(self) -> None:
        """Start one more worker."""
        our_end, workers_end = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(workers_end,))
        process.start()
        workers_end.close()
        self.workers.append((process, our_end))

    def _collect(self, connections: Sequence[Connection], timeout: float) -> list[Any]:
        """The answers of all ranks; RankFailure with the first failure, or if some do not answer in time."""
        results: dict[int, Any] = {}
        failures: list[tuple[float, int, str]] = []
        deadline = time.monotonic() + timeout
        while len(results) + len(failures) < len(connections):
            answered = results.keys() | {rank for _, rank, _ in failures}
            waiting = [connection for rank, connection in enumerate(connections) if rank not in answered]
            ready = wait(waiting, timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                break
            for connection in ready:
                rank = connections.index(connection)
                try:
                    succeeded, value, when = connection.recv()
                except EOFError:
                    succeeded = False
                    value = "the process died"
                    when = time.time()
                if succeeded:
                    results[rank] = value
                else:
                    failures.append((when, rank, value))
                    # Ranks that wait for the failed one cannot go on.
                    deadline = min(deadline, time.monotonic() + VICTIM_SECONDS)
        if len(results) == len(connections):
            return [results[rank] for rank in range(len(connections))]
        self.close(seconds=0)
        if not failures:
            raise RankFailure(f"only ranks {sorted(results)} of {len(connections)} answered in {timeout} s")
        _, rank, text = min(failures)
        raise RankFailure(f"rank {rank} of {len(connections)}:\n{text}")


class Copying(ForkingPickler):
    """A pickler that writes the numbers of tensors; torch's shares their memory, which takes many times as long."""

    def reducer_override(self, value: Any) -> Any:
        plain = type(value) is torch.Tensor and value.device.type == "cpu" and value.is_contiguous()
        if not plain or value.requires_grad or value.is_conj():
            return NotImplemented
        return _tensor_of, (value.reshape(-1).view(torch.uint8).numpy(), value.dtype, value.shape)


def _tensor_of(numbers: np.ndarray, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(numbers).view(dtype).view(shape)


def _serve(connection: Connection) -> None:
    """Run the calls that come over the connection, until it is closed: the main function of a worker."""
    import gc
    import importlib
    import logging
    import os
    import warnings

    from megatron_rc.launch.training.models.cpu import cpu_backend

    # Loaded already, unless the server was started in a folder from which it could not find the module.
    importlib.import_module("tests.support.preloaded")
    # Never collect the server's objects.
    gc.freeze()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    joined = None
    # Drawing takes half the time of a run of a few steps.
    without_pictures = mock.patch("megatron_rc.launch.training.reporting.reporter.draw_run")
    with cpu_backend(), without_pictures, contextlib.suppress(EOFError):
        while True:
            layout, rank, meeting = connection.recv()
            call = connection.recv_bytes()
            try:
                if joined != meeting:
                    _join(layout, rank, meeting)
                    joined = meeting
                function, args = pickle.loads(call)
                connection.send_bytes(Copying.dumps((True, function(*args), time.time())))
            except BaseException:
                connection.send((False, traceback.format_exc(), time.time()))
    os._exit(0)  # at once, without closing connections


_EARLIER_GROUPS: list[Any] = []  # never read: a group that nothing refers to would be closed


@functools.cache
def _store(port: int) -> TCPStore:
    """One connection to the store for all meetings: every seventh new connection waited five seconds for an answer."""
    return TCPStore("127.0.0.1", port)


def _join(layout: Layout, rank: int, meeting: tuple[int, str]) -> None:
    """Leave the groups of the earlier layout, and make those of this one as ``rank`` of it."""
    import gc

    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    if dist.is_initialized():
        _EARLIER_GROUPS.extend(dist.distributed_c10d._world.pg_map)
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        # Models and trainers are reference cycles, which hold memory.
        gc.collect()
    port, name = meeting
    store = dist.PrefixStore(name, _store(port))
    timeout = timedelta(seconds=COLLECTIVE_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.world, timeout=timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=2 if layout.vpp else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp or None,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
