"""What a user of the launcher can get wrong."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import metadata
from pathlib import Path

# Packages that the settings alone can be checked without.
_OF_TRAINING_MACHINES = ("transformer_engine", "vllm", "wandb", "mbridge", "math_verify", "deep_ep")
_noted: ContextVar[list[str] | None] = ContextVar("noted", default=None)


class ConfigurationError(ValueError):
    """Flags, files or an environment that cannot work; the message is one sentence that names the remedy."""


@contextmanager
def missing_packages_noted() -> Iterator[list[str]]:
    """Inside this block a package that only the machines of a run need is noted where it is missing, not refused.

    Yields:
        what is missing, each in the words of its error; filled inside the block.
    """
    notes: list[str] = []
    token = _noted.set(notes)
    try:
        yield notes
    finally:
        _noted.reset(token)


def require(module: str, user: str, extra: str) -> None:
    """Check that an optional package is there.

    Args:
        module: its import name.
        user: what needs it, as the user would say it.
        extra: the extra of this package that brings it.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if found:
        return
    refuse_or_note(module, f"{user} needs {module}, which is not installed: {pip_install(extra)}")


def pip_install(extra: str) -> str:
    """The command that brings an extra: from the checkout, or from wherever this package was installed from."""
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "setup.py").is_file():
        return f"pip install -e '{checkout}[{extra}]'"
    try:
        source = json.loads(metadata.distribution("megatron-rc").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        source = {}
    address = source.get("url", "")
    if "vcs_info" in source:
        address = f"git+{address}@{source['vcs_info']['commit_id']}"
    return f"pip install 'megatron-rc[{extra}]{f' @ {address}' * bool(address)}'"


def refuse_or_note(module: str, words: str) -> None:
    """Say that a package is missing: as a note where another machine's run is looked at, if only that needs it.

    Raises:
        ConfigurationError: with these words, otherwise.
    """
    notes = _noted.get()
    if notes is None or module not in _OF_TRAINING_MACHINES:
        raise ConfigurationError(words)
    if words not in notes:
        notes.append(words)


def flag(name: str) -> str:
    """A flag as it is typed, from its name with underscores."""
    return f"--{name.replace('_', '-')}"


def require_multiple(what: str, value: int, by: str, divisor: int, *, factor: int = 1) -> None:
    """Raise ConfigurationError unless the flag ``what`` is a multiple of the flag ``by``, times the factor."""
    if value % (divisor * factor):
        times = f"{factor} · " if factor > 1 else ""
        raise ConfigurationError(f"{flag(what)} {value} must be a multiple of {times}{flag(by)} = {divisor * factor}")
