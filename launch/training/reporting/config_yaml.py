"""``config.yaml`` in a run's folder: a launch file with all resolved flags, versions and repositories; also read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rc import RolloutCorrectionConfig
from megatron_rc.doctor.inputs import read_settings
from megatron_rc.launch.environment import environment_lines
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.resolved_file import as_launch_file
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.set_aside import set_aside
from megatron_rc.settings.fields import DEFAULTS

SETTINGS_FILE = "config.yaml"
_SECTION, _COMMENT = "# -- ", "# "
_START_FOLDER = re.compile(r"^# [^,]+, in (.+): python -m ", re.MULTILINE)
_LAYOUT = {
    "TP": "tensor-model-parallel-size",
    "PP": "pipeline-model-parallel-size",
    "CP": "context-parallel-size",
    "EP": "expert-model-parallel-size",
}


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
    """Write the file into the run's folder; a different older file is renamed. ConfigurationError if it cannot be."""
    path = Path(config.launch.runs_dir) / config.launch.run_name / SETTINGS_FILE
    text, partial = settings_text(config, path), path.with_name(f"{SETTINGS_FILE}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() and path.read_text(encoding="utf-8", errors="replace") != text:
            set_aside(path)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        remedy = "make room, or choose another --runs-dir"
        raise ConfigurationError(f"{path} cannot be written ({error.strerror}): {remedy}") from error


@dataclass(frozen=True)
class Settings:
    """Settings of a run; all empty if ``config.yaml`` is missing or damaged."""

    # Value of each flag as text, by its name without dashes; defaults too.
    all: Mapping[str, str] = field(default_factory=dict)
    given: tuple[tuple[str, str, str], ...] = ()  # (section, flag, value) of the flags that the user gave
    made_with: tuple[str, ...] = ()  # lines with versions, repositories and the command that repeats the run
    home: Path = Path()  # folder in which the run was started; its relative paths begin there
    correction: tuple[str, ...] = ()  # lines that describe the correction; empty if it is not known

    def get(self, name: str) -> str | None:
        """Value of a flag as text; None if it has none."""
        value = self.all.get(name)
        return None if value in (None, "none", "null") else value

    @property
    def layout(self) -> str:
        """Sizes of the model-parallel groups larger than 1."""
        sizes = {short: self.get(flag) for short, flag in _LAYOUT.items()}
        words = [f"{short} {size}" for short, size in sizes.items() if size not in (None, "1")]
        return " · ".join(words) or "no model parallelism"


def settings_of(folder: Path) -> Settings:
    """Read the settings in a run's folder."""
    try:
        text, known = (folder / SETTINGS_FILE).read_text(encoding="utf-8"), read_settings(folder)
    except (OSError, UnicodeDecodeError):
        return Settings()
    values, home = _values(text), _START_FOLDER.search(text)
    head, _, body = text.partition("\n\n")
    given, section = [], ""
    for line in body.splitlines():
        name, colon, value = line.partition(": ")
        if line.startswith(_SECTION):
            section = line.removeprefix(_SECTION)
        elif colon and not line.startswith("#"):
            given.append((section, name, value))
    made_with = [line.removeprefix(_COMMENT) for line in head.splitlines()][:-1] if body else []
    strings = {name: value for name, value in values.items() if isinstance(value, str)}
    return Settings(
        {**known, **strings}, tuple(given), tuple(made_with), Path(home[1] if home else "."), _correction(values)
    )


def _values(text: str) -> dict[str, Any]:
    """Values of the given flags; empty if the file is no YAML mapping."""
    import yaml

    try:
        found = yaml.safe_load(text)
    # yaml raises ValueError for impossible dates and RecursionError for deep nesting.
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return {str(name): value for name, value in found.items()} if isinstance(found, dict) else {}


def _correction(values: Mapping[str, Any]) -> tuple[str, ...]:
    own = {name.replace("-", "_"): None if value == "none" else value for name, value in values.items()}
    try:
        fields = {name: own[name] for name in DEFAULTS if name in own}
        config = RolloutCorrectionConfig.from_dict(fields, dialect="megatron_rc")
    except (ValueError, TypeError):
        return ()
    return tuple(line for line in config.describe().splitlines() if not line.startswith(("metrics are", "flags:")))
