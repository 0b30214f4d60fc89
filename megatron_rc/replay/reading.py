"""Recorded rollouts from files: those of ``--save-rollouts`` and JSON lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rc.records.formats.jsonl import read_jsonl
from megatron_rc.records.rollout import RolloutBatch, load_rollouts

_STEP = re.compile(r"step-(\d+)-replica-\d+")
_LINES = 4096  # sequences that are padded to one length together


@dataclass(frozen=True)
class NamedBatch:
    """A batch, what to call it, and the version of the weights that it trained; None: the newest that sampled it."""

    name: str
    records: RolloutBatch
    version: int | None = None


def read_batches(paths: Sequence[str], vocab_size: int | None = None) -> list[NamedBatch]:
    """The batches of files (``.jsonl``: lines, anything else: safetensors), and of all such files in folders.

    Args:
        paths: of files and folders.
        vocab_size: token ids must lie below it; None: not checked.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: nothing is there, a file is damaged, or holds what no engine may say; the file is named.
    """
    batches = [batch for path in paths for file in _files(Path(path)) for batch in _read(file)]
    if not sum(batch.records.num_sequences for batch in batches):
        raise ValueError(f"{', '.join(paths)}: no sequence is there, expected records of --save-rollouts")
    for batch in batches:
        _check(batch, batches[0], vocab_size)
    return batches


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in (".safetensors", ".jsonl"))
    if any(file.name == "metrics.jsonl" for file in files):
        raise ValueError(
            f"{path} is the folder of a run, whose metrics hold no tokens: name that of its --save-rollouts DIR "
            "--save-log-probs"
        )
    if not files:
        raise ValueError(f"{path} has no .safetensors and no .jsonl file: name the folder of --save-rollouts")
    return files


def _read(path: Path) -> Iterator[NamedBatch]:
    match = _STEP.search(path.name)
    version = int(match[1]) if match else None
    batches = read_jsonl(path, _LINES) if path.suffix == ".jsonl" else iter([load_rollouts(path)])
    yield from (NamedBatch(str(path), batch, version) for batch in batches)


def _check(batch: NamedBatch, first: NamedBatch, vocab_size: int | None) -> None:
    """What no engine may say is no base for any correction; truncated sampling is for the reader to judge."""
    try:
        batch.records.validate(allow_truncated_sampling=True, vocab_size=vocab_size)
    except ValueError as problem:
        raise ValueError(f"{batch.name}: {problem}") from None
    if batch.records.sampling != first.records.sampling:
        raise ValueError(
            f"{first.name} and {batch.name} were sampled differently, {first.records.sampling} and "
            f"{batch.records.sampling}: replay them apart"
        )
