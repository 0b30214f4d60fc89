"""Our correction of a random batch on ranks that hold parts of it, in processes of their own."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.adaptors.check.comparison import ROWS, WIDTH, Batch
from megatron_rc.batch.chain import correct_rollouts
from megatron_rc.parallel.collectives import all_reduce_sum
from megatron_rc.parallel.groups import ParallelGroups, group_rank
from megatron_rc.parallel.layout import SequenceLayout
from megatron_rc.settings.config import RolloutCorrectionConfig

RANKS = 2
SECONDS = 300
Found = tuple[list[float], list[float]]  # weights, NaN without any, and accepted tokens, of all ROWS · WIDTH places


def on_ranks(function: Callable[..., Any], *args: Any, modules: Sequence[str] = ()) -> list[Any]:
    """The results of ``function(*args)`` on each of the two ranks of a gloo group; lists and numbers, no tensors.

    ``modules``: modules that the function imports when it runs.
    """
    context = multiprocessing.get_context("forkserver")
    # The ranks are forks of one process that has loaded torch and Megatron, which takes seconds a process.
    context.set_forkserver_preload([function.__module__, *modules])
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(RANKS, mp_context=context) as pool:
        store = f"file://{folder}/store"
        results = [pool.submit(_run, rank, store, function, args) for rank in range(RANKS)]
        return [result.result(SECONDS) for result in results]


def _run(rank: int, store: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=SECONDS))
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()


def joined(places: Tensor, values: Tensor, number: int) -> list[float]:
    """The values of all ranks, each at one of ``number`` places, which no other rank has."""
    local = torch.zeros(number).index_put((places.flatten(),), values.flatten().float())
    return list(all_reduce_sum(local, dist.group.WORLD).tolist())


def corrected_shards(dialect: str, settings: Mapping[str, Mapping[str, Any]], seed: int) -> dict[str, dict[str, Found]]:
    """The correction of the whole batch, from the parts of all ranks, for each setting and each way to cut it."""
    return {
        name: {
            f"{RANKS} {kind} ranks": _corrected(kind, RolloutCorrectionConfig.from_dict(fields, dialect=dialect), seed)
            for kind in ("context", "data")
        }
        for name, fields in settings.items()
    }


def _corrected(kind: str, config: RolloutCorrectionConfig, seed: int) -> Found:
    group = dist.group.WORLD
    batch = Batch.random(seed)
    rank = group_rank(group)
    number = ROWS * WIDTH
    rows = list(range(ROWS)) if kind == "context" else list(range(rank, ROWS, RANKS))
    places = torch.arange(number).view(ROWS, WIDTH)
    parts = [values[rows] for values in (batch.old, batch.rollout, batch.mask, places)]
    layout = None
    groups = ParallelGroups(dp=group, dp_cp=group)
    if kind == "context":
        layout = SequenceLayout.padded(ROWS, WIDTH // RANKS, cp_rank=rank, cp_size=RANKS)
        parts = [layout.cut(part) for part in parts]
        groups = ParallelGroups(cp=group, dp_cp=group)
    old, rollout, mask, places = parts
    result = correct_rollouts(old, rollout, mask, config, layout, groups, sequence_ids=torch.tensor(rows))
    result.check()
    assert isinstance(result.mask, Tensor)
    weights = result.weights if isinstance(result.weights, Tensor) else torch.full_like(old, torch.nan)
    return joined(places, weights, number), joined(places, result.mask, number)
