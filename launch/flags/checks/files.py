"""Checks of checkpoints, of folders that are written to, and of this machine's shared memory and open files."""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path

from megatron_rc.launch.checkpoint_folders import existing_iteration, iterations
from megatron_rc.launch.errors import ConfigurationError, flag, require
from megatron_rc.launch.run_config import RunConfig

SHARED_MEMORY = Path("/dev/shm")
_PROBED_BYTES = 2**20
# A rank of a small run opens about 100 files and sockets, and more for each process group and peer.
FEWEST_FILES = 256
ENOUGH_FILES = 4096


def check_files(config: RunConfig) -> None:
    """Check folders to load from, the checkpoint's step, and the names of metrics."""
    files = config.checkpoints
    prefix = config.correction.metric_prefix
    folders = {
        "load": None if files.is_save(files.load) else files.load,
        "ref_load": config.reference.ref_load,
        "critic_load_hf": config.critic and config.critic.critic_load_hf,
    }
    for name, folder in folders.items():
        if folder and not Path(folder).is_dir():
            raise ConfigurationError(f"{config.typed(name)}: no such folder")
    # The checkpoint of --ckpt-step needs no tracker file, which names the newest one.
    of_newest = {"load": None if files.ckpt_step is not None else folders["load"], "ref_load": folders["ref_load"]}
    for name, folder in of_newest.items():
        try:
            if folder:
                existing_iteration(folder, flag(name))
        except ValueError as error:
            raise ConfigurationError(f"{config.typed(name)}: {error}") from error
    if not prefix.endswith("/") or len(prefix) < 2:
        raise ConfigurationError(
            f"--metric-prefix {prefix!r} must be a word and a /, such as rollout_corr/, to tell the correction's "
            "metrics from others"
        )
    if files.load and files.ckpt_step is not None:
        saved = iterations(files.load)
        if files.ckpt_step not in saved:
            saved_steps = ", ".join(map(str, saved)) or "none"
            raise ConfigurationError(
                f"{config.typed('ckpt_step')}: {config.typed('load')} holds no such checkpoint, it has {saved_steps}"
            )
    if config.logging.wandb_project:
        require("wandb", "--wandb-project", "wandb")


def check_folders(config: RunConfig) -> None:
    """Check that the folders can be written to; they are not made yet, so that a refused run leaves nothing."""
    files = config.checkpoints
    if files.save_hf and not files.load and Path(files.save_hf).is_dir() and any(Path(files.save_hf).iterdir()):
        raise ConfigurationError(f"{config.typed('save_hf')} is not empty, and this run begins: name another folder")
    if files.save and not files.is_save(files.load):
        # Another run's checkpoints would later pass for this run's. An unfinished one has a suffix.
        others = [path for path in Path(files.save).glob("iter_*/metadata.json") if path.parent.suffix == ""]
        if others:
            raise ConfigurationError(
                f"{config.typed('save')} holds the checkpoints of another run: name another folder, or give --load "
                f"{files.save} to go on from there"
            )
    written = {
        "save": files.save,
        "save_hf": files.save_hf,
        "tensorboard_dir": config.logging.tensorboard_dir,
        "wandb_save_dir": config.logging.wandb_save_dir,
        "save_rollouts": config.rollouts.save_rollouts,
        "rollout_weights_dir": config.engine.rollout_weights_dir,
        "runs_dir": str(Path(config.launch.runs_dir) / config.launch.run_name),
    }
    for name, folder in written.items():
        reason = _reason_against(Path(folder)) if folder else None
        if reason:
            raise ConfigurationError(f"{config.typed(name)} cannot be written to ({reason}): choose another folder")


def _reason_against(folder: Path) -> str | None:
    """Return the system's reason why files cannot be written to a folder, or to the one in which it will be made."""
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return error.strerror or type(error).__name__


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
