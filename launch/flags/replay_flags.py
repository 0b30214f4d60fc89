"""The flags of ``python -m megatron_rc.launch.replay``; the rest are those of ``megatron_rc.replay``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.parser import Parser


@dataclass(frozen=True)
class ReplayRequest:
    """Whose gradient is measured.

    Attributes:
        load: the folder of all checkpoints.
        step: which of them; None: the newest.
        rows: sequences that the model sees at once.
        rest: the words that are not about the checkpoint.
    """

    load: Path
    step: int | None
    rows: int
    rest: list[str]


def parse_replay(argv: Sequence[str]) -> ReplayRequest:
    """The request that these words are.

    Raises:
        ConfigurationError: no checkpoints, or a value that cannot be.
    """
    args, rest = _parser().parse_known_args(list(argv))
    if not Path(args.load).is_dir():
        raise ConfigurationError(f"--load {args.load}: no such folder; give the --save of a run")
    if args.micro_batch_size < 1:
        raise ConfigurationError(f"--micro-batch-size {args.micro_batch_size}: expected at least 1")
    return ReplayRequest(Path(args.load), args.ckpt_step, args.micro_batch_size, rest)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m megatron_rc.launch.replay",
        usage="%(prog)s BATCHES --load DIR [--ckpt-step N] [--micro-batch-size N] <flags of megatron_rc.replay>",
        description="A replay whose cosine and length are those of the gradient of a checkpoint's weights.",
        epilog="For the other flags see python -m megatron_rc.replay --help.",
        allow_abbrev=False,
    )
    parser.add_argument("--load", required=True, metavar="DIR", help="checkpoints: the --save of a run, of any layout")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="step of the checkpoint; default: the newest")
    text = "sequences that the model sees at once (default 8)"
    parser.add_argument("--micro-batch-size", type=int, default=8, metavar="N", help=text)
    return parser
