"""``python -m benchmarks.study``: make the runs that are not there yet, then write the study's figures and table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.study.queue import StudyError, run_all
from benchmarks.study.settings import all_runs


def main(argv: Sequence[str] | None = None) -> None:
    """Ends the process with 1 and a sentence where a run could not be made."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.study", description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/study"), help="where the runs are, or will be")
    parser.add_argument("--at-once", type=int, default=2, help="runs under way together")
    args = parser.parse_args(argv)
    if args.at_once < 1:
        parser.error(f"--at-once {args.at_once}: take 1 or more")
    try:
        run_all(list(all_runs()), args.runs.resolve(), args.at_once, say)
    except StudyError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)


def say(line: str) -> None:
    """Print at once, also into a file."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
