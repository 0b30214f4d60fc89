"""Readers of other programs' records: tensors by name, or JSON with one response or one field to a line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rc import RolloutBatch, load_rollouts
from megatron_rc.doctor.programs import (
    GROUP,
    MASK,
    OLD,
    REWARD,
    ROLLOUT,
    SEQUENCE_MASK,
    TOKENS,
    VERSION,
    program_of_record,
)
from megatron_rc.doctor.sampled import Sampled
from megatron_rc.doctor.tables import object_of, parse_json
from megatron_rc.records.formats.rows import are_unscored, numbered
from megatron_rc.records.storage import existing
from megatron_rc.records.tensor_files import SUFFIXES, TORCH_SUFFIXES, read_tensors, read_torch_file

_LARGEST = 1e30  # a larger number is no reward
_WITHOUT_SCORES = (
    "the trainer's log-probs are a copy of the engine's, as verl's bypass mode writes them, or all 0, as NeMo-RL's "
    "force_on_policy_ratio does; an engine and a trainer that agree in every bit look the same: the distance is unknown"
)
_WITHOUT_MASK = f"the record has no {MASK[0]} and no attention_mask: every position is judged, padding too"


def is_record(names: Mapping[str, Any]) -> bool:
    """Whether these fields are a record of responses, not metrics."""
    return any(isinstance(names.get(name), (list, Tensor)) for name in ROLLOUT)


def read_tensor_record(path: Path) -> RolloutBatch | Sampled:
    """Our own record, or responses from another program's tensors by name; ValueError if the file is neither."""
    if path.suffix not in SUFFIXES:
        return load_rollouts(path)
    problem_of_own_record = None
    if path.suffix == ".safetensors":
        try:
            return load_rollouts(path)
        except ValueError as problem:
            problem_of_own_record = problem
    try:
        if path.suffix in TORCH_SUFFIXES:
            objects = _objects_of_slime(read_torch_file(existing(path)))
            if objects is not None:
                return sampled_of_objects(objects, path)
        tensors = read_tensors(existing(path))
    except ValueError as problem:
        raise problem_of_own_record or problem from None
    if not is_record(tensors):
        names = ", ".join(sorted(tensors)[:5]) or "none"
        raise problem_of_own_record or ValueError(
            f"{path} has no {ROLLOUT[0]} (its tensors: {names}): give the tensors of a rollout batch by name"
        )
    return sampled_of_tensors(tensors, path)


