"""Where a run's weights, tokenizer, task, rewards and responses come from, for its first line and for the dry run."""

from __future__ import annotations

from pathlib import Path

from megatron_rc.launch.checkpoint_folders import iteration_folder, latest_iteration
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.distillation import DistillationSection
from megatron_rc.launch.tasks.text import CHARACTERS


def sources_of(config: RunConfig, checkpoint: Path | None) -> dict[str, str]:
    """Return the sources by name; ``checkpoint`` is the folder that the weights are loaded from, if there is one."""
    rollouts_path = config.rollouts.load_rollouts
    if rollouts_path:
        task = f"{rollouts_path} (--load-rollouts)"
        reward = "as recorded"
        engine = "none"
    else:
        task = config.task.task or " ".join(["--prompt-data", *(config.data.prompt_data or ())])
        reward = config.rewards.reward or "rule of the task"
        engine = _engine(config)
    sources = {
        "weights": _weights(config, checkpoint),
        "tokenizer": _tokenizer(config),
        "task": task,
        "reward": reward,
        "engine": engine,
    }
    if config.distillation is not None:
        sources["teacher"] = _teacher(config.distillation)
    return sources


def in_one_line(sources: dict[str, str]) -> str:
    """Return the sources as one line of text."""
    return " · ".join(f"{name}: {source}" for name, source in sources.items())


def newest_checkpoint(config: RunConfig) -> Path | None:
    """Return the folder of the checkpoint that a run would begin with; None if it would begin without one."""
    load = config.checkpoints.load
    step = config.checkpoints.ckpt_step
    if load is None:
        return None
    if step is not None:
        return iteration_folder(load, step)
    try:
        iteration = latest_iteration(load)
    except (OSError, ValueError):  # the run ends with this error
        return Path(load)
    # Only an empty --save passes the checks of the flags without a checkpoint.
    return None if iteration is None else iteration_folder(load, iteration)


def _engine(config: RunConfig) -> str:
    name = config.engine.rollout_engine
    url = config.engine.rollout_url
    if not url:
        return name
    first, *others = url.split(",")
    more = f" and {len(others)} more" if others else ""
    return f"{name} at {first}{more}"


def _teacher(distillation: DistillationSection) -> str:
    """The folders or addresses of the teachers, each kind with its flag."""
    places = {
        "--teacher-load-hf": " ".join(distillation.teacher_load_hf or ()),
        "--teacher-load": " ".join(distillation.teacher_load or ()),
        "--teacher-url": distillation.teacher_url,
        "--teacher-files": distillation.teacher_files,
    }
    return ", ".join(f"{place} ({flag})" for flag, place in places.items() if place)


def _weights(config: RunConfig, checkpoint: Path | None) -> str:
    files = config.checkpoints
    if checkpoint is not None:
        return f"checkpoint {checkpoint} (--load)"
    if files.load_hf:
        return f"{files.load_hf} (--load-hf)"
    return "random (--from-scratch)"


def _tokenizer(config: RunConfig) -> str:
    files = config.checkpoints
    if config.task.tokenizer_type == CHARACTERS:
        return "one token a character (--from-scratch)" if files.from_scratch else "one token a character"
    if config.task.tokenizer_model:
        return f"{config.task.tokenizer_model} (--tokenizer-model)"
    return f"{files.load_hf} (--load-hf)"
