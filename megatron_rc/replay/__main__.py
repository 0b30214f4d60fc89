"""``python -m megatron_rc.replay BATCHES [--preset A --preset B]``: see docs/doctor.md."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rc.records.storage import replacing
from megatron_rc.replay.candidates import named, suggested, with_grid
from megatron_rc.replay.outcome import Outcome, outcome
from megatron_rc.replay.page import as_page, as_picture
from megatron_rc.replay.reading import read_batches
from megatron_rc.replay.report import as_dict, as_text
from megatron_rc.replay.tokens import Recorded, recorded


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 after one sentence on standard error."""
    args = _parser().parse_args(argv)
    try:
        data, outcomes = _replay(args)
        text = as_text(data, outcomes)
        if args.json:
            text = json.dumps(as_dict(data, outcomes), indent=1) + "\n"
        if args.html is not None:
            with replacing(args.html) as temporary:
                temporary.write_text(as_page(data, outcomes), encoding="utf-8", errors="backslashreplace")
        if args.picture is not None:
            with replacing(args.picture) as temporary:
                temporary.write_bytes(as_picture(data, outcomes))
    except (ImportError, OSError, ValueError) as problem:
        sys.stderr.write(f"{problem}\n")
        return 2
    sys.stdout.write(text)
    return 0


def _replay(args: argparse.Namespace) -> tuple[Recorded, list[Outcome]]:
    """Read the records, and run every correction that the command line asks for over them."""
    for flag, file in (("--html", args.html), ("--picture", args.picture)):
        if file is not None:
            _check_file(flag, file, args.batches)
    asked = with_grid(named(args.preset, args.correction), args.grid)  # check the settings before reading large files
    data = recorded(read_batches(args.batches, args.vocab_size))
    configs = asked or with_grid(suggested([part.records for part in data.parts]), args.grid)
    return data, [outcome(data, name, config) for name, config in configs.items()]


def _check_file(flag: str, file: str, batches: Sequence[str]) -> None:
    """Raise ValueError for a page or picture that cannot be written, or that would replace an input."""
    if Path(file).is_dir():
        raise ValueError(f"{flag} {file!r} is a folder: expected the name of a file to write")
    if not Path(file).parent.is_dir():
        raise ValueError(f"{flag} {file}: the folder {Path(file).parent} does not exist, create it first")
    inputs = [os.path.realpath(batch) for batch in batches]
    if Path(file).suffix in (".safetensors", ".jsonl") or os.path.realpath(file) in inputs:
        ending = "html" if flag == "--html" else "png"
        raise ValueError(f"{flag} {file} is the name of a record: name it something.{ending}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_rc.replay",
        description="Compare the effects of several corrections on recorded rollouts.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "batches",
        nargs="+",
        metavar="BATCHES",
        help="Files or folders that --save-rollouts DIR --save-log-probs wrote, or records of other programs: JSON "
        "lines (.jsonl), tensors by name (.safetensors, .pt, .npz).",
    )
    for flag, metavar, text in (
        ("--preset", "NAME", "Preset to compare; repeatable. Default: the doctor's proposal, and the usual others."),
        ("--correction", "FILE", "YAML file of settings to compare; repeatable."),
        (
            "--grid",
            "FIELD=A,B,...",
            "Try every compared correction with each value, for example rollout_is_threshold=1.5,2,5; repeatable.",
        ),
    ):
        parser.add_argument(flag, action="append", default=[], metavar=metavar, help=text)
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="Size of the vocabulary; larger token ids are refused. Default: not checked.",
    )
    parser.add_argument("--json", action="store_true", help="Print JSON instead of tables.")
    parser.add_argument("--html", metavar="FILE", help="Also write the results as one page that needs no network.")
    parser.add_argument("--picture", metavar="FILE", help="Also write the page's charts as one PNG picture.")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
