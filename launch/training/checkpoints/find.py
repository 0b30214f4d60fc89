"""Choice of the checkpoint that a run goes on from: the newest, if it is whole."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rc.launch.distributed import AgreedError, agree
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.checkpoints import manifest
from megatron_rc.launch.training.checkpoints.folders import (
    TRACKER,
    iteration_folder,
    iterations,
    latest_iteration,
    restore,
)
from megatron_rc.parallel.collectives import all_reduce_max

_log = logging.getLogger("megatron_rc")


def checked_checkpoint(load: str | Path, iteration: int | None = None, *, checksums: bool = True) -> tuple[int, Path]:
    """Return a checkpoint's number and folder, for one process without other ranks.

    A whole checkpoint may still be hostile: read it by ``reading.CheckpointReader``.

    Args:
        load: the folder of all checkpoints.
        iteration: number of the checkpoint; None: the newest.
        checksums: read and compare all files; False: compare sizes alone.

    Raises:
        ValueError: the folder holds no such checkpoint, or it is damaged.
    """
    found = latest_iteration(load) if iteration is None else iteration
    if iteration is None and found is not None:
        _name_newer(load, found)
    if iteration is not None and iteration not in iterations(load):
        there = ", ".join(map(str, iterations(load))) or "none"
        raise ValueError(f"{load} holds no checkpoint {iteration}; there are {there}")
    if found is None:
        raise ValueError(f"{load} holds no checkpoint ({TRACKER} is missing): name another folder")
    folder = iteration_folder(load, found)
    problem = manifest.damage(folder, checksums=checksums)
    if problem is not None:
        raise ValueError(f"{load}: checkpoint {found} is damaged: {problem}; {_other_whole(load, found, checksums)}")
    return found, folder


def _other_whole(load: str | Path, damaged: int, checksums: bool) -> str:
    """Name the newest whole checkpoint as a remedy for a damaged one."""
    for number in reversed(iterations(load)):
        if number != damaged and manifest.damage(iteration_folder(load, number), checksums=checksums) is None:
            return f"--ckpt-step {number} takes one that is whole"
    return "no other checkpoint there is whole"


def find_checkpoint(load: str, config: RunConfig, name: str = "--load") -> int | None:
    """Return the newest checkpoint, or with ``--load-last-valid`` the newest whole one; None: the folder is empty.

    Args:
        load: the folder of all checkpoints.
        config: of the run.
        name: the flag that names the folder.

    Raises:
        AgreedError: on every rank: the newest is damaged; the message names the last whole one.
    """
    _restore_own(load, config)
    found, damage = _agreed_latest_iteration(load, config, name)
    if damage is None and found is not None:
        damage = _agreed_damage(load, found, config, name)
        if damage is not None:
            damage = f"checkpoint {found} is damaged: {damage}"
    if damage is None:
        if found is not None and dist.get_rank() == 0:
            _name_newer(load, found, f"{name} ")
        return found
    # Checkpoints after the newest belong to another run.
    others = [number for number in reversed(_agreed_iterations(load, config, name)) if found is None or number < found]
    whole = next((number for number in others if _agreed_damage(load, number, config, name) is None), None)
    if whole is None:
        older = "no other checkpoint there" if found is None else "no older checkpoint there"
        raise AgreedError(f"{name} {load}: {damage}; {older} is whole")
    if not config.checkpoints.load_last_valid:
        raise AgreedError(f"{name} {load}: {damage}; --load-last-valid goes on from checkpoint {whole}, which is whole")
    if dist.get_rank() == 0:
        _log.warning("%s %s: %s; the run goes on from checkpoint %d", name, load, damage, whole)
    return whole


def _name_newer(load: str | Path, found: int, flag: str = "") -> None:
    """Warn if the tracker names an older checkpoint than the newest whole one: the file has no checksum.

    Compares sizes alone, since reading a checkpoint may take minutes.
    """
    with suppress(OSError):
        newer = [number for number in reversed(iterations(load)) if number > found]
        whole = (n for n in newer if manifest.damage(iteration_folder(load, n), checksums=False) is None)
        newest = next(whole, None)
        if newest is not None:
            _log.warning(
                "%s%s: %s names checkpoint %d, but checkpoint %d is there and complete: write %d into that file to "
                "take it, or move it away",
                *(flag, load, TRACKER, found, newest, newest),
            )


def _restore_own(load: str, config: RunConfig) -> None:
    """Bring back a checkpoint that a killed run was replacing, if the folder is also ``--save``."""
    if dist.get_rank() == 0 and config.checkpoints.is_save(load):
        with suppress(OSError):  # the missing checkpoint is named later
            restore(load)
    agree(config)


def _agreed_latest_iteration(load: str, config: RunConfig, name: str) -> tuple[int | None, str | None]:
    """Return ``latest_iteration`` of ``--load`` and its error, the same on every rank."""
    found, error = None, None
    try:
        found = latest_iteration(load)
    except (OSError, ValueError) as problem:
        error = str(problem)
    error = _agreed(config, error)
    number = -1 if found is None else found
    numbers = torch.tensor([number, -number], device=config.launch.device)
    highest, lowest = all_reduce_max(numbers, dist.group.WORLD).tolist()
    if highest != -lowest:
        raise ValueError(
            f"{name} {load}: some ranks find checkpoint {highest}, others {-lowest} (-1: none): give a folder "
            "that all machines share"
        )
    return found, error


def _agreed_damage(load: str, iteration: int, config: RunConfig, name: str) -> str | None:
    """Return the damage of a checkpoint, the same on every rank; each rank reads a share of the files."""
    folder = iteration_folder(load, iteration)
    problem = _agreed(config, manifest.damage(folder, checksums=config.checkpoints.verify_integrity))
    if problem is None and dist.get_rank() == 0 and not manifest.has_manifest(folder):
        _log.warning("%s %s: checkpoint %d has no checksums: only sizes were looked at", name, load, iteration)
    return problem


def _agreed_iterations(load: str, config: RunConfig, name: str) -> list[int]:
    """Return rank 0's list of checkpoints."""
    found: list[Any] = [None]
    error = None
    if dist.get_rank() == 0:
        try:
            found = [iterations(load)]
        except OSError as problem:
            error = f"{name} {load} cannot be read ({problem.strerror})"
    agree(config, error)
    dist.broadcast_object_list(found, src=0)
    return list(found[0])


def _agreed(config: RunConfig, error: str | None) -> str | None:
    """Return the error of the first rank that has one."""
    try:
        agree(config, error)
    except AgreedError as agreed:
        return str(agreed)
    return None
