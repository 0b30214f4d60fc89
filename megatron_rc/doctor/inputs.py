"""Reads the doctor's input: metrics of a run, or a recorded batch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from megatron_rc import RolloutBatch, from_json_lines, load_rollouts
from megatron_rc.doctor.facts import Facts
from megatron_rc.doctor.measure import facts_of_batch
from megatron_rc.doctor.other_records import is_own, is_record, read_tensor_record, sampled_of_objects
from megatron_rc.doctor.programs import OWN, WORDS, program_of
from megatron_rc.doctor.sampled import Sampled
from megatron_rc.doctor.series import History, facts_of_series
from megatron_rc.doctor.tables import (
    EVENTS,
    object_of,
    own_rows,
    parse_json,
    parse_lines,
    rows_of_csv,
    rows_of_events,
    rows_of_objects,
)
from megatron_rc.records.tensor_files import SUFFIXES

METRICS_FILE = "metrics.jsonl"
SETTINGS_FILE = "config.yaml"
TRAINER_STATE = "trainer_state.json"
_UNREAD = (".pkl", ".pickle", ".bin", ".dp", ".npy", ".parquet", ".arrow")
_SETTING = re.compile(r"^(?:# ?)?([a-z][a-z0-9-]*): (.+)$", re.MULTILINE)
_STEP = re.compile(r"(step-(\d+))-replica-\d+\.safetensors")


@dataclass(frozen=True, eq=False)
class Evidence:
    """Input of the doctor: its path and size in words, its numbers, and a sentence for each omission."""

    what: str
    facts: Facts
    sampled: Sampled | None = None  # the responses of a recorded batch; None for metrics
    notes: tuple[str, ...] = ()
    program: str = OWN  # that wrote it
    history: History | None = None  # the metrics of a run; None for a batch
    settings: Mapping[str, str] | None = None  # flags of the run; None if they are unknown

    def of_level(self, level: str) -> Evidence:
        """The same metrics of a run, read as those of weights of this level; ``none`` without weights."""
        if self.history is None:
            raise ValueError(
                f"--rollout-is {level} is for metrics: a recorded batch is judged without weights; drop it"
            )
        return replace(self, facts=facts_of_series(self.history, self.settings, level))


def read_evidence(path: Path) -> Evidence:
    """The evidence of a run's folder, a folder of recorded batches, or a file of metrics or of a batch.

    Read are JSON, JSON lines and CSV, and for batches safetensors, JSON lines, ``.pt`` and ``.npz``. ValueError, with
    the remedy, if the input cannot be used.
    """
    try:
        return _read_folder(path) if path.is_dir() else _read_file(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file: give metrics as JSON or CSV, or a batch as safetensors") from None


def _read_folder(path: Path) -> Evidence:
    if (path / METRICS_FILE).is_file():
        return _read_file(path / METRICS_FILE)
    if (path / TRAINER_STATE).is_file():
        return _read_file(path / TRAINER_STATE)
    batches = sorted(path.glob("*.safetensors"))
    if not batches and any(path.glob(EVENTS)):
        return _of_rows(rows_of_events(path), path)
    if not batches:
        raise ValueError(
            f"{path} has neither {METRICS_FILE}, {TRAINER_STATE}, {EVENTS} nor *.safetensors: name a run's folder, or "
            "a file"
        )
    files = _of_one_step(batches[-1], batches)
    before = [file for file in batches if file not in files]
    sampled = _sampled(files)
    which = "the last of its batches"
    if sampled.old_log_probs is None and before:
        # A run that ended within this batch left it without the trainer's log-probs.
        earlier = _of_one_step(before[-1], before)
        sampled_earlier = _sampled(earlier)
        if sampled_earlier.old_log_probs is not None:
            files = earlier
            sampled = sampled_earlier
            which = "the last of its batches that has log-probs of the trainer"
    match = _STEP.fullmatch(files[-1].name)
    name = files[-1].name if match is None else match[1]
    return _of_batch(sampled, f"{path}, {name}, {which}", files[-1])


def _of_one_step(file: Path, batches: Sequence[Path]) -> list[Path]:
    """Files of all replicas of the step that ``file`` belongs to."""
    match = _STEP.fullmatch(file.name)
    return [file] if match is None else [batch for batch in batches if batch.name.startswith(f"{match[1]}-")]


def _sampled(files: Sequence[Path]) -> Sampled:
    return Sampled.of_batch(RolloutBatch.concatenate([load_rollouts(file) for file in files]))


def _read_file(path: Path) -> Evidence:
    if path.suffix in SUFFIXES:
        record = read_tensor_record(path)
        if isinstance(record, RolloutBatch):
            return _of_batch(Sampled.of_batch(record), str(path), path)
        return _of_batch(record, str(path))
    if path.match(EVENTS):
        return _of_rows(rows_of_events(path), path)
    if path.suffix in _UNREAD:
        raise ValueError(
            f"{path}: {path.suffix} files are not read (pickled ones can run code): write the batch with save_rollouts "
            "(docs/rollouts.md), as tensors by name (.pt, .npz), as JSON lines, or the metrics as JSON or CSV"
        )
    with path.open(encoding="utf-8-sig") as file:
        return _read_text(file, path)


def _read_text(file: TextIO, path: Path) -> Evidence:
    """Read metrics or a batch. Metrics are read line by line, since a long run writes gigabytes."""
    first = next((line for line in file if line.strip()), "")
    if not first:
        raise ValueError(f"{path} is empty: give the metrics of at least one step, or a recorded batch")
    if first.lstrip()[0] not in "{[":
        return _of_rows(rows_of_csv(chain([first], file), path), path)
    first_object = object_of(first)
    lines = chain([first], file)
    if first_object is not None and is_own(first_object):
        return _of_own(filter(str.strip, lines), path)
    # A record; or, without an object in the first line, one JSON value over several lines, or a list.
    if first_object is None or is_record(first_object):
        objects: Iterable[dict[str, Any]] = parse_json("".join(lines), path)
    else:
        objects = parse_lines(lines, path)
    if isinstance(objects, list) and is_own(objects[0]):
        return _of_own(map(json.dumps, objects), path)
    if isinstance(objects, list) and is_record(objects[0]):
        return _of_batch(sampled_of_objects(objects, path), str(path))
    prefix = read_settings(path.parent).get("metric-prefix", "")
    return _of_rows(rows_of_objects(objects, path, prefix), path, prefix)


def _of_own(lines: Iterable[str], path: Path) -> Evidence:
    """Evidence of JSON lines of our own records."""
    try:
        batches = list(from_json_lines(lines, 2**20))
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}") from None
    if len(batches) > 1:
        raise ValueError(f"{path} holds batches that were sampled differently: give one of them")
    return _of_batch(Sampled.of_batch(batches[0]), str(path))


def _of_batch(sampled: Sampled, what: str, file: Path | None = None) -> Evidence:
    """Evidence of responses; ``file`` is the record, if it is one of ours."""
    if not sampled.response_mask.any():
        raise ValueError(f"{what}: no response has a sampled token")
    facts = facts_of_batch(sampled)
    match = None if file is None else _STEP.fullmatch(file.name)
    if match is not None and sampled.policy_versions is not None:
        behind = int(match[2]) - sampled.policy_versions[sampled.response_mask]
        facts["staleness_mean"] = float(behind.clamp(min=0).double().mean())
    size = f"{facts['num_tokens']:.0f} tokens of {facts['num_sequences']:.0f} sequences"
    remedy = f"the batch has no log-probs of the trainer: record them ({WORDS[sampled.program]['record']})"
    notes = sampled.notes if sampled.old_log_probs is not None else (*sampled.notes, remedy)
    return Evidence(f"{what}: {size}", facts, sampled, notes, sampled.program)


def _of_rows(rows: Iterable[Mapping[str, Any]], path: Path, prefix: str = "") -> Evidence:
    """Evidence of a run's metrics."""
    history, bad, names = own_rows(rows, path, prefix)
    note = f"{bad} rows have a metric that is NaN or infinite: beyond its limit if it is a distance, else left out"
    notes = (note,) if bad else ()
    settings = (read_settings(path.parent) if path.name == METRICS_FILE else None) or None
    program = OWN if settings else program_of(map(str, names))
    facts = facts_of_series(history, settings)
    return Evidence(f"{path}: {history.num_rows} steps", facts, None, notes, program, history, settings)


def read_settings(folder: Path) -> Mapping[str, str]:
    """Flags of a run, with the defaults that ``config.yaml`` lists as comments; empty without that file."""
    path = folder / SETTINGS_FILE
    if not path.is_file():
        return {}
    return {name: value.strip("'\" ") for name, value in _SETTING.findall(path.read_text(encoding="utf-8"))}
