"""Flags of the commands ``export``, ``replay`` and ``report`` of ``python -m megatron_rc.launch``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.parser import Parser

_METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class ExportRequest:
    """Checkpoint to export, and the directory to write.

    Attributes:
        load: folder of the checkpoints.
        step: step of the checkpoint; None: the newest.
        save_hf: directory to write.
        tokenizer_model: directory of the tokenizer; None: the run's.
        task: the run's task, if it is a module of the user's own; None: it is not.
        verify_integrity: compare the checkpoint with its checksums first.
    """

    load: Path
    step: int | None
    save_hf: Path
    tokenizer_model: Path | None
    task: str | None
    verify_integrity: bool


@dataclass(frozen=True)
class ReplayRequest:
    """Checkpoint whose gradient is measured.

    Attributes:
        load: folder of the checkpoints.
        step: step of the checkpoint; None: the newest.
        rows: sequences in one forward-backward pass.
        rest: words for ``megatron_rc.replay``.
    """

    load: Path
    step: int | None
    rows: int
    rest: list[str]


def parse_export(argv: Sequence[str]) -> ExportRequest:
    """Read the words of the export command."""
    parser = _parser("export", "Write a checkpoint as a Hugging Face directory, on one process without a GPU.")
    _add_checkpoint(parser)
    parser.add_argument("--save-hf", required=True, metavar="DIR", help="directory to write; must be new or empty")
    text = "directory of a Hugging Face tokenizer; default: the run's"
    parser.add_argument("--tokenizer-model", metavar="DIR", help=text)
    text = "the run's --task, if it is a class of your own that splits text into characters; it is imported"
    parser.add_argument("--task", metavar="python:MODULE:CLASS", help=text)
    text = "do not compare the checkpoint with its checksums, which reads all of it"
    parser.add_argument("--no-verify-integrity", action="store_true", help=text)
    args = parser.parse_args(argv)
    load, target = _existing(args.load), Path(args.save_hf)
    if target.is_dir() and any(target.iterdir()):
        raise ConfigurationError(f"--save-hf {target} is not empty: name another directory")
    if target.exists() and not target.is_dir():
        raise ConfigurationError(f"--save-hf {target} is a file: name a directory")
    tokenizer = Path(args.tokenizer_model) if args.tokenizer_model else None
    return ExportRequest(load, args.ckpt_step, target, tokenizer, args.task, not args.no_verify_integrity)


def parse_replay(argv: Sequence[str]) -> ReplayRequest:
    """Read the words of the replay command."""
    about = "A replay whose cosine and length are those of the gradient of a checkpoint's weights."
    parser = _parser("replay", about)
    parser.usage = "%(prog)s BATCHES --load DIR [--ckpt-step N] [--micro-batch-size N] <flags of megatron_rc.replay>"
    parser.epilog = "For the other flags see python -m megatron_rc.replay --help."
    _add_checkpoint(parser)
    text = "sequences in one forward-backward pass (default 8)"
    parser.add_argument("--micro-batch-size", type=int, default=8, metavar="N", help=text)
    args, rest = parser.parse_known_args(list(argv))
    load = _existing(args.load)
    if args.micro_batch_size < 1:
        raise ConfigurationError(f"--micro-batch-size {args.micro_batch_size}: expected at least 1")
    return ReplayRequest(load, args.ckpt_step, args.micro_batch_size, rest)


def parse_report(argv: Sequence[str]) -> Path:
    """Read the words of the report command: the run's folder."""
    parser = _parser("report", "Write report.html, a page of a run for a browser, into the run's folder.")
    parser.add_argument("folder", metavar="RUN", type=Path, help="the run's folder, such as runs/NAME")
    folder: Path = parser.parse_args(list(argv)).folder
    if not os.access(folder / _METRICS, os.R_OK):
        remedy = "name the folder of a run, as runs/count_up"
        raise ConfigurationError(f"{folder} holds no {_METRICS} that can be read: {remedy}")
    return folder


def _parser(command: str, about: str) -> Parser:
    return Parser(prog=f"python -m megatron_rc.launch.{command}", description=about, allow_abbrev=False)


def _add_checkpoint(parser: Parser) -> None:
    parser.add_argument("--load", required=True, metavar="DIR", help="checkpoints: the --save of a run, of any layout")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="step of the checkpoint; default: the newest")


def _existing(folder: str) -> Path:
    if not Path(folder).is_dir():
        raise ConfigurationError(f"--load {folder}: no such folder; give the --save of a run")
    return Path(folder)
