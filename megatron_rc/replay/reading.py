"""Readers of recorded rollouts: our own records and other programs'."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_rc.doctor.other_records import read_tensor_record, sampled_of_lines
from megatron_rc.doctor.sampled import Sampled
from megatron_rc.records.formats.jsonl import read_jsonl
from megatron_rc.records.rollout import RolloutBatch, SamplingParams
from megatron_rc.records.storage import existing
from megatron_rc.records.tensor_files import SUFFIXES

_STEP = re.compile(r"step-(\d+)-replica-\d+")
_LINES = 4096  # sequences that are padded to one length together


@dataclass(frozen=True)
class NamedBatch:
    """A batch, its name, and the version of the weights that it trained; None means the newest that sampled it."""

    name: str
    records: RolloutBatch
    version: int | None = None
    notes: tuple[str, ...] = ()  # sentences about what another program's record lacks


def read_batches(paths: Sequence[str], vocab_size: int | None = None) -> list[NamedBatch]:
    """Read the batches of files, and of all files in folders.

    Files are lines (``.jsonl``, ``.json``), tensors by name (``.pt``, ``.npz``, safetensors), and our own safetensors
    under any name. FileNotFoundError without a file; ValueError, with the file's name, for no sequence, damage, or
    impossible values, such as token ids from ``vocab_size`` on.
    """
    batches = [batch for path in paths for file in _files(Path(path)) for batch in _read(file)]
    if not sum(batch.records.num_sequences for batch in batches):
        raise ValueError(f"{', '.join(paths)}: no sequence found, expected records of --save-rollouts")
    for batch in batches:
        _check(batch, batches[0], vocab_size)
    return batches


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in (*SUFFIXES, ".jsonl"))
    if any(file.name == "metrics.jsonl" for file in files):
        raise ValueError(
            f"{path} is the folder of a run, whose metrics hold no tokens: name the folder of its "
            "--save-rollouts DIR --save-log-probs"
        )
    if not files:
        raise ValueError(f"{path} has no {', '.join(SUFFIXES)} and no .jsonl file: name the folder of --save-rollouts")
    return files


def _read(path: Path) -> Iterator[NamedBatch]:
    """Read our own record, or another program's lines or tensors."""
    batches: Iterable[RolloutBatch | Sampled]
    if path.suffix in (".jsonl", ".json"):
        sampled = sampled_of_lines(existing(path))
        batches = read_jsonl(path, _LINES) if sampled is None else [sampled]
    else:
        batches = [read_tensor_record(path)]
    match = _STEP.search(path.name)
    version = int(match[1]) if match else None
    for batch in batches:
        if isinstance(batch, RolloutBatch):
            yield NamedBatch(str(path), batch, version)
        else:
            yield NamedBatch(str(path), _batch_of(batch), version, batch.notes)


def _batch_of(sampled: Sampled) -> RolloutBatch:
    """Rollout batch from another program's record.

    Tokens, rewards and versions that the record lacks are 0; without prompts each response gets its own. If the record
    holds responses alone, as verl's do, an empty column stands before them: their first tokens are sampled too.
    """
    before = int(sampled.response_mask[:, 0].any())
    index = torch.arange(len(sampled.response_mask))

    def column(values: Tensor | None) -> Tensor:
        values = torch.zeros_like(sampled.response_mask, dtype=torch.int64) if values is None else values
        return torch.nn.functional.pad(values, (before, 0))

    return RolloutBatch(
        tokens=column(sampled.tokens),
        response_mask=column(sampled.response_mask),
        rollout_log_probs=column(sampled.rollout_log_probs),
        policy_versions=column(sampled.policy_versions).contiguous(),
        sample_ids=index,
        group_ids=index if sampled.group_ids is None else sampled.group_ids,
        rewards=torch.zeros(len(index)) if sampled.rewards is None else sampled.rewards,
        finish_reasons=torch.zeros_like(index),
        sampling=SamplingParams() if sampled.sampling is None else sampled.sampling,
        old_log_probs=None if sampled.old_log_probs is None else column(sampled.old_log_probs),
    )


def _check(batch: NamedBatch, first: NamedBatch, vocab_size: int | None) -> None:
    """Refuse impossible values and batches with different sampling parameters; truncated sampling is allowed."""
    try:
        batch.records.validate(allow_truncated_sampling=True, vocab_size=vocab_size)
    except ValueError as problem:
        raise ValueError(f"{batch.name}: {problem}") from None
    if batch.records.sampling != first.records.sampling:
        raise ValueError(
            f"{first.name} and {batch.name} were sampled differently, {first.records.sampling} and "
            f"{batch.records.sampling}: replay them separately"
        )
