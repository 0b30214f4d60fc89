"""The reader of metrics: JSON, JSON lines, CSV, TensorBoard's folders and ``trainer_state.json`` of any program."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rc.doctor.programs import ROLLOUT, STEP_NAMES, own_name, without_run
from megatron_rc.doctor.series import DISTANCES, History

Row = dict[str, float]
EVENTS = "events.out.tfevents.*"
_OUT_OF_ORDER = 0.05  # share of the rows; only a run that was resumed every few rows has more
_OF_ANY_RUN = {"step", "response_length", "grad_norm", "reward", "entropy"}  # metrics that any run has
# Lists under these names have a number for each token: such a line is a response, not the history of a run.
_OF_TOKENS = {
    "token_ids",
    "tokens",
    "input_ids",
    "position_ids",
    "responses",
    "loss_mask",
    "response_mask",
    "token_mask",
}


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
    except (ValueError, RecursionError):
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
        except json.JSONDecodeError:
            damaged = number
        except (ValueError, RecursionError) as problem:  # of an integer of thousands of digits, or deep nesting
            raise ValueError(f"{path}: line {number} cannot be read ({problem})") from None
    if damaged and (damaged == 1 or damaged < number):
        raise ValueError(f"{path}: line {damaged} is not JSON: the file is damaged")


def _objects(values: Any, path: Path) -> list[dict[str, Any]]:
    values = [values] if isinstance(values, dict) else values
    if not (isinstance(values, list) and values and all(isinstance(value, dict) for value in values)):
        raise ValueError(f"{path}: expected JSON objects of names and numbers, one for each step")
    return values


def rows_of_objects(objects: Iterable[Mapping[str, Any]], path: Path, prefix: str = "") -> Iterator[Mapping[str, Any]]:
    """One mapping for each step.

    An object is a step, has its metrics below ``data`` (verl's logger), has all steps in ``log_history`` (the
    ``trainer_state.json`` of transformers), or has a list or an object of steps under each name. Only a file of one
    object may have such lists; in several they are numbers of tokens, and a ValueError.
    """
    with_lists: set[str] = set()
    for number, value in enumerate(objects, start=1):
        if isinstance(value.get("log_history"), list):
            yield from _objects(value["log_history"], path)
            continue
        if isinstance(value.get("data"), dict):
            value = {**value, **value["data"]}
        if not value.keys().isdisjoint(ROLLOUT):
            raise ValueError(
                f"{path}: object {number} has the engine's log-prob of a token beside or instead of metrics: give the "
                "metrics alone, or one object for each response with its log-probs as lists"
            )
        columns = {
            name: column
            for name, column in value.items()
            if isinstance(column, (list, dict)) and own_name(_unprefixed(name, prefix)) is not None
        }
        with_lists |= {name for name, column in columns.items() if isinstance(column, list)}
        if with_lists and (number > 1 or any(isinstance(value.get(name), list) for name in _OF_TOKENS)):
            names = ", ".join(sorted(with_lists))
            raise ValueError(
                f"{path}: {names} has a number for each token: this is a record of responses without the log-probs of "
                "both policies, and no history of a run"
            )
        if not columns:
            yield value
            continue
        by_step = {name: _by_step(column) for name, column in value.items() if name in columns or name in STEP_NAMES}
        steps = {step for column in by_step.values() for step in column}
        for step in sorted(steps):
            yield {"step": step, **{name: column[step] for name, column in by_step.items() if step in column}}


def _by_step(column: Any) -> dict[int, Any]:
    """Values by step, from NeMo-RL's ``{"1": 0.1, "2": 0.2}`` or a list that begins with step 1."""
    if isinstance(column, list):
        return dict(enumerate(column, start=1))
    if isinstance(column, dict):
        return {int(step): value for step, value in column.items() if step.isdecimal()}
    return {}


def rows_of_csv(lines: Iterable[str], path: Path) -> Iterator[Mapping[str, Any]]:
    """The rows of a table whose first line has names; ValueError if it is no CSV."""
    reader = csv.DictReader(lines)
    try:
        names = [name for name in reader.fieldnames or () if name and not name.endswith(("__MIN", "__MAX"))]
        for line in reader:
            yield {name: line[name] for name in names}
    except csv.Error as problem:
        raise ValueError(
            f"{path}: line {reader.line_num + 1} is not CSV ({problem}): export only the metrics"
        ) from None


