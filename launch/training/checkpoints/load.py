"""Reading a checkpoint: found, verified, fitting, and then into the model, whatever layout wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rc.launch.distributed import AgreedError, agree
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.checkpoints.critic import OPTIMIZER, load_critic, wanted_critic_state
from megatron_rc.launch.training.checkpoints.find import find_checkpoint
from megatron_rc.launch.training.checkpoints.fitting import FUNCTION, differences, misfit
from megatron_rc.launch.training.checkpoints.folders import TRACKER, iteration_folder
from megatron_rc.launch.training.checkpoints.reference import Reference
from megatron_rc.launch.training.checkpoints.sampling_weights import SamplingWeights
from megatron_rc.launch.training.checkpoints.schedule import check_schedule, load_optimizer_and_schedule
from megatron_rc.launch.training.checkpoints.state import load_model, model_state, optimizer_state
from megatron_rc.launch.training.checkpoints.unpickling import UnsafeFileError, read_index, safe_loading
from megatron_rc.launch.training.left_out import LeftOut
from megatron_rc.launch.training.model import unwrap
from megatron_rc.launch.training.rewards import RewardScaler
from megatron_rc.launch.training.trained_model import TrainedModel

# What Megatron and PyTorch raise for files, or for a model, that they did not expect.
_UNREADABLE = (
    *(AssertionError, AttributeError, CheckpointException, CheckpointingException, EOFError, IndexError, KeyError),
    *(OSError, RuntimeError, TypeError, ValueError),
)


def read_weights(load: str, config: RunConfig, name: str, chunks: Sequence[Any]) -> None:
    """Overwrite the weights of these chunks by those of the policy in the newest checkpoint of a folder.

    Args:
        load: the folder.
        config: of the run.
        name: the flag that names the folder.
        chunks: this rank's GPTModels.

    Raises:
        ValueError, AgreedError: as in :func:`load_checkpoint`.
    """
    found = find_checkpoint(load, config, name)
    if found is None:
        raise ValueError(f"{name} {load} holds no checkpoint ({TRACKER} is missing): name another folder")
    where, folder = f"{name} {load}: checkpoint {found}", iteration_folder(load, found)
    _agree_on_function(where, folder, config)
    state = model_state(chunks)
    asked = {name: set(part) for name, part in state.items()}
    with _failing_together(where, folder, config):
        read_index(folder / ".metadata")
        loaded = dist_checkpointing.load(state, str(folder))
    agree(config, _unasked(where, asked, loaded))
    with _failing_together(where, folder, config):
        load_model(chunks, loaded)


def _agree_on_function(where: str, folder: Path, config: RunConfig) -> None:
    """Refuse, on every rank, weights that would fit and mean something else."""
    other = differences(config, folder, FUNCTION)
    said = f"{where} is of another architecture than the policy ({other}): give the same, or name another folder"
    agree(config, said if other else None)


def load_checkpoint(
    load: str,
    config: RunConfig,
    model: list[Any],
    optimizer: Any,
    scheduler: Any,
    reference: Reference | None,
    sampling: SamplingWeights,
    rewards: RewardScaler,
    critic: TrainedModel | None,
    left_out: LeftOut,
) -> int:
    """Load the newest checkpoint of the folder ``--load``; with ``--finetune`` the policy's weights alone.

    Returns:
        The optimizer steps it stands for; 0 with ``--finetune``, and where ``--load`` is ``--save`` and still empty.

    Raises:
        ValueError, AgreedError: on every rank alike: there is none, it is damaged, or it does not fit this model.
    """
    files, found = config.checkpoints, find_checkpoint(load, config)
    if found is None and (files.finetune or load != files.save):
        raise ValueError(f"--load {load} holds no checkpoint ({TRACKER} is missing): name another folder")
    if found is None:
        return 0
    where, folder = f"--load {load}: checkpoint {found}", iteration_folder(load, found)
    _agree_on_function(where, folder, config)
    with_optimizer = not files.finetune and not files.no_load_optim
    with_reference = reference is not None and not files.finetune
    state = model_state(model)
    if with_optimizer:
        state["optimizer"] = optimizer_state(optimizer, model, is_loading=True)
    if reference is not None and with_reference:
        state |= reference.wanted_state()
    critic = None if files.finetune else critic
    if critic is not None:
        state |= wanted_critic_state(critic, with_optimizer=with_optimizer)
    wanted = {"with_optimizer": with_optimizer, "with_reference": with_reference, "with_critic": critic is not None}
    with _failing_together(where, folder, config):
        index = read_index(folder / ".metadata")
        # Megatron does the same, where the other ranks already wait for each other.
        dist_checkpointing.load_common_state_dict(str(folder))
        problem = misfit(where, folder, index, config, **wanted)
    agree(config, problem)
    with_sampling = not files.finetune and sampling.are_among(index.state_dict_metadata)
    if with_sampling:
        state |= sampling.wanted_state()
    asked = {name: set(part) for name, part in state.items() if name not in ("optimizer", OPTIMIZER)}
    with _failing_together(where, folder, config):
        loaded = dist_checkpointing.load(state, str(folder))
    agree(config, _unasked(where, asked, loaded))
    with _failing_together(where, folder, config):
        load_model(model, loaded)
        if reference is not None:
            reference.load(loaded) if with_reference else reference.start_from([unwrap(chunk) for chunk in model])
        if with_sampling:
            sampling.load(loaded)
        if not files.finetune:
            rewards.load(loaded)
            left_out.load(loaded)
        if with_optimizer:
            check_schedule(where, config, scheduler, optimizer, loaded)
            load_optimizer_and_schedule(config, optimizer, scheduler, loaded)
        elif optimizer is not None:
            optimizer.reload_model_params()
        iteration = 0 if files.finetune else int(loaded["iteration"])
        if not with_optimizer:
            scheduler.step(increment=iteration)
        if critic is not None:
            load_critic(where, config, critic, loaded, iteration, with_optimizer=with_optimizer)
    return iteration


@contextmanager
def _failing_together(where: str, folder: Path, config: RunConfig) -> Iterator[None]:
    """What cannot be read, or put into the model, on one rank is one error on all."""
    error = None
    try:
        with safe_loading():
            yield
    except AgreedError:
        raise
    except UnsafeFileError as problem:
        error = f"{where}: {problem}"
    except _UNREADABLE as problem:
        error = f"{where} does not fit this model and its flags ({differences(config, folder) or _reason(problem)})"
    agree(config, error)


def _unasked(where: str, asked: dict[str, set[str]], loaded: dict[str, Any]) -> str | None:
    """What the file common to all ranks adds to a model: a layer may unpickle it by itself, freely."""
    for name, keys in asked.items():
        for key in sorted(loaded[name].keys() - keys):
            return (
                f"{where} holds {name}.{key}, which has no place in a checkpoint of this model: nothing of it was run"
            )
    return None


def _reason(error: BaseException) -> str:
    """The first failure of any rank, as one line."""
    causes = [failure for failure, _ in error.failures.values()] if isinstance(error, CheckpointException) else []
    text = " ".join(str((causes or [error])[0]).split())
    return text if len(text) < 300 else f"{text[:300]} …"
