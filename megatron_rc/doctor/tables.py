"""Readers of metrics: JSON, JSON lines and CSV of any program."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rc.doctor.metric_names import STEP_NAMES, own_name
from megatron_rc.doctor.series import History

Row = dict[str, float]
_OF_ANY_RUN = {"step", "response_length", "grad_norm", "reward"}  # metrics that any run has


def object_of(line: str) -> dict[str, Any] | None:
    """The JSON object of a line, or None."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def parse_json(text: str, path: Path) -> list[dict[str, Any]]:
    """The objects of a text, one JSON value or JSON lines as in :func:`parse_lines`; ValueError if there is none."""
    try:
        values = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        values = list(parse_lines(text.split("\n"), path))  # not splitlines(): strings may hold its other line ends
    return _objects(values, path)


def parse_lines(lines: Iterable[str], path: Path) -> Iterator[dict[str, Any]]:
    """The object of each line, one at a time; ValueError for a line that is none.

    An incomplete last line, as a killed run leaves it, is ignored.
    """
    damaged = 0
    for number, line in enumerate((line for line in lines if line.strip()), start=1):
        if damaged:
            break
        try:
            yield from _objects([json.loads(line)], path)
        except (json.JSONDecodeError, RecursionError):
            damaged = number
    if damaged and (damaged == 1 or damaged < number):
        raise ValueError(f"{path}: line {damaged} is not JSON: the file is damaged")


def _objects(values: Any, path: Path) -> list[dict[str, Any]]:
    values = [values] if isinstance(values, dict) else values
    if not (isinstance(values, list) and values and all(isinstance(value, dict) for value in values)):
        raise ValueError(f"{path}: expected JSON objects of names and numbers, one for each step")
    return values


def rows_of_objects(objects: Iterable[Mapping[str, Any]], prefix: str = "") -> Iterator[Mapping[str, Any]]:
    """One mapping for each step; reads names below ``data`` (verl's logger) and names that hold all steps."""
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
    """Values by step, from NeMo-RL's ``{"1": 0.1, "2": 0.2}`` or a list that begins with step 1."""
    if isinstance(column, list):
        return dict(enumerate(column, start=1))
    return {int(step): value for step, value in column.items() if step.isdecimal()}


def rows_of_csv(lines: Iterable[str], path: Path) -> Iterator[Mapping[str, Any]]:
    """The rows of a table whose first line has names.

    ValueError if it is no CSV, or if two columns are the same metric, as in an export of several runs.
    """
    reader = csv.DictReader(lines)
    try:
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
    except csv.Error as problem:
        raise ValueError(
            f"{path}: line {reader.line_num + 1} is not CSV ({problem}): export only the metrics"
        ) from None


def own_rows(rows: Iterable[Mapping[str, Any]], path: Path, prefix: str = "") -> tuple[History, int, set[Any]]:
    """Metrics of a run under our names, the number of rows left out because of NaN or infinity, and the file's names.

    ``prefix`` is the run's own prefix of the correction's metrics. ValueError, with the path, if no row has a metric of
    the two policies, or none has numbers.
    """
    found, bad = History(), 0
    names: set[Any] = set()
    for row in rows:
        names |= row.keys()
        own = own_row(row, prefix)
        if not own.keys() - _OF_ANY_RUN:
            continue
        if all(map(math.isfinite, own.values())):
            found.add(own)
        else:
            bad += 1
    if found.num_rows:
        return found, bad, names
    if bad:
        raise ValueError(f"{path}: all {bad} rows have a number that is NaN or infinite: the log-probs are broken")
    raise ValueError(f"{path} {_without_metrics(names)}")


def _without_metrics(names: set[Any]) -> str:
    """A sentence about a file without usable metrics, with the remedy."""
    if {"input", "output"} <= names:
        return (
            "has responses without log-probs, as in verl's rollout_data_dir: give the run's metrics (its file "
            "logger's lines), or old_log_probs, rollout_log_probs and response_mask of a batch as lists or safetensors"
        )
    if names == {"Wall time", "Step", "Value"}:
        return (
            "is TensorBoard's table of one metric without its name: replace Value in the first line by the metric's "
            "name, for example rollout_corr/k3_kl"
        )
    shown = ", ".join(sorted(map(str, names))[:5]) or "none"
    return (
        f"has no metric of the two policies (its names: {shown}): give rollout_corr/kl and others, the "
        "mismatch/ names of 2025-10, or the names of slime or NeMo-RL"
    )


def own_row(row: Mapping[str, Any], prefix: str) -> Row:
    """The numbers of one step under our names, without metrics that the rules do not use."""
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