def rows_of_events(folder: Path) -> Iterator[Mapping[str, Any]]:
    """The scalars of each step in a folder of TensorBoard's event files; ImportError without TensorBoard."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ModuleNotFoundError:
        raise ImportError(f"{folder} needs tensorboard, which is not installed: pip install tensorboard") from None
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    by_step: dict[int, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            by_step.setdefault(event.step, {})[name] = event.value
    for step in sorted(by_step):
        yield {"step": step, **by_step[step]}


def own_rows(rows: Iterable[Mapping[str, Any]], path: Path, prefix: str = "") -> tuple[History, int, set[Any]]:
    """Metrics of a run under our names, the number of rows with a NaN or infinite one, and the file's names.

    A distance that is NaN or infinite counts as infinite, beyond its limit; any other such number is left out. A reward
    or a gradient norm that is NaN says nothing about the two policies, and its row is not counted. ``prefix`` is the
    run's own prefix of the correction's metrics. ValueError, with the path, if no row has a metric of the two policies,
    if all have a NaN or infinite one, if a metric of the mismatch has two columns, or if the rows are not in the order
    of time.
    """
    history = History()
    bad = 0
    names: set[Any] = set()
    for row in rows:
        names |= row.keys()
        try:
            metrics = own_row(row, prefix)
        except ValueError as problem:
            raise ValueError(f"{path}: {problem}") from None
        if not metrics.keys() - _OF_ANY_RUN:
            continue
        unusable = {name for name, value in metrics.items() if not math.isfinite(value)}
        bad += not unusable <= _OF_ANY_RUN
        beyond = dict.fromkeys(unusable & DISTANCES.keys(), math.inf)
        history.add({name: value for name, value in metrics.items() if name not in unusable} | beyond)
    if _rows_out_of_order(history.steps) > _OUT_OF_ORDER * history.num_rows:
        raise ValueError(f"{path}: the rows are not in the order of their steps: sort them, the oldest step first")
    if history.num_rows > bad:
        return history, bad, names
    if bad:
        raise ValueError(f"{path}: all {bad} rows have a number that is NaN or infinite: the log-probs are broken")
    raise ValueError(f"{path} {_without_metrics(names)}")


def _rows_out_of_order(steps: Iterable[float]) -> int:
    """Number of rows whose step is below that of the row before, and that no row before has had.

    The steps of a resumed run go down once, often to a step that it had before; then they rise again, also if it logs
    at other steps now.
    """
    seen: set[float] = set()
    step_before = -math.inf
    count = 0
    for step in steps:
        if step < step_before and step not in seen:
            count += 1
        seen.add(step)
        step_before = step
    return count


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
    if any(own_name(name) == "probs_diff_valid" for name in names if isinstance(name, str)):
        return (
            "has no step in which verl compared a token (training/rollout_probs_diff_valid is 0): give the "
            "rollout_corr/ metrics, or a recorded batch"
        )
    shown = ", ".join(sorted(map(str, names))[:5]) or "none"
    return (
        f"has no metric of the two policies (its names: {shown}): give rollout_corr/kl and others, or the names of "
        "slime, NeMo-RL, TRL or prime-rl"
    )


def own_row(row: Mapping[str, Any], prefix: str) -> Row:
    """The numbers of one step under our names, without metrics that the rules do not use.

    ``prefix`` is the run's own prefix of the correction's metrics; empty for another program's. Two columns may be
    the same metric, as in an export of two runs: a metric of the mismatch raises ValueError then; of reward, length,
    entropy and gradient norm the first column counts.
    """
    metrics: Row = {}
    first_name_of: dict[tuple[str, str], str] = {}
    for name, value in row.items():
        if name is None or isinstance(value, (list, dict)):
            continue
        metric = "step" if name in STEP_NAMES else own_name(_unprefixed(name, prefix))
        if metric is None:
            continue

        # A program may split one of our shares into two, below and above two bounds: they are added up.
        share_name = without_run(name).rpartition("/")[2] if "fraction" in name else ""
        first_name = first_name_of.setdefault((metric, share_name), name)
        if first_name != name and metric in _OF_ANY_RUN - {"step"}:
            # These only describe a run: programs log them for several of its parts.
            continue
        if first_name != name and metric != "step":
            raise ValueError(f"{first_name!r} and {name!r} are both {metric}: export one run, and one of its parts")

        number = _number(value)
        if number is None:
            continue
        if share_name and metric in metrics:
            number = min(metrics[metric] + number, 1.0)
        metrics[metric] = number
    if metrics.pop("probs_diff_valid", 1.0) == 0:
        metrics.pop("probs_diff_mean", None)
        metrics.pop("probs_correlation", None)
    return metrics


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
