"""Rollouts as JSON lines, one record a line, for programs without this package or torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rc.parallel.arguments import check_integer
from megatron_rc.records.checks import OPTIONAL, TRAINER_LOG_PROBS
from megatron_rc.records.formats.rows import as_int32, experts_of, one_sequence, spans
from megatron_rc.records.rollout import (
    FINISH_REASONS,
    SCHEMA_VERSION,
    RolloutBatch,
    SamplingParams,
    check_schema_version,
)
from megatron_rc.records.storage import existing, replacing
from megatron_rc.records.support import support_of

_REQUIRED_KEYS = set(
    "schema_version sample_id group_id reward finish_reason sampling tokens response_mask rollout_log_probs "
    "policy_versions".split()
)
# Fields with a number for each sampled token, which a batch need not have.
_OPTIONAL_COLUMNS = ("turn_rewards", *TRAINER_LOG_PROBS)
_OPTIONAL_KEYS = OPTIONAL - {"support_ids", "support_counts", "rollout_ids"} | {"support", "rollout_id"}


def write_jsonl(batches: Iterable[RolloutBatch], path: str | os.PathLike[str]) -> int:
    """Write one line a sequence, batch by batch; the file appears under its name when it is complete.

    Args:
        batches: the records, of any lengths and sampling parameters; only one batch is held at a time.
        path: the file's path; an existing file is replaced. Its folder must exist.

    Returns:
        The number of lines.

    Raises:
        OSError: the file cannot be written; an existing file is unchanged.
        ValueError: a sampled token's log-prob or a reward is not finite.
    """
    num_lines = 0
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        for batch in batches:
            for line in to_json_lines(batch):
                file.write(line + "\n")
                num_lines += 1
    return num_lines


def read_jsonl(path: str | os.PathLike[str], batch_size: int) -> Iterator[RolloutBatch]:
    """Batches of the records in a file of :func:`write_jsonl`, in order; see :func:`from_json_lines`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is no record; the file and the line are named.
    """
    check_integer("batch_size", batch_size, least=1)
    return _read(existing(path), batch_size)


def to_json_lines(batch: RolloutBatch) -> Iterator[str]:
    """JSON of each sequence, without a line's end, up to the last sampled token.

    Raises:
        ValueError: a sampled token's log-prob or a reward is not finite.
    """
    _, end = spans(batch)
    ends = end.tolist()
    for row, support in enumerate(batch.support_of_rows()):
        try:
            yield json.dumps(_record(batch, row, ends[row], support), allow_nan=False)
        except ValueError:
            sample = int(batch.sample_ids[row])
            raise ValueError(
                f"sample {sample} has a log-prob or a reward that is not finite, which JSON does not have: "
                "megatron_rc.save_rollouts keeps every bit"
            ) from None


def from_json_lines(lines: Iterable[str], batch_size: int) -> Iterator[RolloutBatch]:
    """Batches of consecutive records, each padded to its longest; not validated.

    Args:
        lines: one record each.
        batch_size: sequences of a batch. A batch ends early with the last line, and if the sampling parameters or the
            routed experts' shape change, or supports begin or end.

    Raises:
        ValueError: a line is no record; the line is named.
    """
    check_integer("batch_size", batch_size, least=1)
    sequences: list[RolloutBatch] = []  # of the batch that is not complete
    for number, line in enumerate(lines, start=1):
        try:
            sequence = _sequence(_parse(line))
        except ValueError as problem:
            raise ValueError(f"line {number}: {problem}") from None
        if sequences and (len(sequences) == batch_size or _shared_values(sequences[0]) != _shared_values(sequence)):
            yield RolloutBatch.concatenate(sequences)
            sequences = []
        sequences.append(sequence)
    if sequences:
        yield RolloutBatch.concatenate(sequences)


def _read(path: Path, batch_size: int) -> Iterator[RolloutBatch]:
    """Yield the batches of a file; apart from :func:`read_jsonl`, which must check its arguments when it is called."""
    with path.open(encoding="utf-8", newline="\n") as file:
        try:
            yield from from_json_lines(file, batch_size)
        except UnicodeDecodeError:
            raise ValueError(f"{path} is no text: expected JSON lines in UTF-8") from None
        except ValueError as problem:
            raise ValueError(f"{path}: {problem}") from None


def _shared_values(sequence: RolloutBatch) -> tuple[SamplingParams, Any, bool]:
    """What all sequences of a batch share: (sampling parameters, shape of a token's experts, no support recorded)."""
    experts = sequence.routed_experts
    experts_shape = None if experts is None else experts.shape[2:]
    return sequence.sampling, experts_shape, sequence.support_ids is None


def _record(batch: RolloutBatch, row: int, end: int, support: tuple[Tensor, Tensor] | None) -> dict[str, Any]:
    """The JSON object of one row, up to the column ``end``; ``support`` has its kept tokens, as (ids, counts)."""
    mask = batch.response_mask[row, :end].tolist()

    def with_nulls(values: Tensor, has_value: list[bool]) -> list[Any]:
        """The row's values, None where it has none."""
        pairs = zip(values[row, :end].tolist(), has_value, strict=True)
        return [value if is_value else None for value, is_value in pairs]

    record = {
        "schema_version": SCHEMA_VERSION,
        "sample_id": int(batch.sample_ids[row]),
        "group_id": int(batch.group_ids[row]),
        **({} if batch.rollout_ids is None else {"rollout_id": int(batch.rollout_ids[row])}),
        "reward": float(batch.rewards[row]),
        "finish_reason": FINISH_REASONS[int(batch.finish_reasons[row])],
        "sampling": asdict(batch.sampling),
        "tokens": batch.tokens[row, :end].tolist(),
        "response_mask": [int(is_sampled) for is_sampled in mask],
        "rollout_log_probs": with_nulls(batch.rollout_log_probs, mask),
        "policy_versions": with_nulls(batch.policy_versions, mask),
    }
    if batch.routed_experts is not None:
        record["routed_experts"] = batch.routed_experts[row, :end].tolist()
    if support is not None:
        ids, counts = support
        ids_of_positions = ids.split(counts.tolist())
        record["support"] = [position_ids.tolist() for position_ids in ids_of_positions[:end]]
    for name in _OPTIONAL_COLUMNS:
        values = getattr(batch, name)
        if values is not None:
            # A sampled token that the trainer did not score has NaN, which JSON does not have.
            has_value = batch.response_mask
            if name in TRAINER_LOG_PROBS:
                has_value = has_value & ~values.isnan()
            record[name] = with_nulls(values, has_value[row, :end].tolist())
    return record


def _parse(line: str) -> dict[str, Any]:
    """The JSON object of a line; ValueError if it is none, of another version, or has other keys than a record."""
    try:
        record = json.loads(line, parse_constant=_refuse_constant)
    except (json.JSONDecodeError, RecursionError) as problem:
        raise ValueError(f"no JSON ({problem}): the file is cut off or damaged") from None
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}: expected an object")
    check_schema_version(record)
    wrong_keys = (_REQUIRED_KEYS ^ set(record)) - _OPTIONAL_KEYS
    if wrong_keys:
        raise ValueError(f"fields unknown or missing: {', '.join(sorted(wrong_keys))}")
    return record


