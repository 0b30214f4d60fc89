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
from megatron_rc.parallel.groups import ParallelGroups, group_rank, group_size
from megatron_rc.parallel.layout import SequenceLayout
from megatron_rc.settings.config import RolloutCorrectionConfig

RANKS = 2
SECONDS = 300


def on_ranks(function: Callable[..., Any], *args: Any, modules: Sequence[str] = ()) -> list[Any]:
    """The results of ``function(*args)`` on each of the two ranks of a gloo group; lists and numbers, no tensors.

    ``modules``: modules that the function imports when it runs.
    """
    context = multiprocessing.get_context("forkserver")
    # The ranks are forks of one process that has loaded torch and Megatron, which takes seconds a process.
    context.set_forkserver_preload([function.__module__, *modules])
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(RANKS, mp_context=context) as pool:
        given = (f"file://{folder}/store", function, args)
        results = [pool.submit(_run, rank, *given) for rank in range(RANKS)]
        return [result.result(SECONDS) for result in results]


def _run(rank: int, store: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=SECONDS))
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()


def sharded(
    dialect: str, settings: Mapping[str, Mapping[str, Any]], seed: int
) -> dict[str, dict[str, tuple[Tensor | None, Tensor]]]:
    """(weights or None, accepted tokens), [ROWS, WIDTH], for each of some settings and each way to cut the batch."""
    shards = on_ranks(corrected_shards, dialect, {name: dict(one) for name, one in settings.items()}, seed)
    found: dict[str, dict[str, tuple[Tensor | None, Tensor]]] = {name: {} for name in settings}
    for name, kind in shards[0]:
        places, weights, accepted = zip(*(shard[name, kind] for shard in shards), strict=True)
        whole = None if weights[0] is None else _joined(places, weights)
        found[name][f"{RANKS} {kind} ranks"] = (whole, _joined(places, accepted) != 0)
    return found


def _joined(places: Sequence[list[int]], values: Sequence[list[float]]) -> Tensor:
    """[ROWS, WIDTH] from the parts of all ranks."""
    index, flat = (torch.tensor([one for part in parts for one in part]) for parts in (places, values))
    return torch.zeros(ROWS * WIDTH).index_put((index,), flat).view(ROWS, WIDTH)


def corrected_shards(
    dialect: str, settings: Mapping[str, Mapping[str, Any]], seed: int
) -> dict[tuple[str, str], tuple[list[int], list[float] | None, list[float]]]:
    """(places in the flat batch, weights or None, accepted tokens) of this rank's part, for each setting and cut."""
    return {
        (name, kind): _corrected_shard(kind, RolloutCorrectionConfig.from_dict(one, dialect=dialect), seed)
        for name, one in settings.items()
        for kind in ("context", "data")
    }


def _corrected_shard(
    kind: str, config: RolloutCorrectionConfig, seed: int
) -> tuple[list[int], list[float] | None, list[float]]:
    group, batch = dist.group.WORLD, Batch.random(seed)
    rank, size = group_rank(group), group_size(group)
    rows = list(range(ROWS)) if kind == "context" else list(range(rank, ROWS, size))
    places = torch.arange(ROWS * WIDTH).view(ROWS, WIDTH)
    parts = [value[rows] for value in (batch.old, batch.rollout, batch.mask, places)]
    layout, groups = None, ParallelGroups(dp=group, dp_cp=group)
    if kind == "context":
        layout = SequenceLayout.padded(ROWS, WIDTH // size, cp_rank=rank, cp_size=size)
        parts, groups = [layout.cut(part) for part in parts], ParallelGroups(cp=group, dp_cp=group)
    old, rollout, mask, places = parts
    result = correct_rollouts(old, rollout, mask, config, layout, groups, sequence_ids=torch.tensor(rows))
    result.check()
    assert isinstance(result.mask, Tensor)
    weights = result.weights.flatten().tolist() if isinstance(result.weights, Tensor) else None
    return places.flatten().tolist(), weights, result.mask.float().flatten().tolist()
