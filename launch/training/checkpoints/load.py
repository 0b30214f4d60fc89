"""Loading: a checkpoint is found, verified, compared with the flags and read; or weights of Hugging Face's form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from megatron_rc.launch.checkpoint_folders import TRACKER
from megatron_rc.launch.errors import one_line
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.checkpoints.contents import Kept
from megatron_rc.launch.training.checkpoints.find import find_checkpoint
from megatron_rc.launch.training.checkpoints.fitting import FUNCTION, differences, misfit
from megatron_rc.launch.training.checkpoints.state import load_model, model_state
from megatron_rc.launch.training.checkpoints.strategy import reason_of
from megatron_rc.launch.training.checkpoints.unpickling import check_pickles
from megatron_rc.launch.training.models.chunk import ModelChunk
from megatron_rc.launch.weights.contents import check_contents
from megatron_rc.launch.weights.converter import load_model as load_from_directory
from megatron_rc.parallel import ParallelGroups


def read_weights(load: str, config: RunConfig, name: str, chunks: Sequence[Any]) -> Path:
    """Load the policy's weights from the newest checkpoint of a folder, which the flag ``name`` names, into chunks.

    Returns:
        The checkpoint's folder.

    Raises:
        ValueError: as in :func:`load_checkpoint`.
    """
    number, folder = _existing_checkpoint(load, config, name)
    where = f"{name} {load}: checkpoint {number}"
    _checked_index(where, folder, config)
    load_model(chunks, _read(where, folder, config, model_state(chunks)))
    return folder


def start_from(
    folder: str | Path, flag: str, config: RunConfig, groups: ParallelGroups, chunks: Sequence[ModelChunk]
) -> None:
    """Load these chunks' weights from a Hugging Face directory; ValueError if it does not fit."""
    try:
        check_contents(folder, flag, config, groups)
        load_from_directory(chunks, config, groups, folder)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from error


def reference_reader(config: RunConfig, groups: ParallelGroups) -> Callable[[Sequence[ModelChunk]], object] | None:
    """Function that loads ``--ref-load`` or ``--ref-load-hf`` into chunks; None if neither is given."""
    reference = config.reference
    if reference.ref_load:
        return partial(read_weights, reference.ref_load, config, "--ref-load")
    if reference.ref_load_hf:
        return partial(start_from, reference.ref_load_hf, "--ref-load-hf", config, groups)
    return None


def load_checkpoint(load: str, config: RunConfig, kept: Kept) -> tuple[int, Path | None]:
    """Load the newest checkpoint of the folder ``--load``; with ``--finetune`` the policy's weights alone.

    Returns:
        The number of optimizer steps to go on from, 0 with ``--finetune``, and the checkpoint's folder. 0 and None if
        ``--load`` equals ``--save`` and is empty.

    Raises:
        ValueError: there is no checkpoint, it is damaged or hostile, or it does not fit this model and its flags.

    Collectives: those of :func:`find_checkpoint` and of Megatron's ``dist_checkpointing.load``.
    """
    if config.checkpoints.finetune:
        source = read_weights(load, config, "--load", kept.policy.chunks)
        kept.policy.optimizer.reload_model_params()
        if kept.reference is not None:
            kept.reference.start_from(kept.policy.chunks)
        return 0, source
    checkpoint = find_checkpoint(load, config)
    if checkpoint is None:
        return 0, None
    number, folder = checkpoint
    where = f"--load {load}: checkpoint {number}"
    index = _checked_index(where, folder, config)
    names = list(index.state_dict_metadata)
    problem = misfit(folder, names, config, kept)
    if problem is not None:
        raise ValueError(f"{where} was written {problem}")
    with_sampling = kept.sampling.are_among(names)
    with_optimizer = not config.checkpoints.no_load_optim
    state = kept.wanted_state(with_optimizer=with_optimizer, with_sampling=with_sampling)
    loaded = _read(where, folder, config, state)
    try:
        iteration = kept.load(config, loaded, folder, with_sampling=with_sampling)
    except Exception as error:  # Megatron and PyTorch raise errors of many kinds for unexpected values
        raise ValueError(f"{where}: {one_line(error)}") from error
    return iteration, folder


def _existing_checkpoint(load: str, config: RunConfig, name: str) -> tuple[int, Path]:
    checkpoint = find_checkpoint(load, config, name)
    if checkpoint is None:
        raise ValueError(f"{name} {load} holds no checkpoint ({TRACKER} is missing): name another folder")
    return checkpoint


def _checked_index(where: str, folder: Path, config: RunConfig) -> Metadata:
    """Return PyTorch's index after a look through all pickles of the folder.

    Raises:
        ValueError: a pickle names code, or the model is of another architecture, also with equal shapes.
    """
    try:
        index = check_pickles(folder)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    difference = differences(config, folder, FUNCTION)
    if difference:
        raise ValueError(
            f"{where} is of another architecture than the policy ({difference}): give the same, or name another folder"
        )
    return index


def _read(where: str, folder: Path, config: RunConfig, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with the values of the files; its tensors are written into the memory of ``state``."""
    try:
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder))
    except (Exception, CheckpointException) as error:  # errors of many kinds; CheckpointException is no Exception
        reason = differences(config, folder) or reason_of(error)
        raise ValueError(f"{where} does not fit this model and its flags ({reason})") from error
    return loaded
