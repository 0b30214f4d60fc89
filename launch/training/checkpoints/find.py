"""Choice of the checkpoint that is loaded: the newest by the tracker file, or the one of ``--ckpt-step``."""

from __future__ import annotations

import logging
from pathlib import Path

import torch.distributed as dist

from megatron_rc.launch.checkpoint_folders import (
    TRACKER,
    iteration_folder,
    iterations,
    latest_iteration,
    restore,
)
from megatron_rc.launch.distributed import largest_over_ranks
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.checkpoints.checksums import MANIFEST, check_files

_log = logging.getLogger("megatron_rc")


def checked_checkpoint(
    load: str | Path,
    iteration: int | None = None,
    *,
    checksums: bool = True,
    rank: int = 0,
    ranks: int = 1,
) -> tuple[int, Path]:
    """Return a checkpoint's number and folder after a comparison of its files with their checksums.

    A whole checkpoint may still be hostile: see :func:`unpickling.check_pickles`.

    Args:
        load: folder of checkpoints.
        iteration: number of the checkpoint; None: the newest.
        checksums: read the files; False: compare sizes alone.
        rank: number of this process, which reads every ``ranks``-th file.
        ranks: number of processes.

    Raises:
        ValueError: the folder holds no such checkpoint, or it is damaged.
    """
    number = latest_iteration(load) if iteration is None else iteration
    if number is None:
        raise ValueError(f"{load} holds no checkpoint ({TRACKER} is missing): name another folder")
    present = iterations(load)
    in_words = ", ".join(map(str, present)) or "none"
    if number not in present:
        raise ValueError(f"{load} holds no checkpoint {number}; there are {in_words}")
    if iteration is None and present[-1] > number and rank == 0:
        # The tracker file has no checksum of its own.
        _log.warning(
            "%s: %s names checkpoint %d, but checkpoint %d is there too: --ckpt-step %d takes it",
            load,
            TRACKER,
            number,
            present[-1],
            present[-1],
        )
    folder = iteration_folder(load, number)
    if not (folder / MANIFEST).is_file():
        if rank == 0:
            _log.warning("%s has no %s: its files are not verified", folder, MANIFEST)
        return number, folder
    try:
        check_files(folder, rank=rank, ranks=ranks, checksums=checksums)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{load}: checkpoint {number} is damaged: {error}; --ckpt-step takes another one (there are {in_words})"
        ) from error
    return number, folder


def find_checkpoint(load: str, config: RunConfig, name: str = "--load") -> tuple[int, Path] | None:
    """Return number and folder of the checkpoint to load, on every rank; None: ``--load`` is ``--save`` and is empty.

    Each rank reads its share of the files.

    Args:
        load: folder of checkpoints.
        config: settings of the run; ``--ckpt-step`` counts for ``--load`` alone.
        name: flag that names the folder.

    Raises:
        ValueError: there is no such checkpoint, it is damaged, or the ranks see different folders.

    Collectives: a barrier, and one MAX of two numbers over all ranks.
    """
    is_load = name == "--load"
    if dist.get_rank() == 0 and config.checkpoints.is_save(load):
        restore(load)  # a killed run may have been replacing it
    dist.barrier()
    number = config.checkpoints.ckpt_step if is_load else None
    if number is None:
        number = latest_iteration(load)
    numbers = [-1.0, 1.0] if number is None else [number, -number]
    largest, negative_smallest = largest_over_ranks(config, numbers)
    if largest != -negative_smallest:
        raise ValueError(
            f"{name} {load}: some ranks find checkpoint {largest:.0f}, others {-negative_smallest:.0f} (-1: none): "
            "give a folder that all machines share"
        )
    if number is None and is_load and config.checkpoints.is_save(load):
        return None
    step = config.checkpoints.ckpt_step if is_load else None
    try:
        return checked_checkpoint(
            load,
            step,
            checksums=config.checkpoints.verify_integrity,
            rank=dist.get_rank(),
            ranks=dist.get_world_size(),
        )
    except ValueError as error:
        raise ValueError(f"{name} {error}") from error
