"""Checkpoints, and folders that are written to."""

from __future__ import annotations

import tempfile
from pathlib import Path

from megatron_rc.launch.errors import ConfigurationError, flag, require
from megatron_rc.launch.run_config import RunConfig


def check_checkpoints(config: RunConfig) -> None:
    """Settings of checkpoints and of logging that would do nothing."""
    files, logging = config.checkpoints, config.logging
    if files.save_interval and not files.save:
        raise ConfigurationError(f"--save-interval {files.save_interval} does nothing without --save DIR")
    if (files.finetune or files.no_load_optim) and not files.load:
        raise ConfigurationError("--finetune and --no-load-optim do nothing without --load DIR")
    if files.no_save_optim and not files.save:
        raise ConfigurationError("--no-save-optim does nothing without --save DIR")
    if logging.wandb_exp_name and not logging.wandb_project:
        raise ConfigurationError("--wandb-exp-name does nothing without --wandb-project")
    if logging.wandb_project:
        require("wandb", "--wandb-project", "wandb")


def check_folders(config: RunConfig) -> None:
    """Make the folders that are written to; the last check, since it leaves something behind."""
    launch, files = config.launch, config.checkpoints
    folders = [(f"--runs-dir {launch.runs_dir}", Path(launch.runs_dir) / launch.run_name)]
    written = {
        "save": files.save,
        "tensorboard_dir": config.logging.tensorboard_dir,
        "save_rollouts": config.rollouts.save_rollouts,
        "rollout_weights_dir": config.engine.rollout_weights_dir,
    }
    folders += [(f"{flag(name)} {path}", Path(path)) for name, path in written.items() if path]
    for given, folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ConfigurationError(
                f"{given} cannot be written to ({error.strerror}): choose another folder"
            ) from error
    if files.load and not Path(files.load).is_dir() and files.load != files.save:
        raise ConfigurationError(f"--load {files.load}: no such folder")
