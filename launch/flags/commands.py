"""Flags of the commands ``attribute``, ``export`` and ``report`` of ``python -m megatron_rc.launch``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from megatron_rc.launch.engines.requests import API_KEY, READ_BACK, check_key, check_url
from megatron_rc.launch.engines.rounding import DTYPES
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.parser import Parser

_METRICS = "metrics.jsonl"


def parse_export(argv: Sequence[str]) -> argparse.Namespace:
    """Read the words of the export command; flags that name files or folders have the type Path."""
    parser = _parser("export", "Write a checkpoint as a Hugging Face directory, on one process without a GPU.")
    _add_checkpoint(parser)
    text = "directory to write; must be new or empty"
    parser.add_argument("--save-hf", type=Path, required=True, metavar="DIR", help=text)
    text = "directory of a Hugging Face tokenizer; default: the run's"
    parser.add_argument("--tokenizer-model", type=Path, metavar="DIR", help=text)
    text = "the run's --task, if it is a class of your own that splits text into characters; it is imported"
    parser.add_argument("--task", metavar="python:MODULE:CLASS", help=text)
    text = "do not compare the checkpoint with its checksums, which reads all of it"
    parser.add_argument("--no-verify-integrity", dest="verify_integrity", action="store_false", help=text)
    args = parser.parse_args(argv)
    _check_folder("--load", args.load)
    if args.save_hf.is_dir() and any(args.save_hf.iterdir()):
        raise ConfigurationError(f"--save-hf {args.save_hf} is not empty: name another directory")
    if args.save_hf.exists() and not args.save_hf.is_dir():
        raise ConfigurationError(f"--save-hf {args.save_hf} is a file: name a directory")
    return args


def parse_attribute(argv: Sequence[str]) -> argparse.Namespace:
    """Read the words of the attribution's command; flags that name files or folders have the type Path."""
    parser = _parser("attribute", "Attribute the mismatch of recorded rollouts to a checkpoint's parameters, on a CPU.")
    _add_checkpoint(parser)
    text = "weights of the engine: a Hugging Face directory, a run's --save, or one checkpoint iter_NNNNNNN in it; "
    parser.add_argument("--engine-weights", type=Path, metavar="DIR", help=f"{text}default: the trainer's")
    text = "read the engine's weights back from this running server, http://host:port, instead of --engine-weights"
    parser.add_argument("--rollout-url", metavar="URL", help=text)
    text = "kind of this server"
    parser.add_argument("--rollout-engine", choices=READ_BACK, help=text)
    text = "round the engine's weights, as the flag of a run does; default: fp32, no rounding. Weights of a server are "
    text += "taken as they are, and this is the format in which it should have the trainer's"
    parser.add_argument("--rollout-dtype", choices=DTYPES, default=DTYPES[0], help=text)
    text = "forward and backward passes: more if the completeness is far from 1; default: 1"
    parser.add_argument("--attribution-nodes", dest="nodes", type=int, default=1, metavar="N", help=text)
    text = "picture to write, layers by kinds of parameters, such as attribution.png"
    parser.add_argument("--picture", type=Path, metavar="FILE", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    text = "rollout batches: JSON lines, or files of --save-rollouts (.safetensors)"
    parser.add_argument("records", type=Path, nargs="+", metavar="RECORDS", help=text)
    args = parser.parse_args(list(argv))
    _check_folder("--load", args.load)
    if args.engine_weights is not None:
        remedy = "give a Hugging Face directory, or the --save of a run"
        _check_folder("--engine-weights", args.engine_weights, remedy=remedy)
    if args.nodes < 1:
        raise ConfigurationError(f"--attribution-nodes {args.nodes}: give 1 or more")
    if args.rollout_url is not None:
        _check_server(args)
    elif args.rollout_engine is not None:
        raise ConfigurationError(f"--rollout-engine {args.rollout_engine} needs --rollout-url, the server's address")
    elif args.engine_weights is None and args.rollout_dtype == DTYPES[0]:
        raise ConfigurationError(
            "trainer and engine would have the same weights: give --engine-weights, or the --rollout-dtype of the run"
        )
    return args


def _check_server(args: argparse.Namespace) -> None:
    """Refuse flags of a server whose weights cannot be read back."""
    try:
        check_url(args.rollout_url)
        check_key(os.environ.get(API_KEY))
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    if args.rollout_engine is None:
        raise ConfigurationError(f"--rollout-url {args.rollout_url} needs --rollout-engine: {' or '.join(READ_BACK)}")
    if args.engine_weights is not None:
        raise ConfigurationError("--engine-weights and --rollout-url both give the engine's weights: leave one out")


def parse_report(argv: Sequence[str]) -> Path:
    """Read the words of the report command: the run's folder."""
    parser = _parser("report", "Draw a run: write report.html, a page for a browser, and summary.png into its folder.")
    parser.add_argument("folder", metavar="RUN", type=Path, help="the run's folder, such as runs/NAME")
    folder: Path = parser.parse_args(list(argv)).folder
    if not os.access(folder / _METRICS, os.R_OK):
        remedy = "name the folder of a run, as runs/count_up"
        raise ConfigurationError(f"{folder} holds no {_METRICS} that can be read: {remedy}")
    return folder


def _add_checkpoint(parser: Parser) -> None:
    """Add the flags that name the trainer's checkpoint."""
    text = "checkpoints of the trainer: the --save of a run, of any layout"
    parser.add_argument("--load", type=Path, required=True, metavar="DIR", help=text)
    text = "step of the checkpoint; default: the newest"
    parser.add_argument("--ckpt-step", dest="step", type=int, metavar="N", help=text)


def _check_folder(flag: str, folder: Path, *, remedy: str = "give the --save of a run") -> None:
    if not folder.is_dir():
        raise ConfigurationError(f"{flag} {folder}: no such folder; {remedy}")


def _parser(command: str, about: str) -> Parser:
    parser = Parser(prog=f"python -m megatron_rc.launch.{command}", description=about, allow_abbrev=False)
    parser.listing = "--help"
    return parser
