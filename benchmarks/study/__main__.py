"""``python -m benchmarks.study``: make the missing runs of some blocks, then write the study's tables and figures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.study.design import ROOT
from benchmarks.study.document import put_table, table
from benchmarks.study.pictures import draw_all, draw_differences
from benchmarks.study.queue import StudyError, run_all
from benchmarks.study.results import read
from benchmarks.study.settings import BLOCKS, MAIN, WORKING_SHORT, family_of, runs_of
from megatron_rc.launch.errors import RunError

DOCS = ROOT / "docs"


def main(argv: Sequence[str] | None = None) -> None:
    """Make the runs and write the documents; end the process with 1 and a sentence if a run fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.study", description=__doc__)
    parser.add_argument(
        "blocks",
        nargs="*",
        choices=[*BLOCKS, "all", "none"],
        default="main",
        help="default: main; all: those without --model",
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="folder of SmolLM2, for the blocks that train it")
    parser.add_argument(
        "--data", type=Path, help="file of finished runs, which are not repeated; default: the study's own in docs/"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/study"), help="folder of the runs; default: runs/study")
    parser.add_argument("--at-once", type=int, default=2, help="runs at the same time; default: 2")
    args = parser.parse_args(argv)
    if args.at_once < 1:
        parser.error(f"--at-once {args.at_once}: take 1 or more")
    names = [args.blocks] if isinstance(args.blocks, str) else args.blocks
    blocks = [BLOCKS[name] for name in names if name in BLOCKS]
    if "all" in names:
        blocks = [block for block in BLOCKS.values() if not block.setting.needs_model]
    model = args.model.resolve() if args.model else None
    has_model = model is not None and (model / "config.json").is_file()
    if any(block.setting.needs_model for block in blocks) and not has_model:
        parser.error(f"--model {args.model}: no config.json there, see make study-hard")

    for name in dict.fromkeys(block.data for block in blocks):
        data = (args.data or DOCS / name).resolve()
        runs = list(runs_of(block for block in blocks if block.data == name))
        try:
            run_all(runs, data, args.runs.resolve(), args.at_once, say, model)
        except (RunError, StudyError) as error:
            sys.stderr.write(f"error: {error}\n")
            sys.exit(1)
    if args.data is None:
        write_documents()
    else:
        for block in blocks:
            say(table(read(args.data), block))


def write_documents() -> None:
    """Write the tables and figures of docs/study.md."""
    for block in BLOCKS.values():
        put_table(read(DOCS / block.data), DOCS / "study.md", block)
    draw_all(read(DOCS / MAIN.data), DOCS)
    draw_differences(read(DOCS / WORKING_SHORT.data), family_of(WORKING_SHORT), DOCS / "study_working.png")
    say(f"written to {DOCS}: the tables in study.md, and the figures")


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
