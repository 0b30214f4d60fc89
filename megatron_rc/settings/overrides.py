"""Settings that override settings: earlier ones that a later one makes meaningless are dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rc.settings.consistency import idle_fields
from megatron_rc.settings.fields import DEFAULTS

_WORDS: Mapping[str, Any] = {"none": None, "null": None, "true": True, "false": False}


def value_of(text: str) -> Any:
    """Return the value of a field from its text: None or a bool in words, a float for one number, else the text."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    # Python reads 0.5_2 as 0.52; in settings it is a pair.
    if "_" in text:
        return text
    try:
        return float(text)
    except ValueError:
        return text


def overridden(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with the changes; fields that the changes make meaningless get their defaults.

    For example, ``rollout_is=None`` drops a threshold of the weights. A field that is changed itself is never dropped.

    Args:
        fields: every field by name.
        changes: some fields by name.
    """
    result = {**fields, **changes}
    has_one_new_bound = isinstance(changes.get("rollout_is_threshold"), (int, float))
    if has_one_new_bound and _masks(fields) and result["rollout_is"]:
        # A pair of bounds alone means the mode mask. IcePop with one new bound stays IcePop.
        result["rollout_is_mode"] = changes.get("rollout_is_mode", "mask")

    became_idle = _meaningless(fields, result) - _meaningless(fields, fields)
    for name in became_idle - changes.keys():
        result[name] = DEFAULTS[name]
    return result


def _masks(fields: Mapping[str, Any]) -> bool:
    """Return whether the weights' mode is ``mask``, by its name or by a pair of bounds."""
    has_pair = "_" in str(fields["rollout_is_threshold"])
    return fields["rollout_is_mode"] == "mask" or (fields["rollout_is_mode"] is None and has_pair)


def _meaningless(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Return the fields of ``after`` that do nothing there, or that belong to criteria of ``before`` alone."""
    names = set(idle_fields(after))
    if "rollout_is_batch_normalize" in names:
        names.add("rollout_is_batch_normalize_scope")
    if after["rollout_rs"] != before["rollout_rs"]:
        names.update(("rollout_rs_threshold", "rollout_rs_threshold_lower"))
    if after["rollout_is"] is None and not after["rollout_rs"]:
        names.add("rollout_staleness_scale")
    if "_" in str(after["rollout_rs_threshold"]):
        names.add("rollout_rs_threshold_lower")
    return names
