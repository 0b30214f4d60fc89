"""Metrics of a run from JSON, JSON lines or CSV, whoever wrote them."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rc.doctor.metric_names import STEP_NAMES, own_name

Row = dict[str, float]


def parse_json(text: str, path: Path) -> list[dict[str, Any]]:
    """The objects of a text that is one JSON value, or one a line.

    A last line that was cut off is left out, as a run leaves it that was killed.

    Raises:
        ValueError: it holds none.
    """
    try:
        values = json.loads(text)
        return _objects(values, path)
    except (json.JSONDecodeError, RecursionError):
        lines = [line for line in text.split("\n") if line.strip()]  # a text in it may hold other ends of lines
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(json.loads(line))
        except (json.JSONDecodeError, RecursionError):
            if number < len(lines) or number == 1:
                raise ValueError(f"{path}: line {number} is no JSON: the file is damaged") from None
    return _objects(found, path)


def _objects(values: Any, path: Path) -> list[dict[str, Any]]:
    values = [values] if isinstance(values, dict) else values
    if not (isinstance(values, list) and values and all(isinstance(value, dict) for value in values)):
        raise ValueError(f"{path}: expected JSON objects of names and numbers, one for each step")
    return values


def rows_of_objects(objects: Iterable[Mapping[str, Any]], prefix: str = "") -> Iterator[Mapping[str, Any]]:
    """One mapping for each step: names may stand below ``data`` (verl's file logger), or hold all steps each."""
    for value in objects:
        if isinstance(value.get("data"), dict):
            value = {**value, **value["data"]}
        columns = {name: _by_step(column) for name, column in value.items() if isinstance(column, (list, dict))}
        if not any(own_name(_unprefixed(name, prefix)) for name in columns):
            yield value
            continue
        steps = {step for column in columns.values() for step in column}
        for step in sorted(steps):
            yield {"step": step, **{name: column[step] for name, column in columns.items() if step in column}}


def _by_step(column: list[Any] | dict[str, Any]) -> dict[int, Any]:
    """NeMo-RL's ``{"1": 0.1, "2": 0.2}``, or a list from step 1 on."""
    if isinstance(column, list):
        return dict(enumerate(column, start=1))
    return {int(step): value for step, value in column.items() if step.isdecimal()}


def rows_of_csv(text: str, path: Path) -> Iterator[Mapping[str, Any]]:
    """The lines of a table with a line of names.

    Raises:
        ValueError: two columns are the same metric, as in an export of several runs.
    """
    reader = csv.DictReader(text.splitlines())
    names = [name for name in reader.fieldnames or () if name and not name.endswith(("__MIN", "__MAX"))]
    seen: dict[str, str] = {}
    for name in names:
        own = own_name(name)
        if own is not None and own in seen:
            raise ValueError(f"{path}: the columns {seen[own]!r} and {name!r} are both {own}: export one run")
        if own is not None:
            seen[own] = name
    for line in reader:
        yield {name: line[name] for name in names}


def own_rows(rows: Iterable[Mapping[str, Any]], path: Path, prefix: str = "") -> tuple[list[Row], int]:
    """Rows under our names, and how many were left out since a number in them is NaN or infinite.

    Args:
        rows: one for each step, under any program's names.
        path: where they come from.
        prefix: what stands before the names of the correction, where it is neither of the usual ones.

    Raises:
        ValueError: no row has a metric of the two policies, or none has numbers.
    """
    found, bad = [], 0
    names: set[Any] = set()
    for row in rows:
        names |= row.keys()
        own = own_row(row, prefix)
        if not own.keys() - {"step", "response_length"}:
            continue
        if all(map(math.isfinite, own.values())):
            found.append(own)
        else:
            bad += 1
    if not found and not bad and {"input", "output"} <= names:
        raise ValueError(
            f"{path} has responses without log-probs, as in verl's rollout_data_dir: give the run's metrics (its file "
            "logger's lines), or old_log_probs, rollout_log_probs and response_mask of a batch as lists or safetensors"
        )
    if not found and not bad and names == {"Wall time", "Step", "Value"}:
        raise ValueError(
            f"{path} is TensorBoard's table of one metric, which it does not name: change Value in its first line to "
            "the metric's name, for example rollout_corr/k3_kl"
        )
    if not found and not bad:
        shown = ", ".join(sorted(map(str, names))[:5]) or "none"
        raise ValueError(
            f"{path} has no metric of the two policies (its names: {shown}): give rollout_corr/kl and the like, the "
            "mismatch/ names of 2025-10, or slime's or NeMo-RL's"
        )
    if not found:
        raise ValueError(f"{path}: all {bad} rows have a number that is NaN or infinite: the log-probs are broken")
    return found, bad


def own_row(row: Mapping[str, Any], prefix: str) -> Row:
    """The numbers of one step under our names; what says nothing of the two policies is left out."""
    own: Row = {}
    if row.get("training/rollout_probs_diff_valid") in (0, 0.0, "0"):
        row = {name: value for name, value in row.items() if "rollout_probs_diff" not in name}
    for name, value in row.items():
        if name is None or isinstance(value, (list, dict)):
            continue
        known = "step" if name in STEP_NAMES else own_name(_unprefixed(name, prefix))
        number = _number(value)
        if known is not None and number is not None:
            own[known] = number
    return own


def _unprefixed(name: str, prefix: str) -> str:
    if prefix and name.startswith(prefix):
        return "rollout_corr/" + name.removeprefix(prefix)
    return name


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or value in (None, ""):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None
