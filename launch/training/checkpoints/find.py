"""Choice of the checkpoint that a run goes on from: the newest, if it is whole."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rc.launch.checkpoint_folders import (
    TRACKER,
    iteration_folder,
    iterations,
    latest_iteration,
    restore,
)
from megatron_rc.launch.distributed import AgreedError, agree, failing_together
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.checkpoints import manifest
from megatron_rc.launch.training.checkpoints.pieces import reason_of

_log = logging.getLogger("megatron_rc")


def checked_checkpoint(load: str | Path, iteration: int | None = None, *, checksums: bool = True) -> tuple[int, Path]:
    """Return a checkpoint's number and folder, for one process without other ranks.

    A whole checkpoint may still be hostile: read it by ``reader.CheckpointReader``. ``iteration`` is its number; None:
    the newest. With ``checksums`` all files are read and compared, else sizes alone.

    Raises:
        ValueError: the folder holds no such checkpoint, or it is damaged.
    """
    found = latest_iteration(load) if iteration is None else iteration
    if found is None:
        raise ValueError(f"{load} holds no checkpoint ({TRACKER} is missing): name another folder")
    if iteration is None:
        _name_newer(load, found)
    elif iteration not in iterations(load):
        there = ", ".join(map(str, iterations(load))) or "none"
        raise ValueError(f"{load} holds no checkpoint {iteration}; there are {there}")
    folder = iteration_folder(load, found)
    problem = manifest.damage(folder, checksums=checksums)
    if problem is not None:
        whole = _newest_whole(load, set(iterations(load)) - {found}, checksums=checksums)
        remedy = (
            "no other checkpoint there is whole" if whole is None else f"--ckpt-step {whole} takes one that is whole"
        )
        raise ValueError(f"{load}: checkpoint {found} is damaged: {problem}; {remedy}")
    return found, folder


def _newest_whole(load: str | Path, numbers: Iterable[int], *, checksums: bool) -> int | None:
    """Return the newest whole checkpoint of these; this process reads all files."""
    newest_first = sorted(numbers, reverse=True)
    return next(
        (n for n in newest_first if manifest.damage(iteration_folder(load, n), checksums=checksums) is None), None
    )


def find_checkpoint(load: str, config: RunConfig, name: str = "--load") -> int | None:
    """Return the newest checkpoint, or with ``--load-last-valid`` the newest whole one; None: the folder is empty.

    ``name`` is the flag that names the folder. ``--ckpt-step`` is the number of another one, of ``--load`` alone.

    Raises:
        AgreedError: on every rank: the newest is damaged, and the message names the last whole one; or that of
            ``--ckpt-step`` is missing or damaged.
    """
    if dist.get_rank() == 0 and config.checkpoints.is_save(load):
        with suppress(OSError):  # the missing checkpoint is named later
            restore(load)  # a killed run may have been replacing it
    agree(config)
    wanted = config.checkpoints.ckpt_step if name == "--load" else None
    if wanted is not None:
        damage = _agreed_damage(load, wanted, config, name)
        if damage is not None:
            raise AgreedError(f"--ckpt-step {wanted}: that checkpoint of {name} {load} is damaged: {damage}")
        return wanted
    found, damage = _agreed_latest(load, config, name)
    if found is not None:
        damage = _agreed_damage(load, found, config, name)
        damage = damage and f"checkpoint {found} is damaged: {damage}"
    if damage is None:
        if found is not None and dist.get_rank() == 0:
            _name_newer(load, found, f"{name} ")
        return found
    # Checkpoints after the newest belong to another run.
    others = [number for number in reversed(_agreed_iterations(load, config, name)) if found is None or number < found]
    whole = next((number for number in others if _agreed_damage(load, number, config, name) is None), None)
    if whole is None:
        raise AgreedError(
            f"{name} {load}: {damage}; no {'other' if found is None else 'older'} checkpoint there is whole"
        )
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
        newest = _newest_whole(load, [number for number in iterations(load) if number > found], checksums=False)
        if newest is not None:
            _log.warning(
                "%s%s: %s names checkpoint %d, but checkpoint %d is there and complete: write %d into that file to "
                "take it, or move it away",
                *(flag, load, TRACKER, found, newest, newest),
            )


def _agreed_latest(load: str, config: RunConfig, name: str) -> tuple[int | None, str | None]:
    """Return the newest checkpoint by the tracker file, or a rank's error, the same on every rank."""
    found = None
    try:
        with failing_together(config, (OSError, ValueError), str):
            found = latest_iteration(load)
    except AgreedError as agreed:
        return None, str(agreed)
    number = -1 if found is None else found
    highest, lowest = agree(config, numbers=[number, -number])
    if highest != -lowest:
        raise AgreedError(
            f"{name} {load}: some ranks find checkpoint {highest:.0f}, others {-lowest:.0f} (-1: none): give a folder "
            "that all machines share"
        )
    return found, None


def _agreed_damage(load: str, iteration: int, config: RunConfig, name: str) -> str | None:
    """Return the damage of a checkpoint, the same on every rank; each rank reads a share of the files."""
    folder = iteration_folder(load, iteration)
    try:
        agree(config, manifest.damage(folder, checksums=config.checkpoints.verify_integrity))
    except AgreedError as agreed:
        return str(agreed)
    return None


def _agreed_iterations(load: str, config: RunConfig, name: str) -> list[int]:
    """Return rank 0's list of checkpoints."""
    found: list[Any] = [None]
    with failing_together(config, (OSError,), lambda error: f"{name} {load} cannot be read ({reason_of(error)})"):
        if dist.get_rank() == 0:
            found = [iterations(load)]
    dist.broadcast_object_list(found, src=0)
    return list(found[0])
