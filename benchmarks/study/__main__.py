"""``python -m benchmarks.study``: make the runs that are not there yet, then write the study's figures and table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.study.document import put_table
from benchmarks.study.pictures import draw_measures, draw_rewards
from benchmarks.study.queue import StudyError, run_all
from benchmarks.study.results import Outcome, gather, write
from benchmarks.study.settings import ROOT, all_runs, hard_runs, runs_without_entropy


def main(argv: Sequence[str] | None = None) -> None:
    """Ends the process with 1 and a sentence where a run could not be made."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.study", description=__doc__)
    parser.add_argument("--runs", type=Path, help="where the runs are, or will be; default: a folder in runs/")
    parser.add_argument("--at-once", type=int, default=2, help="runs under way together")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--without-entropy", action="store_true", help="one seed of each, without an entropy bonus")
    which.add_argument("--hard", type=Path, metavar="DIR", help="the harder task, with SmolLM2 in this folder")
    args = parser.parse_args(argv)
    if args.at_once < 1:
        parser.error(f"--at-once {args.at_once}: take 1 or more")
    if args.hard and not (args.hard / "config.json").is_file():
        parser.error(f"--hard {args.hard}: no config.json there, see make study-hard")
    name, runs = "study", list(all_runs())
    if args.without_entropy:
        name, runs = "study_entropy", list(runs_without_entropy())
    elif args.hard:
        name, runs = "study_hard", list(hard_runs(args.hard.resolve()))
    folder = (args.runs or Path("runs") / name).resolve()
    try:
        run_all(runs, folder, args.at_once, say)
        outcomes = gather(runs, folder)
    except StudyError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    if args.hard:
        tell_hard(outcomes)
    else:
        write_documents(outcomes, name)


def write_documents(outcomes: Sequence[Outcome], name: str) -> None:
    """Data, table and figures of docs/study.md."""
    docs = ROOT / "docs"
    write(outcomes, docs / f"{name}.json")
    put_table(outcomes, docs / "study.md", name)
    draw_rewards(outcomes, docs / f"{name}.png")
    draw_measures(outcomes, docs / f"{name}_measures.png")
    say(f"written to {docs}: {name}.json, {name}.png, {name}_measures.png, and the table in study.md")


def tell_hard(outcomes: Sequence[Outcome]) -> None:
    """Three runs of one seed are no statistics: what each of them measured is all there is to say."""
    for found in outcomes:
        rewards = ", ".join(f"{reward:.1%} at step {step}" for step, reward in found.policy)
        means = ", ".join(f"{measure} {found.mean(measure):.3g}" for measure in ("kl", "ess", "grad_norm"))
        say(f"{found.correction}, seed {found.seed}: {rewards}; means {means}; {found.seconds:.0f} s of processor")


def say(line: str) -> None:
    """Print at once, also into a file."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
