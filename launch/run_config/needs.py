"""Conditions under which a flag has an effect, as ``Option.needs`` spells them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_rc.launch.errors import flag


def is_met(need: str, settings: Any) -> bool:
    """Whether the values of flags, by name as attributes, meet a condition."""
    name, values = _parsed(need)
    value = getattr(settings, name)
    return (str(value) in values if values else bool(value)) != need.startswith("!")


def name_of(need: str) -> str:
    """Flag that a condition is about."""
    return _parsed(need)[0]


def why_unmet(need: str, settings: Any) -> str:
    """End of a sentence that says why a flag does nothing, and the remedy."""
    name, values = _parsed(need)
    value = getattr(settings, name)
    shown = " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
    shown = "" if isinstance(value, bool) else shown
    if need.startswith("!"):
        return f"with {flag(name)} {shown}".rstrip() + ": drop one of them"
    if values and value is not None:
        return f"with {flag(name)} {shown}: drop it, or use {' or '.join(values)}"
    return f"without {_words(need)}: give both, or neither"


def in_words(needs: Iterable[str]) -> str:
    """Conditions at the end of a help text."""
    wanted = [_words(need) for need in needs if not need.startswith("!")]
    others = [_words(need) for need in needs if need.startswith("!")]
    parts = {"needs": " and ".join(wanted), "not with": " or ".join(others)}
    return "".join(f"; {head} {words}" for head, words in parts.items() if words)


def _parsed(need: str) -> tuple[str, list[str]]:
    name, _, values = need.removeprefix("!").partition("=")
    return name, values.split("|") if values else []


def _words(need: str) -> str:
    name, values = _parsed(need)
    return f"{flag(name)} {' or '.join(values)}".rstrip()
