"""Places of the ranks in the parallel layout, and the ranks that sample."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from megatron_rc.launch.run_config import RunConfig

# A longer table is cut in the middle.
_MOST_ROWS = 16


class Place(NamedTuple):
    """Place of one rank; ``engine`` names the engine that samples on it, empty if none does."""

    rank: int
    pp: int
    dp: int
    cp: int
    tp: int
    ep: int
    engine: str


def places(config: RunConfig) -> list[Place]:
    """Places of all ranks in Megatron's order: TP varies fastest, then CP, DP and PP.

    Experts have an order of their own within a stage: the ranks that split one expert vary fastest, then EP.
    """
    parallel = config.parallel
    tp = parallel.tensor_model_parallel_size
    cp = parallel.context_parallel_size
    stage = tp * cp * config.data_parallel_size
    engine = "" if config.rollouts.load_rollouts else config.engine.rollout_engine
    places_of_ranks = []
    for rank in range(config.launch.world_size):
        pp, inside = divmod(rank, stage)
        dp, of_replica = divmod(inside, tp * cp)
        ep = inside // config.expert_tensor_parallel_size % parallel.expert_model_parallel_size
        engine_of_rank = engine if of_replica == 0 and pp == 0 else ""
        place = Place(rank, pp, dp, of_replica // tp, of_replica % tp, ep, engine_of_rank)
        places_of_ranks.append(place)
    return places_of_ranks


def places_in_words(ranks: Sequence[Place]) -> list[str]:
    """A table with a row for each stage and replica, cut in the middle if it is long."""
    blocks = [list(block) for _, block in groupby(ranks, key=lambda place: (place.pp, place.dp))]
    rows = []
    for block in blocks:
        ends = ((min(numbers), max(numbers)) for numbers in zip(*(place[:-1] for place in block), strict=True))
        engine = next((f"{place.engine} on {place.rank}" for place in block if place.engine), "")
        rows.append([*(str(low) if low == high else f"{low}-{high}" for low, high in ends), engine])
    if len(rows) > _MOST_ROWS:
        left_out = len(rows) - _MOST_ROWS
        half = _MOST_ROWS // 2
        rows = [*rows[:half], [f"… {left_out} more"], *rows[-half:]]
    return aligned([["ranks", *Place._fields[1:]], *rows])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table with aligned columns; a row of one cell is a remark without columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*(row for row in rows if len(row) > 1), strict=True)]
    lines = []
    for row in rows:
        cells = row if len(row) == 1 else [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines
