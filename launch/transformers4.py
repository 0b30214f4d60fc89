"""Additions to a written model directory, with which transformers 4 reads it as transformers 5 does.

transformers 5 renamed entries of ``config.json`` and a class of tokenizers. An earlier release takes its own default
for an entry that it does not find, for instance a rotary base of 10,000, and says nothing. So do older vLLM, SGLang and
the code that DeepSeek publishes with its models, which read ``config.json`` in their own ways.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG = "config.json"
TOKENIZER = "tokenizer_config.json"
# Entries that one architecture alone had under another name: model_type, name since transformers 5, name before.
_RENAMED = {"qwen3_moe": ("num_local_experts", "num_experts")}
# What transformers 5 calls a tokenizer that is complete in tokenizer.json; it still knows the earlier name.
_TOKENIZER_CLASS = "TokenizersBackend"
_EARLIER_TOKENIZER_CLASS = "PreTrainedTokenizerFast"


def add_earlier_entries(folder: Path) -> None:
    """Write ``config.json``'s entries under their earlier names too; transformers 5 wrote the file.

    Raises:
        OSError: the file cannot be read or written.
    """
    entries = _read(folder / CONFIG)
    _write(folder / CONFIG, entries | earlier_entries(entries))


def add_earlier_tokenizer_class(folder: Path) -> None:
    """Name the tokenizer's class as transformers 4 does; transformers 5 wrote the files.

    Raises:
        OSError: the file cannot be read or written.
    """
    entries = _read(folder / TOKENIZER)
    if entries.get("tokenizer_class") == _TOKENIZER_CLASS:
        _write(folder / TOKENIZER, entries | {"tokenizer_class": _EARLIER_TOKENIZER_CLASS})


def earlier_entries(entries: dict[str, Any]) -> dict[str, Any]:
    """Entries with which a reader that is older than transformers 5 reads the same model from a ``config.json``."""
    earlier: dict[str, Any] = {}
    if "dtype" in entries:
        earlier["torch_dtype"] = entries["dtype"]
    earlier |= _rotary_entries(entries.get("rope_parameters") or {})
    if entries.get("model_type") in _RENAMED:
        name, earlier_name = _RENAMED[entries["model_type"]]
        earlier[earlier_name] = entries[name]
    return earlier


def _rotary_entries(parameters: dict[str, Any]) -> dict[str, Any]:
    """``rope_theta``, ``rope_scaling`` and ``partial_rotary_factor`` of a ``rope_parameters``."""
    sets = [values for values in parameters.values() if isinstance(values, dict)]
    if sets and all(values == sets[0] for values in sets):
        parameters = sets[0]
    if "rope_theta" not in parameters:  # different parameters for the kinds of layers have no earlier form
        return {}
    earlier: dict[str, Any] = {"rope_theta": parameters["rope_theta"], "rope_scaling": None}
    if "partial_rotary_factor" in parameters:
        earlier["partial_rotary_factor"] = parameters["partial_rotary_factor"]
    kind = parameters["rope_type"]
    if kind != "default":
        scaling = {name: value for name, value in parameters.items() if name not in ("rope_type", *earlier)}
        # The first readers of scaling look for its kind under "type".
        earlier["rope_scaling"] = {"rope_type": kind, "type": kind} | scaling
    return earlier


def _read(path: Path) -> dict[str, Any]:
    entries: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return entries


def _write(path: Path, entries: dict[str, Any]) -> None:
    path.write_text(json.dumps(entries, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
