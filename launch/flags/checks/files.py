"""Checks of checkpoints, of folders that are written to, and of this machine's shared memory and open files."""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path

from megatron_rc.launch.errors import ConfigurationError, flag, require
from megatron_rc.launch.run_config import RunConfig

SHARED_MEMORY = Path("/dev/shm")
_PROBED_BYTES = 2**20
# A rank of a small run opens about 100 files and sockets, and more for each process group and peer.
FEWEST_FILES, ENOUGH_FILES = 256, 4096


def check_checkpoints(config: RunConfig) -> None:
    """Check intervals of checkpoints, folders to load from, and names of metrics."""
    files = config.checkpoints
    if files.save_retain_interval and files.save_interval and files.save_retain_interval % files.save_interval:
        raise ConfigurationError(
            f"--save-retain-interval {files.save_retain_interval} must be a multiple of --save-interval "
            f"{files.save_interval}"
        )
    folders = {
        "load": None if files.is_save(files.load) else files.load,
        "ref_load": config.reference.ref_load,
        "critic_load_hf": config.critic and config.critic.critic_load_hf,
    }
    for name, folder in folders.items():
        if folder and not Path(folder).is_dir():
            raise ConfigurationError(f"{flag(name)} {folder}: no such folder")
    prefix = config.correction.metric_prefix
    if not prefix.endswith("/") or len(prefix) < 2:
        raise ConfigurationError(
            f"--metric-prefix {prefix!r} must be a word and a /, such as rollout_corr/, to tell the correction's "
            "metrics from others"
        )
    if config.logging.wandb_project:
        require("wandb", "--wandb-project", "wandb")


def check_folders(config: RunConfig) -> None:
    """Check that the folders can be written to; they are not made yet, so that a refused run leaves nothing."""
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
    # A folder with another run's checkpoints, which would later pass for this run's; an unfinished one has a suffix.
    others = files.save and not files.is_save(files.load) and Path(files.save).glob("iter_*/metadata.json")
    if any(path.parent.suffix == "" for path in others or ()):
        raise ConfigurationError(
            f"--save {files.save} holds the checkpoints of another run: name another folder, or give --load "
            f"{files.save} to go on from there"
        )
    for given, folder in folders:
        try:
            there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
            with tempfile.TemporaryFile(dir=there):
                pass
        except OSError as error:
            raise ConfigurationError(
                f"{given} cannot be written to ({error.strerror}): choose another folder"
            ) from error


def check_machine(config: RunConfig) -> None:
    """Raise ConfigurationError if needed shared memory cannot be used, or too few files can be opened.

    The limit of open files is first raised as far as this user may, for this process and its children.
    """
    raise_open_files()
    is_used = config.engine.rollout_engine == "vllm" or not config.launch.on_cpu
    if is_used and SHARED_MEMORY.exists():
        try:
            with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:
                file.write(bytes(_PROBED_BYTES))
                file.flush()
        except OSError as error:
            raise ConfigurationError(
                f"{SHARED_MEMORY} cannot be written to ({error.strerror}), and vLLM and NCCL need it: "
                "make room there, or start the container with more (docker run --shm-size 1g)"
            ) from error


def raise_open_files() -> None:
    """Raise a low limit of open files as far as the user may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH_FILES:
        return
    enough = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_FILES)
    if enough < FEWEST_FILES:
        raise ConfigurationError(
            f"ulimit -n {hard}: a process may open {hard} files and sockets, and a rank needs {FEWEST_FILES}: raise "
            "the limit (ulimit -Hn; docker run --ulimit nofile=4096)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))
