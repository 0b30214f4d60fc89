"""Errors of the launcher's users: wrong flags, files and environments."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import metadata
from pathlib import Path

# Packages that a check of the settings does not need.
_OF_TRAINING_MACHINES = ("transformer_engine", "vllm", "wandb", "mbridge", "math_verify", "deep_ep")
_noted: ContextVar[list[str] | None] = ContextVar("noted", default=None)


class ConfigurationError(ValueError):
    """Flags, files or an environment that cannot work; the message is one sentence that names the remedy."""


class RunError(RuntimeError):
    """An error that ends the run; the message is one sentence for the user.

    One rank may raise it alone: it ends this rank, and torchrun ends the others.

    Args:
        message: one sentence.
        code: exit code of the run, below 256.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def missing_packages_noted() -> Iterator[list[str]]:
    """Fill the list that this yields with errors of missing packages that only the machines of a run need."""
    notes: list[str] = []
    token = _noted.set(notes)
    try:
        yield notes
    finally:
        _noted.reset(token)


def require(module: str, user: str, extra: str) -> None:
    """Refuse a flag or command, ``user``, whose optional package is not installed; ``extra`` installs it."""
    if not has_module(module):
        refuse_or_note(module, f"{user} needs {module}, which is not installed: {pip_install(extra)}")


def has_module(module: str) -> bool:
    """Whether a module is installed."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing
        return False


def pip_install(extra: str) -> str:
    """Return the command that installs an extra, from the source that this package was installed from."""
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
    """Note a missing package if only the machines of a run need it and :func:`missing_packages_noted` is active.

    Raises:
        ConfigurationError: otherwise, with these words.
    """
    notes = _noted.get()
    if notes is None or module not in _OF_TRAINING_MACHINES:
        raise ConfigurationError(words)
    if words not in notes:
        notes.append(words)


def flag(name: str) -> str:
    """Return a flag as it is typed, from its name with underscores."""
    return f"--{name.replace('_', '-')}"


def require_multiple(name: str, value: int, by: str, divisor: int, *, factor: int = 1) -> None:
    """Raise ConfigurationError unless the flag ``name`` is a multiple of the flag ``by``, times the factor."""
    if value % (divisor * factor):
        times = f"{factor} · " if factor > 1 else ""
        raise ConfigurationError(f"{flag(name)} {value} must be a multiple of {times}{flag(by)} = {divisor * factor}")


def one_line(error: BaseException, most: int = 300) -> str:
    """Return the message of an error on one line, cut after so many characters; without a message its type."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= most else f"{text[:most]} …"
