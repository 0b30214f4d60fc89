"""Loading: a checkpoint is found, verified, compared with the flags and read; or weights of Hugging Face's form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from megatron_rc.launch.checkpoint_folders import TRACKER, iteration_folder
from megatron_rc.launch.distributed import agree, failing_together
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.checkpoints.contents import OPTIMIZERS, Kept
from megatron_rc.launch.training.checkpoints.find import find_checkpoint
from megatron_rc.launch.training.checkpoints.fitting import FUNCTION, differences, misfit
from megatron_rc.launch.training.checkpoints.pieces import reason_of
from megatron_rc.launch.training.checkpoints.reader import CheckpointReader
from megatron_rc.launch.training.checkpoints.state import load_model, model_state
from megatron_rc.launch.training.checkpoints.unpickling import UnsafeFileError
from megatron_rc.launch.training.models.chunk import ModelChunk
from megatron_rc.launch.weights.contents import check_contents
from megatron_rc.launch.weights.converter import load_model as load_from_directory
from megatron_rc.parallel import ParallelGroups

# Megatron and PyTorch raise errors of many kinds for unexpected files or an unexpected model.
_UNREADABLE = (Exception, CheckpointException)


def read_weights(load: str, config: RunConfig, name: str, chunks: Sequence[Any]) -> Path:
    """Load the policy's weights from the newest checkpoint of a folder, which the flag ``name`` names, into chunks.

    Returns:
        The checkpoint's folder.

    Raises:
        ValueError, AgreedError: as in :func:`load_checkpoint`.
    """
    where, folder = _place(load, config, name, find_checkpoint(load, config, name))
    with _failing_together(where, folder, config):
        reader = CheckpointReader(folder)
    loaded = _read(where, reader, config, model_state(chunks))
    with _failing_together(where, folder, config):
        load_model(chunks, loaded)
    return folder


def start_from(
    folder: str | Path, flag: str, config: RunConfig, groups: ParallelGroups, chunks: Sequence[ModelChunk]
) -> None:
    """Load these chunks' weights from a Hugging Face directory; AgreedError on every rank if it does not fit."""
    with failing_together(config, (ValueError,), lambda problem: f"{flag}: {problem}"):
        check_contents(folder, flag, config, groups)
    # A bridge makes collectives, so that every rank has to know of the first rank's error before it loads.
    with failing_together(config, (ValueError,), lambda problem: f"{flag}: {problem}"):
        load_from_directory(chunks, config, groups, folder)


def reference_reader(config: RunConfig, groups: ParallelGroups) -> Callable[[Sequence[ModelChunk]], object] | None:
    """Function that loads ``--ref-load`` or ``--ref-load-hf`` into chunks; None if neither is given."""
    reference = config.reference
    if reference.ref_load:
        return partial(read_weights, reference.ref_load, config, "--ref-load")
    if reference.ref_load_hf:
        return partial(start_from, reference.ref_load_hf, "--ref-load-hf", config, groups)
    return None


def _place(load: str, config: RunConfig, name: str, found: int | None) -> tuple[str, Path]:
    """Return how messages name the checkpoint ``found``, and its folder.

    Raises:
        ValueError, AgreedError: on every rank: nothing was found, or another architecture, also with equal shapes.
    """
    if found is None:
        raise ValueError(f"{name} {load} holds no checkpoint ({TRACKER} is missing): name another folder")
    where, folder = f"{name} {load}: checkpoint {found}", iteration_folder(load, found)
    other = differences(config, folder, FUNCTION)
    said = f"{where} is of another architecture than the policy ({other}): give the same, or name another folder"
    agree(config, said if other else None)
    return where, folder


def _read(where: str, reader: CheckpointReader, config: RunConfig, state: dict[str, Any]) -> dict[str, Any]:
    """Read a sharded state; refuse entries of a model that nobody asked for."""
    asked = {name: set(part) for name, part in state.items() if name not in OPTIMIZERS}
    with _failing_together(where, reader.folder, config):
        loaded = reader.state(state)
    agree(config, _unasked(where, asked, loaded))
    return loaded


def load_checkpoint(load: str, config: RunConfig, kept: Kept) -> tuple[int, Path | None]:
    """Load the newest checkpoint of the folder ``--load``; with ``--finetune`` the policy's weights alone.

    Returns:
        The number of optimizer steps to go on from, 0 with ``--finetune``, and the checkpoint's folder. 0 and None if
        ``--load`` equals ``--save`` and is empty.

    Raises:
        ValueError, AgreedError: on every rank: there is no checkpoint, it is damaged, or it does not fit this model.
    """
    files = config.checkpoints
    if files.finetune:
        source = read_weights(load, config, "--load", kept.policy.chunks)
        kept.policy.optimizer.reload_model_params()
        if kept.reference is not None:
            kept.reference.start_from(kept.policy.chunks)
        return 0, source
    found = find_checkpoint(load, config)
    if found is None and files.is_save(load):
        return 0, None
    where, folder = _place(load, config, "--load", found)
    with _failing_together(where, folder, config):
        reader = CheckpointReader(folder)
        problem = misfit(where, reader, config, kept)
    agree(config, problem)
    state = kept.wanted_state(with_optimizer=not files.no_load_optim)
    with_sampling = kept.sampling.are_among(reader.index.state_dict_metadata)
    if with_sampling:
        state |= kept.sampling.wanted_state()
    loaded = _read(where, reader, config, state)
    with _failing_together(where, folder, config):
        iteration = int(loaded["iteration"])
        kept.load_models(where, config, loaded, iteration)
        if with_sampling:
            kept.sampling.load(loaded)
        kept.rewards.load(loaded)
        kept.left_out.load(loaded)
        if kept.open_rollouts is not None:
            kept.open_rollouts.load(folder)
    return iteration, folder


def _failing_together(where: str, folder: Path, config: RunConfig) -> AbstractContextManager[None]:
    """Turn an error of reading, on any rank, into one error on all ranks."""

    def in_words(error: BaseException) -> str:
        if isinstance(error, UnsafeFileError):
            return f"{where}: {error}"
        return f"{where} does not fit this model and its flags ({differences(config, folder) or reason_of(error)})"

    return failing_together(config, _UNREADABLE, in_words)


def _unasked(where: str, asked: dict[str, set[str]], loaded: dict[str, Any]) -> str | None:
    """Name an entry that the shared values add to a model: a layer might unpickle it."""
    more = [f"{name}.{key}" for name, keys in asked.items() for key in sorted(loaded[name].keys() - keys)]
    if not more:
        return None
    return f"{where} holds {more[0]}, which has no place in a checkpoint of this model: nothing of it was run"
