"""The flags of ``python -m megatron_rc.launch.export``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.parser import Parser


@dataclass(frozen=True)
class ExportRequest:
    """What is read, and where it goes.

    Attributes:
        load: the folder of all checkpoints.
        step: which of them; None: the newest.
        save_hf: the directory to write.
        tokenizer_model: holds the tokenizer; None: where the run had it.
        task: the run's task, where that is a module of one's own; None: it is none.
        verify_integrity: compare the checkpoint with its checksums first.
    """

    load: Path
    step: int | None
    save_hf: Path
    tokenizer_model: Path | None
    task: str | None
    verify_integrity: bool


def parse_export(argv: Sequence[str]) -> ExportRequest:
    """The request that these words are.

    Raises:
        ConfigurationError: an unknown or missing flag, no checkpoints, or a directory that holds something.
    """
    args = _parser().parse_args(argv)
    load, target = Path(args.load), Path(args.save_hf)
    if not load.is_dir():
        raise ConfigurationError(f"--load {load}: no such folder; give the --save of a run")
    if target.is_dir() and any(target.iterdir()):
        raise ConfigurationError(f"--save-hf {target} is not empty: name another directory")
    if target.exists() and not target.is_dir():
        raise ConfigurationError(f"--save-hf {target} is a file: name a directory")
    tokenizer = Path(args.tokenizer_model) if args.tokenizer_model else None
    return ExportRequest(load, args.ckpt_step, target, tokenizer, args.task, not args.no_verify_integrity)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m megatron_rc.launch.export",
        description="Write a checkpoint as a Hugging Face directory, on one process without a GPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--load", required=True, metavar="DIR", help="checkpoints: the --save of a run, of any layout")
    parser.add_argument("--save-hf", required=True, metavar="DIR", help="directory to write; must be new or empty")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="step of the checkpoint; default: the newest")
    text = "holds the tokenizer; default: where the run had it"
    parser.add_argument("--tokenizer-model", metavar="DIR", help=text)
    text = "the run's --task, where that is a class of your own that splits text into characters: it is imported"
    parser.add_argument("--task", metavar="python:MODULE:CLASS", help=text)
    text = "do not compare the checkpoint with its checksums, which reads all of it"
    parser.add_argument("--no-verify-integrity", action="store_true", help=text)
    return parser
