"""Flags of the model that a Hugging Face ``config.json`` describes."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.weights.entries import Flags, UnknownFeatureError
from megatron_rc.launch.weights.families import ALIASES, FAMILIES, NOT_IN_TABLES
from megatron_rc.launch.weights.megatron_bridge import is_installed, read_bridged
from megatron_rc.launch.weights.rotary import contradiction

_log = logging.getLogger("megatron_rc")


def read_architecture(folder: str | Path, name: str = "--load-hf") -> Flags:
    """Read ``config.json`` as values of flags, whose names have no dashes in front.

    ``name`` is the flag that gave the directory. Models with a feature that the tables of families do not convert are
    refused. Rotary parameters that contradict each other are one line in the log.
    """
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise ConfigurationError(
            f"{name} {folder}: there is no such directory here, and nothing is downloaded: give the directory of a "
            "Hugging Face model, such as hf download NAME --local-dir DIR makes"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{name} {folder}: {path.name} cannot be read ({error}); give the directory of a Hugging Face model"
        ) from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if isinstance(kind, str):
        kind = ALIASES.get(kind, kind)
    if not isinstance(kind, str) or kind not in FAMILIES:
        reason = ""
        if isinstance(kind, str):
            if is_installed():
                return read_bridged(folder)
            if kind in NOT_IN_TABLES:
                reason = f" ({NOT_IN_TABLES[kind]})"
        known = ", ".join(sorted({*FAMILIES, *ALIASES}))
        raise ConfigurationError(
            f"{name} {folder}: model_type {kind!r} is not known{reason}; known are {known}: use a model of these, or "
            "Megatron-Bridge with Transformer Engine on a GPU (docs/models.md)"
        )
    try:
        flags = FAMILIES[kind].read(config)
        contradicts = contradiction(config)
    except KeyError as error:
        raise ConfigurationError(f"{name} {folder}: {path.name} lacks {error}") from error
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ConfigurationError(f"{name} {folder}: {path.name} has an entry of the wrong type ({error})") from error
    except UnknownFeatureError as error:
        raise ConfigurationError(
            f"{name} {folder}: {error}; such a model is not converted here (docs/models.md)"
        ) from error
    if contradicts is not None:
        _log.warning("%s %s: %s", name, folder, contradicts)
    return flags
