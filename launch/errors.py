"""What a user of the launcher can get wrong."""

from __future__ import annotations

import importlib.util


class ConfigurationError(ValueError):
    """Flags, files or an environment that cannot work; the message is one sentence that names the remedy."""


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
    if not found:
        raise ConfigurationError(f"{user} needs {module}, which is not installed: pip install 'megatron-rc[{extra}]'")


def flag(name: str) -> str:
    """A flag as it is typed, from its name with underscores."""
    return f"--{name.replace('_', '-')}"


def require_multiple(what: str, value: int, by: str, divisor: int, *, factor: int = 1) -> None:
    """Raise ConfigurationError unless the flag ``what`` is a multiple of the flag ``by``, times the factor."""
    if value % (divisor * factor):
        times = f"{factor} · " if factor > 1 else ""
        raise ConfigurationError(f"{flag(what)} {value} must be a multiple of {times}{flag(by)} = {divisor * factor}")