def _objects_of_slime(content: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """The responses in a file of slime's --save-debug-rollout-data or --save-debug-train-data; else None."""
    samples = content.get("samples")
    columns = content.get("rollout_data")
    if isinstance(samples, list) and samples and all(isinstance(sample, Mapping) for sample in samples):
        return [{name: _plain(value) for name, value in sample.items()} for sample in samples]
    if not isinstance(columns, Mapping):
        return None
    lists = {name: column for name, column in columns.items() if isinstance(column, list)}
    return [{name: [_plain(value) for value in column] for name, column in lists.items()}]


def _plain(value: Any) -> Any:
    """Lists and numbers in place of a tensor."""
    return value.tolist() if isinstance(value, Tensor) else value


def sampled_of_lines(path: Path) -> Sampled | None:
    """Responses from JSON or JSON lines; None for a record of ours, and for a file that is no record."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            first = next((line for line in file if line.strip()), "")
            first_object = object_of(first)
            if first_object is not None and (is_own(first_object) or not is_record(first_object)):
                return None
            text = first + file.read()
    except UnicodeDecodeError:
        return None
    try:
        objects = parse_json(text, path)
    except ValueError:
        if first_object is not None:
            raise
        return None
    return sampled_of_objects(objects, path) if is_record(objects[0]) and not is_own(objects[0]) else None


def is_own(names: Mapping[str, Any]) -> bool:
    """Whether these fields are a line of our own records."""
    return {"schema_version", "tokens"} <= names.keys()


def sampled_of_objects(objects: Sequence[Mapping[str, Any]], path: Path) -> Sampled:
    """Responses from objects with one response each, or with a list of responses under each name.

    ValueError names a field that is missing, or has another length.
    """
    rows = [row for value in objects for row in _rows(value, path)]
    pieces = [_piece(row, index, path) for index, row in enumerate(rows)]
    width = max(len(piece[0]) for piece in pieces)
    rollout = _padded([piece[0] for piece in pieces], width)
    mask = _padded([piece[2] for piece in pieces], width) != 0
    if not mask.any():
        raise ValueError(f"{path}: no response has a sampled token")
    old = None
    is_scored = torch.tensor([piece[1] is not None for piece in pieces])
    if (mask & is_scored.unsqueeze(1)).any():
        # Responses that the trainer did not score are left out, as tokens of our own records are.
        mask &= is_scored.unsqueeze(1)
        old = _padded([piece[1] or [] for piece in pieces], width)
    old, notes = _if_scored(old, rollout, mask)
    # Lists of different lengths have no padding.
    if len({len(piece[0]) for piece in pieces}) == 1 and all(_mask_of(row, width) is None for row in rows):
        notes = (*notes, _WITHOUT_MASK)
    return Sampled(
        rollout_log_probs=rollout,
        response_mask=mask,
        old_log_probs=old,
        rewards=_numbers([_first(row, REWARD) for row in rows]),
        policy_versions=_versions([_first(row, VERSION) for row in rows], width),
        group_ids=_groups([_first(row, GROUP) for row in rows]),
        program=program_of_record(rows[0]),
        notes=notes,
        tokens=_tokens([_first(row, TOKENS) for row in rows], [len(piece[0]) for piece in pieces], width),
    )


def sampled_of_tensors(tensors: Mapping[str, Tensor], path: Path) -> Sampled:
    """Responses from tensors [n, s] by name; rewards and versions [n]. ValueError names a field that does not fit."""
    rollout, old = (_first(tensors, names) for names in (ROLLOUT, OLD))
    mask = _mask_of(tensors, rollout.shape[1] if rollout.dim() == 2 else 0)
    for name, value in ((ROLLOUT[0], rollout), (OLD[0], old), (MASK[0], mask)):
        if value is not None and (value.dim() != 2 or value.shape != rollout.shape):
            raise ValueError(
                f"{path}: {name} has shape {tuple(value.shape)}: expected [responses, tokens], equal for all"
            )
        if value is not None and value.is_complex():
            raise ValueError(f"{path}: {name} is {value.dtype}: expected real numbers")
    notes: tuple[str, ...] = () if mask is not None else (_WITHOUT_MASK,)
    mask = torch.ones_like(rollout, dtype=torch.bool) if mask is None else mask != 0
    if not mask.any():
        raise ValueError(f"{path}: no response has a sampled token")
    old, notes_of_scores = _if_scored(old, rollout, mask)

    def of_each(names: Sequence[str]) -> list[Any]:
        value = _first(tensors, names)
        return value.tolist() if value is not None and value.shape[:1] == rollout.shape[:1] else [None]

    rewards = _first(tensors, REWARD)
    if rewards is not None and rewards.dim() > 1:  # verl has a score for each token; their sum is the reward
        rewards = rewards.double().flatten(1).sum(dim=1)
    tokens = _first(tensors, TOKENS)
    if tokens is not None and (tokens.dim() != 2 or len(tokens) != len(rollout) or tokens.shape[1] < rollout.shape[1]):
        tokens = None
    return Sampled(
        rollout_log_probs=rollout,
        response_mask=mask,
        old_log_probs=old,
        rewards=rewards.float() if rewards is not None and rewards.shape == rollout.shape[:1] else None,
        policy_versions=_versions(of_each(VERSION), rollout.shape[1]),
        group_ids=_groups(of_each(GROUP)),
        program=program_of_record(tensors),
        notes=(*notes_of_scores, *notes),
        tokens=None if tokens is None else tokens[:, tokens.shape[1] - rollout.shape[1] :].long(),
    )


def _mask_of(fields: Mapping[str, Any], width: int) -> Any:
    """The mask of one response, or of all of them; None if the record has none.

    As in verl, the attention mask of prompts and responses serves if there is no other. The responses are its last
    ``width`` columns.
    """
    mask = _first(fields, MASK)
    attention = fields.get("attention_mask")
    if mask is None and isinstance(attention, list):
        # Not [-width:], which is everything for a response without a token.
        return attention[max(len(attention) - width, 0) :]
    if mask is None and isinstance(attention, Tensor):
        return attention[..., -width:]
    return mask


def _if_scored(old: Tensor | None, rollout: Tensor, mask: Tensor) -> tuple[Tensor | None, tuple[str, ...]]:
    """The trainer's log-probs, or None and a note if a program wrote something else in their place."""
    if old is not None and any(are_unscored(old, mask, unscored) for unscored in (0.0, rollout)):
        return None, (_WITHOUT_SCORES,)
    return old, ()


def _rows(value: Mapping[str, Any], path: Path) -> list[Mapping[str, Any]]:
    """Split an object of columns into one object for each response; lists of another length are dropped."""
    rollout = _first(value, ROLLOUT)
    if not (isinstance(rollout, list) and rollout and isinstance(rollout[0], list)):
        return [value]
    columns = {name: column for name, column in value.items() if isinstance(column, list)}
    for name in (*OLD, *MASK):
        if name in columns and len(columns[name]) != len(rollout):
            raise ValueError(f"{path}: {name} has {len(columns[name])} responses, the log-probs {len(rollout)}")
    columns = {name: column for name, column in columns.items() if len(column) == len(rollout)}
    return [{name: column[row] for name, column in columns.items()} for row in range(len(rollout))]


def _first(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _piece(row: Mapping[str, Any], index: int, path: Path) -> tuple[list[Any], list[Any] | None, list[Any]]:
    """Engine's log-probs, trainer's log-probs and mask of one response, all of one length."""
    rollout, old = (_first(row, names) for names in (ROLLOUT, OLD))
    if not isinstance(rollout, list):
        raise ValueError(f"{path}: response {index} has no {ROLLOUT[0]}: ask the engine for log-probs")
    mask = _mask_of(row, len(rollout))
    mask = [1] * len(rollout) if mask is None else mask
    mask = [value or 0 for value in mask] if isinstance(mask, list) else mask
    for name, values in ((OLD[0], old), (MASK[0], mask)):
        if values is not None and (not isinstance(values, list) or len(values) != len(rollout)):
            length = len(values) if isinstance(values, list) else type(values).__name__
            raise ValueError(f"{path}: response {index} has {len(rollout)} {ROLLOUT[0]}, {name} has {length}")
    if _first(row, SEQUENCE_MASK) == 0:
        mask = [0] * len(rollout)
    try:
        torch.tensor([[_float(value) for value in values] for values in (rollout, old or rollout, mask)])
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{path}: response {index} has other values than numbers in its log-probs or mask") from None
    return rollout, old, mask


def _float(value: Any) -> float:
    """The number; NaN for None, which programs write at positions that were not sampled."""
    return math.nan if value is None else float(value)


def _padded(rows: Sequence[Sequence[Any]], width: int) -> Tensor:
    filled = [[*map(_float, row), *[0.0] * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.float64)


def _numbers(values: Sequence[Any]) -> Tensor | None:
    """[n], or None if a response has no number; lists (verl's score of each token) are added up."""
    values = [sum(value) if isinstance(value, list) and all(map(_is_number, value)) else value for value in values]
    return torch.tensor([float(value) for value in values]) if values and all(map(_is_number, values)) else None


def _versions(values: Sequence[Any], width: int) -> Tensor | None:
    """[n, s]: the oldest version of each response; None if a response has none."""
    oldest = [value[0] if isinstance(value, list) and value else value for value in values]
    texts = [str(value) for value in oldest if not isinstance(value, bool)]
    if not texts or not all(text.isdecimal() and len(text) < 19 for text in texts):
        return None
    return torch.tensor([int(text) for text in texts]).unsqueeze(1).expand(-1, width)


def _groups(values: Sequence[Any]) -> Tensor | None:
    """[n]: number of each response's prompt; None if a response does not name its prompt."""
    if any(value is None or isinstance(value, (list, dict)) for value in values):
        return None
    return torch.tensor(numbered(values))


def _tokens(values: Sequence[Any], lengths: Sequence[int], width: int) -> Tensor | None:
    """[n, s] token ids; None if a response lacks them. Lists longer than the log-probs begin with a prompt."""
    ids = [
        value[len(value) - length :] if isinstance(value, list) else []
        for value, length in zip(values, lengths, strict=True)
    ]
    if any(len(row) != length for row, length in zip(ids, lengths, strict=True)) or not all(map(_are_ids, ids)):
        return None
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in ids])


def _are_ids(row: Sequence[Any]) -> bool:
    return all(isinstance(value, int) and 0 <= value < 2**31 for value in row)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST
