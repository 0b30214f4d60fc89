"""Process groups, and numbers that all ranks share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megatron_rc.launch.ending import ATTEMPT
from megatron_rc.launch.lost_ranks import LostRanks
from megatron_rc.launch.run_config import RunConfig

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# Fields of Megatron's configs that also shape its groups.
_OF_GROUPS = (
    "expert_tensor_parallel_size",
    "hierarchical_context_parallel_sizes",
    "pipeline_model_parallel_comm_backend",
)


def initialize(config: RunConfig, lost_ranks: LostRanks | None = None) -> None:
    """Join torchrun's processes, start to look for lost ranks, and make Megatron's groups."""
    from megatron.core import parallel_state, tensor_parallel

    if not config.launch.on_cpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(minutes=config.launch.distributed_timeout_minutes)
    if not dist.is_initialized():
        choose_interfaces()
        if lost_ranks is not None:
            lost_ranks.start()
        store, rank, world = _store_of_this_start(timeout)
        backend = "gloo" if config.launch.on_cpu else "nccl"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.parallel.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.parallel.context_parallel_size,
        expert_model_parallel_size=config.parallel.expert_model_parallel_size,
        **{name: value for name, value in config.megatron.given.items() if name in _OF_GROUPS},
        distributed_timeout_minutes=config.launch.distributed_timeout_minutes,
        create_gloo_process_groups=False,
    )
    te_rng_tracker = config.megatron.given.get("use_te_rng_tracker", False)
    tensor_parallel.model_parallel_cuda_manual_seed(config.training.seed, te_rng_tracker)
    if config.megatron.given.get("tp_comm_overlap"):
        _make_user_buffers(config)


def _make_user_buffers(config: RunConfig) -> None:
    """Make Transformer Engine's buffers for ``--tp-comm-overlap``, with Megatron-LM's arguments."""
    from transformer_engine.pytorch.module import base

    flags = config.megatron.given
    training = config.training
    kinds: dict[str, Any] = {"use_fp8": "fp8" in flags}
    modes = getattr(base, "UserBufferQuantizationMode", None)  # of Transformer Engine 2.7 and later
    if modes is not None:
        kinds = {"quantization_modes": [modes.FP8 if "fp8" in flags else modes.NONE]}
        if "fp8" in flags and flags.get("first_last_layers_bf16"):
            kinds["quantization_modes"].append(modes.NONE)
    tokens = training.micro_batch_size * training.seq_length // config.parallel.context_parallel_size
    base.initialize_ub(
        shape=[tokens, config.transformer.hidden_size],
        tp_size=config.parallel.tensor_model_parallel_size,
        ub_cfgs={},
        bootstrap_backend=flags.get("tp_comm_bootstrap_backend", "nccl"),
        **kinds,
    )


@contextmanager
def alone(config: RunConfig) -> Iterator[None]:
    """Make Megatron's groups of this one process inside the block, without torchrun."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    choose_interfaces()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        initialize(config)
        yield
    finally:
        shut_down()


def choose_interfaces() -> None:
    """Let gloo and NCCL connect the ranks of one machine over its loopback, unless the environment names interfaces.

    They would listen on a network's address, which gloo looks up by the machine's name for every group.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
        # Without "=" NCCL takes the name for the beginning of one.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={_LOOPBACK}")


def _store_of_this_start(timeout: timedelta) -> tuple[Store, int, int]:
    """Return the store for the ranks' addresses, this rank, and the number of ranks.

    torchrun keeps its store when it starts the ranks again (--max-restarts), with the addresses of dead ranks.
    """
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return PrefixStore(f"start {os.environ.get(ATTEMPT, '0')}", store), rank, world


def shut_down() -> None:
    """Leave all groups.

    In a process that lives on, gloo's threads end once nothing refers to a group: delete trainers and models, and call
    ``gc.collect()``.
    """
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def largest_over_ranks(config: RunConfig, numbers: Sequence[float]) -> list[float]:
    """Return the largest of each number over all ranks; ``numbers`` are equally many on each, and finite.

    Collectives: one MAX of the numbers, as float64, over all ranks.
    """
    shared = torch.tensor(numbers, dtype=torch.float64, device=config.launch.device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=dist.group.WORLD)
    largest: list[float] = shared.tolist()
    return largest