def _refuse_constant(name: str) -> None:
    """Raise ValueError for NaN and Infinity, which Python's parser takes although they are no JSON."""
    raise ValueError(f"{name} is no JSON: expected null for a token that was not sampled, a finite number for others")


def _sequence(record: Mapping[str, Any]) -> RolloutBatch:
    """A batch of the one sequence of a record; ValueError names the field that does not fit."""
    tokens = torch.tensor(_integers(record, "tokens"), dtype=torch.int64)
    length = len(tokens)
    mask = _integers(record, "response_mask")
    if len(mask) != length or not set(mask) <= {0, 1}:
        raise ValueError(f"response_mask: expected 0 or 1 for each of {length} tokens")
    reason = record["finish_reason"]
    if reason not in FINISH_REASONS:
        raise ValueError(f"finish_reason is {reason!r}: expected one of {', '.join(FINISH_REASONS)}")
    columns = {
        name: _at_sampled(record, name, mask) for name in ("rollout_log_probs", "policy_versions", *_OPTIONAL_COLUMNS)
    }
    columns |= {
        "tokens": tokens,
        "response_mask": torch.tensor(mask, dtype=torch.bool),
        "routed_experts": experts_of(record, "routed_experts", (length,)),
    }
    return one_sequence(
        columns,
        sample_id=_number(record, "sample_id", int),
        group_id=_number(record, "group_id", int),
        rollout_id=_number(record, "rollout_id", int) if "rollout_id" in record else None,
        reward=_number(record, "reward", float),
        finish_reason=reason,
        sampling=SamplingParams.from_dict(record["sampling"]),
        support=_support(record, length),
    )


def _support(record: Mapping[str, Any], length: int) -> tuple[Tensor, Tensor] | None:
    """(ids, counts [length]) of the tokens that the engine kept."""
    if record.get("support") is None:
        return None
    ids, counts = support_of(record["support"])
    if len(counts) != length:
        raise ValueError(f"support has {len(counts)} lists: expected {length}, one for each token")
    return ids, counts


def _at_sampled(record: Mapping[str, Any], name: str, mask: list[int]) -> Tensor | None:
    """A field with a number for each token, [tokens]; None if it is not recorded.

    Null becomes 0 at a token that was not sampled. At a sampled token it becomes NaN if the field holds the trainer's
    log-probs; for other fields it is an error. ``mask`` has 1 for sampled tokens.
    """
    values = record.get(name)
    kind = int if name == "policy_versions" else float
    if values is None and name in _OPTIONAL_COLUMNS:
        return None
    if not isinstance(values, list) or len(values) != len(mask):
        raise ValueError(f"{name}: expected a list of {len(mask)}, one for each token")
    numbers = []
    for position, (value, is_sampled) in enumerate(zip(values, mask, strict=True)):
        may_be_null = not is_sampled or name in TRAINER_LOG_PROBS
        if not (may_be_null if value is None else _is(value, kind)):
            expected = "an integer of 64 bits" if kind is int else "a number"
            raise ValueError(f"{name} has {value!r} at token {position}: expected {expected}, or null if not sampled")
        if value is None:
            value = math.nan if is_sampled else 0
        numbers.append(value)
    if kind is int:
        return as_int32(name, torch.tensor(numbers, dtype=torch.int64))
    return torch.tensor(numbers, dtype=torch.float32)


def _integers(record: Mapping[str, Any], name: str) -> list[int]:
    """A field that is a list of integers; ValueError if it is none."""
    values = record[name]
    if not isinstance(values, list) or not all(_is(value, int) for value in values):
        raise ValueError(f"{name}: expected a list of integers")
    return values


def _number(record: Mapping[str, Any], name: str, kind: type) -> Any:
    """A field that is a number of this kind, int or float; ValueError if it is none."""
    if not _is(record[name], kind):
        raise ValueError(f"{name} is {record[name]!r}: expected {'an integer' if kind is int else 'a number'}")
    return record[name]


def _is(value: Any, kind: type) -> bool:
    """Return whether a JSON value is of this kind, int or float.

    A float may lack a point; an integer has none, and fits int64.
    """
    if type(value) is int:
        return abs(value) < 2**63
    return kind is float and type(value) is float
