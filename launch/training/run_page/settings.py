"""What ``config.yaml`` says of a run: what was given, the correction in words, and what it ran on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rc import RolloutCorrectionConfig
from megatron_rc.doctor.inputs import read_settings
from megatron_rc.launch.training.settings_file import SETTINGS_FILE
from megatron_rc.settings.fields import DEFAULTS

_SECTION, _COMMENT = re.compile(r"^# -- (.+)$"), "# "
_AGAIN = re.compile(r"^# Once more, in (.+): python -m ", re.MULTILINE)
_LAYOUT = {"tensor": "TP", "pipeline": "PP", "context": "CP", "expert": "EP"}


@dataclass(frozen=True)
class Settings:
    """Of a run.

    Attributes:
        all: every flag without dashes and its value as text, defaults too.
        given: (section, flag, value) of what was given.
        made_with: versions and repositories, a line each, and how to start the run again.
        home: the folder that the run was started in, which its paths may be relative to.
        correction: in words, a line each; empty where it is not known.
    """

    all: Mapping[str, str] = field(default_factory=dict)
    given: tuple[tuple[str, str, str], ...] = ()
    made_with: tuple[str, ...] = ()
    home: Path = Path()
    correction: tuple[str, ...] = ()

    def get(self, name: str) -> str | None:
        """The value of a flag as text; None: it has none."""
        value = self.all.get(name)
        return None if value in (None, "none", "null") else value

    @property
    def layout(self) -> str:
        """Sizes of the model-parallel groups that are not 1."""
        sizes = {short: self.get(f"{name}-model-parallel-size") for name, short in _LAYOUT.items()}
        sizes["CP"] = self.get("context-parallel-size")
        words = [f"{short} {size}" for short, size in sizes.items() if size not in (None, "1")]
        return " · ".join(words) or "no model parallelism"


def settings_of(folder: Path) -> Settings:
    """What a run's folder says; nothing where it has no settings, or some that cannot be read."""
    path = folder / SETTINGS_FILE
    try:
        text, known = path.read_text(encoding="utf-8"), read_settings(folder)
    except (OSError, UnicodeDecodeError):
        return Settings()
    values, lines, home = _values(text), text.splitlines(), _AGAIN.search(text)
    known = {**known, **{name: value for name, value in values.items() if isinstance(value, str)}}
    head = [line.removeprefix(_COMMENT) for line in lines[: lines.index("")]] if "" in lines else []
    given, section = [], ""
    for line in lines[len(head) :]:
        match = _SECTION.match(line)
        section = match[1] if match else section
        name, colon, value = line.partition(": ")
        if colon and not line.startswith("#"):
            given.append((section, name, value))
    return Settings(known, tuple(given), tuple(head[:-1]), Path(home[1] if home else "."), _correction(values))


def _values(text: str) -> dict[str, Any]:
    """What was given, by flag."""
    import yaml

    try:
        found = yaml.safe_load(text)
    # A date that is none is a ValueError, and what is nested too deep a RecursionError.
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


def as_data(settings: Settings) -> dict[str, Any]:
    """For the page."""
    return {
        "given": [list(one) for one in settings.given],
        "made_with": list(settings.made_with),
        "correction": list(settings.correction),
    }
