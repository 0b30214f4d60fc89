"""``python -m benchmarks.study``: make the missing runs, then write the study's figures and table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.study.document import put_table
from benchmarks.study.pictures import draw_measures, draw_rewards
from benchmarks.study.queue import StudyError, run_all
from benchmarks.study.results import Outcome, gather, write
from benchmarks.study.settings import ROOT, all_runs, hard_runs, runs_of_baselines, runs_without_entropy


def main(argv: Sequence[str] | None = None) -> None:
    """Make the runs and write the documents; end the process with 1 and a sentence if a run fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.study", description=__doc__)
    parser.add_argument("--runs", type=Path, help="folder of the runs; default: runs/ and the study's name")
    parser.add_argument("--at-once", type=int, default=2, help="runs at the same time; default: 2")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--without-entropy", action="store_true", help="one seed of each run, without an entropy bonus")
    which.add_argument("--baselines", action="store_true", help="two corrections with two baselines each")
    which.add_argument("--hard", type=Path, metavar="DIR", help="the harder task, with SmolLM2 from this folder")
    args = parser.parse_args(argv)
    if args.at_once < 1:
        parser.error(f"--at-once {args.at_once}: take 1 or more")
    if args.hard and not (args.hard / "config.json").is_file():
        parser.error(f"--hard {args.hard}: no config.json there, see make study-hard")
    name, runs = "study", list(all_runs())
    if args.without_entropy:
        name, runs = "study_entropy", list(runs_without_entropy())
    elif args.baselines:
        name, runs = "study_baselines", list(runs_of_baselines())
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
    """Write data, table and figures of docs/study.md; the runs of two baselines have no figure."""
    docs = ROOT / "docs"
    write(outcomes, docs / f"{name}.json")
    put_table(outcomes, docs / "study.md", name)
    if name == "study_baselines":
        say(f"written to {docs}: {name}.json, and the table in study.md")
        return
    draw_rewards(outcomes, docs / f"{name}.png")
    draw_measures(outcomes, docs / f"{name}_measures.png")
    say(f"written to {docs}: {name}.json, {name}.png, {name}_measures.png, and the table in study.md")


def tell_hard(outcomes: Sequence[Outcome]) -> None:
    """Print each run's measurements; three runs of one seed allow no statistics."""
    for found in outcomes:
        rewards = ", ".join(f"{reward:.1%} at step {step}" for step, reward in found.policy)
        means = ", ".join(f"{measure} {found.mean(measure):.3g}" for measure in ("kl", "ess", "grad_norm"))
        say(f"{found.correction}, seed {found.seed}: {rewards}; means {means}; {found.seconds:.0f} s of processor")


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
