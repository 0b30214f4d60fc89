"""Checks of this machine's shared memory and limit of open files, whose errors would come late and unclear."""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.run_config import RunConfig

SHARED_MEMORY = Path("/dev/shm")
_PROBED_BYTES = 2**20
# A rank of a small run opens about 100 files and sockets, and more for each process group and peer.
FEWEST_FILES, ENOUGH_FILES = 256, 4096


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
    """Raise a low limit of open files to what the user may have."""
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
