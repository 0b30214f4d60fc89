"""Checkpoints, and folders that are written to."""

from __future__ import annotations

import tempfile
from pathlib import Path

from megatron_rc.launch.errors import ConfigurationError, flag, require
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.training import CheckpointSection


def check_checkpoints(config: RunConfig) -> None:
    """Settings of checkpoints and of logging that would do nothing."""
    files, logging = config.checkpoints, config.logging
    _check_saving(files)
    _check_loading(files)
    _check_saving_hugging_face(files.save_hf, files.save_hf_interval, config.training.train_iters)
    prefix = config.correction.metric_prefix
    if not prefix.endswith("/") or len(prefix) < 2:
        raise ConfigurationError(
            f"--metric-prefix {prefix!r} must be a word and a /, such as rollout_corr/: without them the names of the "
            "correction's metrics are not told from those of others"
        )
    for name in ("wandb_exp_name", "wandb_entity", "wandb_save_dir"):
        if getattr(logging, name) and not logging.wandb_project:
            raise ConfigurationError(f"{flag(name)} does nothing without --wandb-project")
    if logging.wandb_project:
        require("wandb", "--wandb-project", "wandb")


def _check_saving_hugging_face(folder: str | None, interval: int | None, last: int) -> None:
    if interval and not folder:
        raise ConfigurationError(f"--save-hf-interval {interval} does nothing without --save-hf DIR")
    if interval and interval > last:
        raise ConfigurationError(
            f"--save-hf-interval {interval} does nothing in a run of {last} optimizer steps, whose end is written "
            f"without it: give {last} or less, or drop it"
        )


def _check_saving(files: CheckpointSection) -> None:
    for name in ("save_interval", "keep_last", "save_retain_interval"):
        if getattr(files, name) and not files.save:
            raise ConfigurationError(f"{flag(name)} {getattr(files, name)} does nothing without --save DIR")
    for name in ("no_save_optim", "async_save", "continue_after_failed_save"):
        if getattr(files, name) and not files.save:
            raise ConfigurationError(f"{flag(name)} does nothing without --save DIR")
    for name in ("keep_last", "save_retain_interval", "async_save", "continue_after_failed_save"):
        if getattr(files, name) and not files.save_interval:
            raise ConfigurationError(f"{flag(name)} does nothing without --save-interval: only the end is saved")
    if files.save_retain_interval and files.save_interval and files.save_retain_interval % files.save_interval:
        raise ConfigurationError(
            f"--save-retain-interval {files.save_retain_interval} must be a multiple of --save-interval "
            f"{files.save_interval}"
        )


def _check_loading(files: CheckpointSection) -> None:
    names = ["finetune", "no_load_optim", "load_last_valid"]
    names += ["override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"]
    for name in names:
        if getattr(files, name) and not files.load:
            raise ConfigurationError(f"{flag(name)} does nothing without --load DIR")
    if files.load and not Path(files.load).is_dir() and not files.is_save(files.load):
        raise ConfigurationError(f"--load {files.load}: no such folder")
    if not files.verify_integrity and not files.load:
        raise ConfigurationError("--no-verify-integrity does nothing without --load DIR")
    given = [name for name in names[3:] if getattr(files, name)]
    if len(given) == 2:
        raise ConfigurationError(f"{flag(given[0])} contradicts {flag(given[1])}: give one of them")
    if given and (files.finetune or files.no_load_optim):
        other = "--finetune" if files.finetune else "--no-load-optim"
        raise ConfigurationError(f"{flag(given[0])} does nothing with {other}: this run's numbers count; drop it")


def _check_begun_anew(files: CheckpointSection) -> None:
    """A folder of checkpoints is one run's: of two, the older's would later pass for the newer's."""
    if not files.save or files.is_save(files.load):
        return
    # Without what a killed run left: that has another suffix.
    if any(path.parent.suffix == "" for path in Path(files.save).glob("iter_*/metadata.json")):
        raise ConfigurationError(
            f"--save {files.save} holds the checkpoints of another run: name another folder, or give --load "
            f"{files.save} to go on from there"
        )


def check_folders(config: RunConfig) -> None:
    """Whether the folders that are written to can be; they are made when something is, and not by a refused run."""
    launch, files = config.launch, config.checkpoints
    folders = [(f"--runs-dir {launch.runs_dir}", Path(launch.runs_dir) / launch.run_name)]
    written = {
        "save": files.save,
        "save_hf": files.save_hf,
        "tensorboard_dir": config.logging.tensorboard_dir,
        "wandb_save_dir": config.logging.wandb_save_dir,
        "save_rollouts": config.rollouts.save_rollouts,
        "rollout_weights_dir": config.engine.rollout_weights_dir,
    }
    folders += [(f"{flag(name)} {path}", Path(path)) for name, path in written.items() if path]
    if files.save_hf and not files.load and Path(files.save_hf).is_dir() and any(Path(files.save_hf).iterdir()):
        raise ConfigurationError(f"--save-hf {files.save_hf} is not empty, and this run begins: name another folder")
    _check_begun_anew(files)
    for given, folder in folders:
        try:
            there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
            with tempfile.TemporaryFile(dir=there):
                pass
        except OSError as error:
            raise ConfigurationError(
                f"{given} cannot be written to ({error.strerror}): choose another folder"
            ) from error
