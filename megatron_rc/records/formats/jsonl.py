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

_REQUIRED = set(
    "schema_version sample_id group_id reward finish_reason sampling tokens response_mask rollout_log_probs "
    "policy_versions".split()
)
_IF_RECORDED = ("turn_rewards", *TRAINER_LOG_PROBS)
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
    number = 0
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        for batch in batches:
            for line in to_json_lines(batch):
                file.write(line + "\n")
                number += 1
    return number


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
    end = spans(batch)[1].tolist()
    for row, support in enumerate(batch.support_of_rows()):
        try:
            yield json.dumps(_record(batch, row, end[row], support), allow_nan=False)
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
    held: list[RolloutBatch] = []
    for number, line in enumerate(lines, start=1):
        try:
            sequence = _sequence(_parse(line))
        except ValueError as problem:
            raise ValueError(f"line {number}: {problem}") from None
        if held and (len(held) == batch_size or _kind(held[0]) != _kind(sequence)):
            yield RolloutBatch.concatenate(held)
            held = []
        held.append(sequence)
    if held:
        yield RolloutBatch.concatenate(held)


def _read(path: Path, batch_size: int) -> Iterator[RolloutBatch]:
    with path.open(encoding="utf-8", newline="\n") as file:
        try:
            yield from from_json_lines(file, batch_size)
        except UnicodeDecodeError:
            raise ValueError(f"{path} is no text: expected JSON lines in UTF-8") from None
        except ValueError as problem:
            raise ValueError(f"{path}: {problem}") from None


def _kind(sequence: RolloutBatch) -> tuple[SamplingParams, Any, bool]:
    """The values that all sequences of a batch share."""
    experts = sequence.routed_experts
    return sequence.sampling, None if experts is None else experts.shape[2:], sequence.support_ids is None


def _record(batch: RolloutBatch, row: int, end: int, support: tuple[Tensor, Tensor] | None) -> dict[str, Any]:
    mask = batch.response_mask[row, :end].tolist()

    def sampled(values: Tensor, known: list[bool] = mask) -> list[Any]:
        return [value if here else None for value, here in zip(values[row, :end].tolist(), known, strict=True)]

    record = {
        "schema_version": SCHEMA_VERSION,
        "sample_id": int(batch.sample_ids[row]),
        "group_id": int(batch.group_ids[row]),
        **({} if batch.rollout_ids is None else {"rollout_id": int(batch.rollout_ids[row])}),
        "reward": float(batch.rewards[row]),
        "finish_reason": FINISH_REASONS[int(batch.finish_reasons[row])],
        "sampling": asdict(batch.sampling),
        "tokens": batch.tokens[row, :end].tolist(),
        "response_mask": [int(here) for here in mask],
        "rollout_log_probs": sampled(batch.rollout_log_probs),
        "policy_versions": sampled(batch.policy_versions),
    }
    if batch.routed_experts is not None:
        record["routed_experts"] = batch.routed_experts[row, :end].tolist()
    if support is not None:
        ids, counts = support
        record["support"] = [own.tolist() for own in ids.split(counts.tolist())[:end]]
    for name in _IF_RECORDED:
        values = getattr(batch, name)
        if values is not None:
            # A sampled token that the trainer did not score has NaN, which JSON does not have.
            scored = ~values.isnan() if name in TRAINER_LOG_PROBS else True
            record[name] = sampled(values, (batch.response_mask & scored)[row, :end].tolist())
    return record


def _parse(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line, parse_constant=_refuse_constant)
    except (json.JSONDecodeError, RecursionError) as problem:
        raise ValueError(f"no JSON ({problem}): the file is cut off or damaged") from None
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}: expected an object")
    check_schema_version(record)
    odd = (_REQUIRED ^ set(record)) - _OPTIONAL_KEYS
    if odd:
        raise ValueError(f"fields unknown or missing: {', '.join(sorted(odd))}")
    return record


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON: expected null for a token that was not sampled, a finite number for others")


def _sequence(record: Mapping[str, Any]) -> RolloutBatch:
    tokens = torch.tensor(_integers(record, "tokens"), dtype=torch.int64)
    length = len(tokens)
    mask = _integers(record, "response_mask")
    if len(mask) != length or not set(mask) <= {0, 1}:
        raise ValueError(f"response_mask: expected 0 or 1 for each of {length} tokens")
    reason = record["finish_reason"]
    if reason not in FINISH_REASONS:
        raise ValueError(f"finish_reason is {reason!r}: expected one of {', '.join(FINISH_REASONS)}")
    columns = {
        name: _at_sampled(record, name, mask) for name in ("rollout_log_probs", "policy_versions", *_IF_RECORDED)
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
    """A number for each token, 0 for null at a token that was not sampled; None if the field is not recorded.

    Null at a sampled token is NaN for the trainer's log-probs, and an error for other fields.
    """
    values, kind = record.get(name), int if name == "policy_versions" else float
    if values is None and name in _IF_RECORDED:
        return None
    if not isinstance(values, list) or len(values) != len(mask):
        raise ValueError(f"{name}: expected a list of {len(mask)}, one for each token")
    found = []
    for position, (value, sampled) in enumerate(zip(values, mask, strict=True)):
        if (value is None and sampled and name not in TRAINER_LOG_PROBS) or not (value is None or _is(value, kind)):
            wanted = "an integer of 64 bits" if kind is int else "a number"
            raise ValueError(f"{name} has {value!r} at token {position}: expected {wanted}, or null if not sampled")
        found.append(value if value is not None else math.nan if sampled else 0)
    numbers = torch.tensor(found, dtype=torch.int64 if kind is int else torch.float32)
    return as_int32(name, numbers) if kind is int else numbers


def _integers(record: Mapping[str, Any], name: str) -> list[int]:
    values = record[name]
    if not isinstance(values, list) or not all(_is(value, int) for value in values):
        raise ValueError(f"{name}: expected a list of integers")
    return values


def _number(record: Mapping[str, Any], name: str, kind: type) -> Any:
    if not _is(record[name], kind):
        raise ValueError(f"{name} is {record[name]!r}: expected {'an integer' if kind is int else 'a number'}")
    return record[name]


def _is(value: Any, kind: type) -> bool:
    """Whether a JSON value is of this kind: a float may lack a point; an integer has none, and fits int64."""
    if type(value) is int:
        return abs(value) < 2**63
    return kind is float and type(value) is float
