"""Checkpoints that any parallel layout can read, in Megatron's own format and folder names."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rc.launch.distributed import agree
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.checkpoints.folders import TRACKER, iteration_folder, latest_iteration
from megatron_rc.launch.training.checkpoints.settings import SETTINGS, settings_text
from megatron_rc.launch.training.model import unwrap
from megatron_rc.parallel.collectives import all_reduce_max


def save_checkpoint(
    config: RunConfig,
    save: str,
    iteration: int,
    model: list[Any],
    optimizer: Any | None,
    scheduler: Any,
    reference: list[Any],
) -> None:
    """Write a checkpoint of all ranks, then point the tracker file at it: a half-written one is never loaded.

    Args:
        config: of the run; kept beside the weights.
        save: the folder of all checkpoints.
        iteration: optimizer steps made.
        model: this rank's chunks.
        optimizer: Megatron's optimizer; None: it is left out.
        scheduler: of the learning rate.
        reference: chunks of the reference policy; empty without a KL penalty.
    """
    folder = iteration_folder(save, iteration)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier(group=dist.group.WORLD)
    state = _model_state(model) | _model_state(reference, "reference")
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(_model_state(model), metadata=_metadata())
        state["opt_param_scheduler"] = scheduler.state_dict()
    state["iteration"] = iteration
    try:
        with _results_in_this_process():
            dist_checkpointing.save(state, str(folder))
    except (OSError, CheckpointException) as error:
        raise ValueError(f"--save {save}: checkpoint {iteration} could not be written ({_reason(error)})") from error
    dist.barrier(group=dist.group.WORLD)
    if dist.get_rank() == 0:
        (folder / SETTINGS).write_text(settings_text(config), encoding="utf-8")
        written = Path(save) / f"{TRACKER}.partial"
        written.write_text(str(iteration), encoding="utf-8")
        written.replace(Path(save) / TRACKER)


def load_checkpoint(
    load: str, config: RunConfig, model: list[Any], optimizer: Any, scheduler: Any, reference: list[Any]
) -> int:
    """Load the newest checkpoint of the folder ``--load``, whatever layout wrote it.

    Returns:
        The optimizer steps it stands for; 0 with ``--finetune``, and where ``--load`` is ``--save`` and still empty.

    Raises:
        ValueError: on every rank alike: there is none, or it cannot be read into this model.
    """
    files, found = config.checkpoints, _agreed_latest_iteration(load, config)
    if found is None and (files.finetune or load != files.save):
        raise ValueError(f"--load {load} holds no checkpoint ({TRACKER} is missing): name another folder")
    if found is None:
        return 0
    folder, fresh = str(iteration_folder(load, found)), files.finetune
    state = _model_state(model)
    with_optimizer = not fresh and not files.no_load_optim
    if with_optimizer:
        state["optimizer"] = optimizer.sharded_state_dict(_model_state(model), is_loading=True, metadata=_metadata())
    if not fresh:
        state |= _model_state(reference, "reference")
    try:
        loaded = dist_checkpointing.load(state, folder)
    except (KeyError, RuntimeError, CheckpointingException, CheckpointException) as error:
        raise ValueError(
            f"--load {load}: checkpoint {found} does not fit this model and its flags ({_reason(error)})"
        ) from error
    _load_model(model, loaded)
    if with_optimizer:
        _load_optimizer(optimizer, loaded["optimizer"])
        scheduler.load_state_dict(loaded["opt_param_scheduler"])
    elif optimizer is not None:
        optimizer.reload_model_params()
    _load_model(reference, loaded, "model" if fresh else "reference")
    return 0 if fresh else int(loaded["iteration"])


def _agreed_latest_iteration(load: str, config: RunConfig) -> int | None:
    """``latest_iteration`` of ``--load``, the same on every rank, also where some see another file system."""
    found, error = None, None
    try:
        found = latest_iteration(load)
    except (OSError, ValueError) as problem:
        error = str(problem)
    agree(config, error)
    number = -1 if found is None else found
    numbers = torch.tensor([number, -number], device=config.launch.device)
    highest, lowest = all_reduce_max(numbers, dist.group.WORLD).tolist()
    if highest != -lowest:
        raise ValueError(
            f"--load {load}: some ranks find checkpoint {highest}, others {-lowest} (-1: none): give a folder "
            "that all machines share"
        )
    return found


def _reason(error: BaseException) -> str:
    """The first failure of any rank, as one line."""
    causes = [failure for failure, _ in error.failures.values()] if isinstance(error, CheckpointException) else []
    return " ".join(str((causes or [error])[0]).split())


@contextmanager
def _results_in_this_process() -> Iterator[None]:
    """A plain queue for the results of a synchronous save.

    Megatron starts a manager process for them, which imports everything anew and outlives a rank that is killed.
    """
    # The second name is that of megatron-core 0.17 and later.
    names = [
        name for name in ("_get_write_results_queue", "get_write_results_queue") if hasattr(filesystem_async, name)
    ]
    with mock.patch.object(filesystem_async, names[0], return_value=queue.Queue()):
        yield


def _load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """Megatron's own loading, with torch's Adam in the distributed optimizer as well.

    There Megatron (0.16 to 0.19) forgets that torch keeps a ``step`` for every parameter: it looks for one in what it
    has read, and gives one tensor to all parameters, which each of them would then count up.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    with ExitStack() as stack:
        for part in parts:
            if hasattr(part, "_set_main_param_and_optimizer_states"):
                copy = partial(_copy_with_step, part, part._set_main_param_and_optimizer_states)
                stack.enter_context(mock.patch.object(part, "_set_main_param_and_optimizer_states", copy))
        try:
            optimizer.load_state_dict(state)
        except RuntimeError as error:
            # With expert parallelism Megatron has an optimizer more than without.
            raise ValueError(
                f"--load: the optimizer's state does not fit this layout ({_reason(error)}): give --no-load-optim, or "
                "the --expert-model-parallel-size that wrote it"
            ) from error
    for part in parts:
        for own in part.optimizer.state.values():
            if isinstance(own.get("step"), torch.Tensor):
                own["step"] = own["step"].clone()


def _copy_with_step(part: Any, copy: Any, parameter: Any, tensors: dict[str, Any]) -> None:
    own = part._get_main_param_and_optimizer_states(parameter)
    copy(parameter, {name: own[name] for name in ("step",) if name in own} | tensors)


def _metadata() -> dict[str, Any]:
    """Optimizer state is stored by parameter, so that another TP, PP and DP size can load it."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _model_state(model: list[Any], name: str = "model") -> dict[str, Any]:
    """Sharded state of each chunk. Keys inside the file name global layers, so that chunks do not matter there."""
    prefix = "" if name == "model" else f"{name}."
    return {
        f"{name}{index}": unwrap(chunk).sharded_state_dict(prefix=prefix, metadata=_metadata())
        for index, chunk in enumerate(model)
    }


def _load_model(model: list[Any], loaded: dict[str, Any], name: str = "model") -> None:
    prefix = "" if name == "model" else f"{name}."
    for index, chunk in enumerate(model):
        state = {key.removeprefix(prefix): value for key, value in loaded[f"{name}{index}"].items()}
        unwrap(chunk).load_state_dict(state)
