"""Errors of the doctor: verdicts on healthy batches and runs, and faults that it misses.

    python benchmarks/doctor.py [--batches 200] [--seeds 20] [--runs 1000]

Healthy engines round their weights to bfloat16 or not at all, and compute in bfloat16. Sizes, vocabularies, lengths and
the certainty of the model are drawn at random.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.study.results import read
from benchmarks.study.settings import BONUS
from megatron_rc.doctor.advice import mean_log_ratios
from megatron_rc.doctor.facts import Facts
from megatron_rc.doctor.measure import facts_of_batch
from megatron_rc.doctor.rules import judge
from megatron_rc.doctor.sampled import Sampled
from megatron_rc.doctor.series import History, facts_of_series
from megatron_rc.doctor.tables import own_row
from tests.support.made_faults import FAULTS, Setting, made
from tests.support.made_runs import drifting_run, healthy_run, study_rows
from tests.support.paths import ROOT

NUMBERS = 2**24  # log-probs of one batch, over its whole vocabulary


def setting(dice: random.Random) -> Setting:
    """A random size that fits into memory."""
    while True:
        drawn = Setting(
            sequences=dice.choice([8, 16, 32, 64, 128, 256]),
            length=dice.choice([16, 32, 64, 128, 256]),
            vocab=dice.choice([64, 256, 1024, 4096]),
            noise=dice.choice(["bf16", "bf16", "none"]),
            sharpness=dice.choice([1.0, 2.0, 3.0, 4.0, 6.0]),
        )
        if drawn.sequences * drawn.length * drawn.vocab <= NUMBERS:
            return drawn


def first_verdict(facts: Facts) -> str:
    """The name of the doctor's first verdict."""
    return next((verdict.rule.name for verdict in judge(facts)), "nothing")


def healthy(number: int) -> None:
    """Print verdicts on healthy batches, and the rejection that bounds of 1.001 on the geometric mean would cause."""
    dice = random.Random(0)
    verdicts = Counter[str]()
    cut = []
    largest = 0.0
    for seed in range(number):
        sampled = Sampled(**made(None, seed, setting(dice)))
        facts = facts_of_batch(sampled)
        verdicts[first_verdict(facts)] += 1
        largest = max(largest, facts["k3_kl"])
        means = mean_log_ratios(sampled)
        assert means is not None
        cut.append(float((means.abs() > 0.001).double().mean()))
    wrong = number - verdicts["nothing"]
    sys.stdout.write(f"{number} healthy batches: {wrong} with a verdict {dict(verdicts - Counter(nothing=number))}\n")
    sys.stdout.write(
        f"largest k3 {largest:.2g} nats; sequences outside of [1/1.001, 1.001]: {sum(cut) / number:.0%} on average\n"
    )


def faults(seeds: int) -> None:
    """Print first verdicts on made faults, in batches of at least 2,048 places."""
    for fault, (name, _) in FAULTS.items():
        dice = random.Random(1)
        verdicts = Counter[str]()
        for seed in range(seeds):
            drawn = setting(dice)
            while drawn.sequences * drawn.length < 2048 or drawn.sequences < 16:
                drawn = setting(dice)
            verdicts[first_verdict(facts_of_batch(Sampled(**made(fault, seed, drawn))))] += 1
        others = ", ".join(f"{other} {count}" for other, count in verdicts.most_common() if other != name)
        sys.stdout.write(f"{fault:<18}{name:<20}{verdicts[name]:>4} of {seeds}   {others}\n")


def runs(number: int) -> None:
    """Print verdicts on healthy runs, every ten steps, and on drifting runs and the study's runs, at their ends."""
    wrong = 0
    drifts_seen = 0
    for seed in range(number):
        wrong += any(_verdicts(healthy_run(seed), every=10))
        drifts_seen += any("drift" in names for names in _verdicts(drifting_run(seed)[0]))
    sys.stdout.write(
        f"{number} healthy runs: {wrong} with a verdict at any step; of as many drifts {drifts_seen} found\n"
    )
    of_study: dict[str, list[bool]] = {}
    for run in read(ROOT / "docs" / "study.json"):
        if run.setting == BONUS.name:
            of_study.setdefault(run.mismatch, []).append(any("drift" in names for names in _verdicts(study_rows(run))))
    for mismatch, drifts in of_study.items():
        sys.stdout.write(f"study, {mismatch}: drift at the end of {sum(drifts)} of {len(drifts)} runs\n")


def _verdicts(rows: Iterable[Mapping[str, float]], every: int = 0) -> Iterator[list[str]]:
    """Names of the verdicts at the end of a run, or after every ``every`` steps."""
    history = History()
    for row in rows:
        history.add(own_row(row, ""))
        if every and row["step"] % every == 0:
            yield [verdict.rule.name for verdict in judge(facts_of_series(history))]
    if not every:
        yield [verdict.rule.name for verdict in judge(facts_of_series(history))]


def main(argv: Sequence[str] | None = None) -> None:
    """Print all three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=200, help="healthy batches; default: 200")
    parser.add_argument("--seeds", type=int, default=20, help="batches of each fault; default: 20")
    parser.add_argument("--runs", type=int, default=1000, help="healthy and drifting runs, of each; default: 1000")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    healthy(args.batches)
    faults(args.seeds)
    runs(args.runs)


if __name__ == "__main__":
    main()
