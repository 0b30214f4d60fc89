"""Fields that override fields: earlier settings that a later one makes meaningless are dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rc.settings.consistency import idle
from megatron_rc.settings.fields import DEFAULTS

_WORDS: Mapping[str, Any] = {"none": None, "null": None, "true": True, "false": False}


def value_of(text: str) -> Any:
    """The value of a field from its text: None, true or false in words, a float for one number, else the text."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        # float() would read 0.5_2 as 0.52.
        return text if "_" in text else float(text)
    except ValueError:
        return text


def overridden(fields: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with the given ones; fields that these make meaningless go back to their defaults."""
    now = {**fields, **given}
    was_masked = fields["rollout_is_mode"] == "mask" or (
        fields["rollout_is_mode"] is None and "_" in str(fields["rollout_is_threshold"])
    )
    if isinstance(given.get("rollout_is_threshold"), float) and now["rollout_is"] and was_masked:
        # IcePop with one new bound stays IcePop; the replaced pair of bounds had implied it.
        now["rollout_is_mode"] = given.get("rollout_is_mode", "mask")
    for name in _leftovers(fields, now) - _leftovers(fields, fields) - given.keys():
        now[name] = DEFAULTS[name]
    return now


def _leftovers(base: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Settings that do nothing beside the others of ``now``; thresholds if the criteria are not ``base``'s."""
    left = set(idle(now))
    if "rollout_is_batch_normalize" in left:
        left.add("rollout_is_batch_normalize_scope")
    if now["rollout_rs"] != base["rollout_rs"]:
        left.update(("rollout_rs_threshold", "rollout_rs_threshold_lower"))
    if now["rollout_is"] is None and not now["rollout_rs"]:
        left.add("rollout_staleness_scale")
    if "_" in str(now["rollout_rs_threshold"]):
        left.add("rollout_rs_threshold_lower")
    return left
