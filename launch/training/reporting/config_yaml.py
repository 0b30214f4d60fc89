"""``config.yaml`` in a run's folder: a launch file with all resolved flags, versions and repositories."""

from __future__ import annotations

from pathlib import Path

from megatron_rc.launch.environment import environment_lines
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.resolved_file import as_launch_file
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.set_aside import set_aside

SETTINGS_FILE = "config.yaml"


def settings_text(config: RunConfig, file: Path) -> str:
    """Text of the file: versions and repositories, the command that repeats the run, and its flags."""
    again = f"python -m megatron_rc.launch --nproc-per-node {config.launch.world_size} --config {file}"
    lines = [
        *environment_lines(),
        f"To repeat this run, in {Path.cwd()}: {again}",
        "Flags behind a # were not given: they have their default, or follow from other flags.",
    ]
    return "".join(f"# {line}\n" for line in lines) + f"\n{as_launch_file(config.flags)}"


def write_settings(config: RunConfig) -> None:
    """Write the file into the run's folder; a different older file is renamed.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    path = Path(config.launch.runs_dir) / config.launch.run_name / SETTINGS_FILE
    partial = path.with_name(f"{SETTINGS_FILE}.partial")
    text = settings_text(config, path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() and path.read_text(encoding="utf-8", errors="replace") != text:
            set_aside(path)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        remedy = "make room, or choose another --runs-dir"
        raise ConfigurationError(f"{path} cannot be written ({error.strerror}): {remedy}") from error
