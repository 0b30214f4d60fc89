"""Collectives and bytes of the correction in layouts of up to 16,384 ranks, traced with fake process groups.

    python benchmarks/scaling.py [--ranks 8 64 512 4096 16384] [--formulas]

Megatron's ``parallel_state``, the groups' sizes, this rank's place in them, its tokens and all local work are real; the
groups' collectives return their input. Each layout is traced on its corners: first and last rank of context, pipeline
and data parallelism. A dispatch mode records every collective of torch, whoever calls it.

The numbers that a collective carries are fitted on the first layout as a linear function of the counts in ``COUNTS``.
Every other trace (other batches, tokens, ranks and layouts) must equal these formulas call by call. Bytes are those
that one rank sends: 2 (p - 1)/p times the payload for a ring all-reduce over p ranks, the payload for a broadcast along
a chain.

``--formulas`` prints the first table only, which ``benchmarks/SCALING.md`` holds and
``tests/correction/test_scaling.py`` reads.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import math
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.distributed as dist

from benchmarks import tracing
from benchmarks.tracing import COUNTS, PHASES, Batch, Call, Layout, amount, once, sent
from megatron_rc import RolloutCorrectionConfig
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.groups import group_size
from megatron_rc.settings.criteria import CRITERIA

# Bytes a token that a CP group of 8 ranks sends, all ranks together, for one batch's sequence statistics.
GATHERING = {"verl": (28, 28), "NeMo-RL": (29, 29), "slime": (58, 117)}


LAYOUTS = (
    Layout(tp=1, cp=2, pp=2, dp=2),
    Layout(tp=2, cp=4, pp=2, dp=4),
    Layout(tp=4, cp=4, pp=4, dp=8),
    Layout(tp=8, cp=8, pp=8, dp=8),
    Layout(tp=8, cp=1, pp=8, dp=64),
    Layout(tp=8, cp=4, pp=8, dp=64),
    Layout(tp=8, cp=8, pp=8, dp=32),
    Layout(tp=1, cp=1, pp=1, dp=16384),
)


BASE = Batch()
# Each batch differs from BASE in one of the counts.
VARIANTS = {
    "n": Batch(micro_batches=4),
    "b": Batch(micro_size=4, micro_batches=1),
    "G": Batch(prompts=7),
    "M": Batch(micro_batches=1, mini_batches=4),
    "A": Batch(max_staleness=3),
}
# More tokens; other tokens, packed; all counts different.
OTHERS = (
    Batch(length=512),
    Batch(length=256, packed=True),
    Batch(length=128, micro_size=3, micro_batches=1, mini_batches=3, prompts=11, max_staleness=2),
)
# For the bytes: 64 sequences of 32k tokens a replica.
LARGE = Batch(length=2**15, micro_size=4, micro_batches=8, mini_batches=2, prompts=64)


@dataclass(frozen=True)
class Case:
    """A configuration of the correction, and an objective."""

    fields: dict[str, Any]
    algorithm: str | None = None

    @property
    def config(self) -> RolloutCorrectionConfig:
        """The config with these fields."""
        return RolloutCorrectionConfig(**self.fields)


def rejection(names: str, threshold: str) -> dict[str, Any]:
    """The fields of some criteria."""
    return {"rollout_rs": names, "rollout_rs_threshold": threshold}


def everything() -> dict[str, Any]:
    """The fields of the correction that sends the most: all criteria at once, but for those on turns."""
    criteria = {name: criterion for name, criterion in CRITERIA.items() if criterion.unit != "turn"}
    bounded = [criterion for criterion in criteria.values() if criterion.bounds.takes_threshold]
    bounds = ["0.5_2" if criterion.bounds.on_ratio else "0.1" for criterion in bounded]
    fields = {"rollout_is": "token", "rollout_is_mode": "mask", "rollout_token_veto_threshold": 1e-4}
    scope = {"rollout_is_batch_normalize": True, "rollout_is_batch_normalize_scope": "accepted"}
    return {**fields, **scope, **rejection(",".join(criteria), ",".join(bounds))}


BYPASS = {"bypass_mode": True, "loss_type": "reinforce"}
SEQUENCE = {"rollout_is": "sequence", **rejection("token_k1,seq_mean_k3", "0.5_2,0.1")}
MAXIMUM = {"rollout_is": "token", **rejection("seq_max_k3", "0.5")}
CASES = {
    "metrics only": Case({"rollout_is": None}),
    "token IS": Case({"rollout_is": "token"}),
    "sequence IS, two criteria, normalised": Case({**SEQUENCE, "rollout_is_batch_normalize": True}),
    "token IS, seq_max": Case(MAXIMUM),
    "token IS, two group criteria": Case({"rollout_is": "token", **rejection("group_any,group_mean_k1", "0.5_2")}),
    "all criteria, veto, IcePop, normalised": Case(everything()),
    "token IS, GSPO": Case({"rollout_is": "token"}, "gspo"),
    "bypass, metrics only": Case({"rollout_is": None, **BYPASS}),
    "bypass, token IS": Case({"rollout_is": "token", **BYPASS}),
    "bypass, sequence IS, two criteria, normalised": Case({**SEQUENCE, "rollout_is_batch_normalize": True, **BYPASS}),
    "bypass, token IS, seq_max": Case({**MAXIMUM, **BYPASS}),
    "bypass, GSPO": Case({"rollout_is": None, "bypass_mode": True, "loss_type": "gspo"}),
}
SHOWN = ("token IS", "bypass, token IS")  # cases whose bytes are printed


@contextlib.contextmanager
def fake_groups(layout: Layout, rank: int) -> Iterator[tuple[ParallelGroups, float]]:
    """(Megatron's groups on one rank of the layout, seconds to make them)."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_rc.launch.training.models.cpu import cpu_backend

    with cpu_backend():
        start = time.perf_counter()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            context_parallel_size=layout.cp,
            create_gloo_process_groups=False,
        )
        seconds = time.perf_counter() - start
    groups = ParallelGroups.from_megatron()
    for name, group in (("cp", groups.cp), ("dp_cp", groups.dp_cp), ("pp", groups.pp)):
        if group_size(group) != layout.size(name):
            raise RuntimeError(f"group {name} of {layout} has {group_size(group)} ranks")
    try:
        yield groups, seconds
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def trace(case: Case, batch: Batch, layout: Layout, groups: ParallelGroups) -> list[Call]:
    """All collectives of a rollout batch and its optimizer steps, on this rank."""
    return tracing.trace(case.config, PolicyLossConfig(algorithm=case.algorithm), batch, layout, groups)


class Formula(NamedTuple):
    """The numbers that one collective of a phase carries, as factors of ``COUNTS``."""

    phase: str
    kind: str
    group: str
    factors: tuple[int, ...]

    def elements(self, batch: Batch) -> int:
        """The numbers that it carries for a batch."""
        return sum(factor * count for factor, count in zip(self.factors, batch.counts().values(), strict=True))

    def __str__(self) -> str:
        terms = zip(self.factors, COUNTS, strict=True)
        shown = [f"{factor} {name}".removesuffix(" 1").removeprefix("1 ") for factor, name in terms if factor]
        return f"{self.kind} {self.group}: {' + '.join(shown)}"

    @classmethod
    def parse(cls, phase: str, text: str) -> Formula:
        """The inverse of ``str``."""
        head, _, body = text.partition(": ")
        factors = dict.fromkeys(COUNTS, 0)
        for term in body.split(" + "):
            *number, name = term.split(" ")
            factors["1" if name.isdigit() else name] = int(name if name.isdigit() else "".join(number) or 1)
        kind, group = head.split(" ")
        return cls(phase, kind, group, tuple(factors.values()))


def fit(traced: Callable[[Batch], list[Call]]) -> list[Formula]:
    """The formulas, from traces that differ in one count each."""
    base = once(traced(BASE), BASE)
    factors: list[dict[str, int]] = [{} for _ in base]
    for name, batch in VARIANTS.items():
        change = batch.counts()[name] - BASE.counts()[name]
        for index, call in enumerate(once(traced(batch), batch)):
            factors[index][name] = (call.elements - base[index].elements) // change
    formulas = []
    for call, factor_of_count in zip(base, factors, strict=True):
        counted = sum(factor * BASE.counts()[name] for name, factor in factor_of_count.items())
        formulas.append(Formula(*call[:3], (call.elements - counted, *factor_of_count.values())))
    return formulas


def expected(formulas: Sequence[Formula], batch: Batch, layout: Layout, is_last_stage: bool) -> list[Call]:
    """The whole trace by the formulas: float64 numbers, no call in a group of size 1."""
    calls = {phase: list[Call]() for phase in PHASES}
    for formula in formulas:
        if layout.size(formula.group) > 1 and (is_last_stage or formula.group == "pp"):
            elements = formula.elements(batch)
            calls[formula.phase].append(Call(*formula[:3], elements, 8 * elements))
    first, micro, last = (calls[phase] for phase in PHASES)
    return first + (micro * batch.micro_batches + last) * batch.mini_batches


def gathered(per_token: int, batch: Batch, layout: Layout) -> float:
    """Bytes that one rank sends if tokens are gathered over CP, from the figure for 8 ranks together.

    In an all-gather over c ranks every token is sent c - 1 times: by all ranks except the last that receives it.
    """
    return per_token * (layout.cp - 1) / 7 / layout.cp * batch.length * batch.counts()["n"]


def fit_all(layout: Layout = LAYOUTS[0]) -> dict[str, list[Formula]]:
    """The formulas of every case, traced on the first rank of the last stage."""
    with fake_groups(layout, layout.first_of_last_stage) as (groups, _):
        return {name: fit(lambda batch, case=case: trace(case, batch, layout, groups)) for name, case in CASES.items()}


def table_of_formulas(formulas: dict[str, list[Formula]]) -> str:
    """A table with a row for each case and a column for each phase; :func:`read_formulas` reads it."""
    rows = [f"| case | {' | '.join(PHASES)} |", "|---|---|---|---|"]
    for name, formulas_of_case in formulas.items():
        cells = [
            ", ".join(f"`{formula}`" for formula in formulas_of_case if formula.phase == phase) for phase in PHASES
        ]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def read_formulas(text: str) -> dict[str, list[Formula]]:
    """The formulas of every case in a document with :func:`table_of_formulas`."""
    formulas: dict[str, list[Formula]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if cells and cells[0] in CASES and len(cells) == 1 + len(PHASES):
            pairs = zip(PHASES, cells[1:], strict=True)
            formulas[cells[0]] = [
                Formula.parse(phase, item) for phase, cell in pairs for item in re.findall(r"`([^`]+)`", cell)
            ]
    return formulas


@dataclass(frozen=True)
class Checked:
    """The traces of one layout: seconds to make a rank's groups (median), ranks, and traces that equal the formulas."""

    seconds: float
    ranks: int
    traces: int


def check(layout: Layout, formulas: dict[str, list[Formula]]) -> Checked:
    """Trace every case with several batches on the corners of a layout.

    Raises:
        RuntimeError: a trace differs from the formulas.
    """
    seconds = []
    traces = 0
    for rank in layout.corners():
        with fake_groups(layout, rank) as (groups, taken):
            seconds.append(taken)
            for (name, case), batch in itertools.product(CASES.items(), (BASE, *OTHERS)):
                if trace(case, batch, layout, groups) != expected(formulas[name], batch, layout, groups.is_last_stage):
                    raise RuntimeError(f"{name} on rank {rank} of {layout} with {batch} differs from the formulas")
                traces += 1
    return Checked(statistics.median(seconds), len(seconds), traces)


def check_large(formulas: dict[str, list[Formula]], layout: Layout = LAYOUTS[-2]) -> None:
    """Check the batch whose bytes are shown, with all its tokens, on the first rank of the last stage."""
    with fake_groups(layout, layout.first_of_last_stage) as (groups, _):
        for name, case in CASES.items():
            if trace(case, LARGE, layout, groups) != expected(formulas[name], LARGE, layout, True):
                raise RuntimeError(f"{name} with {LARGE} differs from the formulas")


def table_of_bytes(formulas: dict[str, list[Formula]], name: str, layouts: Sequence[Layout]) -> str:
    """The bytes that a rank of the last stage sends for ``LARGE``, and the bytes of gathering its tokens over CP."""
    others = " | ".join(GATHERING)
    rows = [f"| ranks | layout | cp | dp_cp | pp | in all | {others} |", "|" + "---|" * (6 + len(GATHERING))]
    for layout in layouts:
        calls = expected(formulas[name], LARGE, layout, True)
        parts = [sent(calls, layout, group) for group in ("cp", "dp_cp", "pp")]
        cells = [amount(number) for number in (*parts, sum(parts))]
        for figures in GATHERING.values():
            cells.append(" to ".join(dict.fromkeys(amount(gathered(figure, LARGE, layout)) for figure in figures)))
        rows.append(f"| {layout.world} | {layout} | {' | '.join(cells)} |")
    return "\n".join(rows)


# For estimates: GPUs of a machine, and the microseconds and GB/s in NCCL's own tuner for small messages (protocol LL)
# over NVLink and over a network of 400 Gb/s: src/graph/tuning.cc of github.com/NVIDIA/nccl, commit 01afd20.
GPUS = 8
TREE_START = 4.4
TREE_INSIDE = 1.8 * 0.52
TREE_BETWEEN = 5.0
TREE_SPEED = 50 * 0.9 / 3.8 / 2
RING_START = 3.6
RING_BETWEEN = 2.7
RING_SPEED = 50 / 4


def microseconds(call: Call, layout: Layout) -> float:
    """NCCL's estimate of one collective's time: an all-reduce along a tree, a broadcast along a ring.

    Ranks of a machine are neighbours, in Megatron's order tp, cp, dp, pp. Nothing is sent.
    """
    size = layout.size(call.group)
    apart = layout.tp if call.group != "pp" else layout.tp * layout.cp * layout.dp
    if call.kind == "BROADCAST":
        return RING_START + size * RING_BETWEEN + call.payload / (1000 * RING_SPEED)
    near = min(size, max(1, GPUS // apart))
    machines = math.ceil(size / near)
    steps = (near - 1) * TREE_INSIDE + math.floor(math.log2(machines)) * TREE_BETWEEN
    return TREE_START + 2 * steps + call.payload / (1000 * TREE_SPEED)


def table_of_times(formulas: dict[str, list[Formula]], layouts: Sequence[Layout]) -> str:
    """The number of collectives for ``LARGE`` on the last stage, and their time by :func:`microseconds`."""
    rows = ["| ranks | layout | " + " | ".join(f"{name} | estimate" for name in SHOWN) + " |"]
    rows.append("|" + "---|" * (2 + 2 * len(SHOWN)))
    for layout in layouts:
        traces = [expected(formulas[name], LARGE, layout, True) for name in SHOWN]
        cells = [
            f"{len(calls)} | {sum(microseconds(call, layout) for call in calls) / 1000:.1f} ms" for calls in traces
        ]
        rows.append(f"| {layout.world} | {layout} | {' | '.join(cells)} |")
    return "\n".join(rows)


def say(text: str) -> None:
    """Print text at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    """Trace all layouts and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", help="only layouts with these numbers of ranks; default: all")
    parser.add_argument("--formulas", action="store_true", help="fit the formulas, print them and stop")
    args = parser.parse_args()
    layouts = [layout for layout in LAYOUTS if args.ranks is None or layout.world in args.ranks]
    unknown = set(args.ranks or ()) - {layout.world for layout in LAYOUTS}
    if unknown or not layouts:
        sizes = ", ".join(str(size) for size in sorted({layout.world for layout in LAYOUTS}))
        parser.error(f"--ranks {' '.join(map(str, args.ranks))}: take some of {sizes}")
    # Megatron's warnings about missing packages, and the CPU switch's for every layout.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    formulas = fit_all()
    say("Float64 numbers of each collective\n\n" + table_of_formulas(formulas))
    if args.formulas:
        return
    say("\nTraces, all equal to the formulas\n")
    say("| ranks | layout | groups made in | ranks traced | traces |\n|---|---|---|---|---|")
    for layout in layouts:
        checked = check(layout, formulas)
        say(f"| {layout.world} | {layout} | {checked.seconds:.3f} s | {checked.ranks} | {checked.traces} |")
    check_large(formulas)
    for name in SHOWN:
        say(f"\nBytes a rank sends, {name}: {LARGE}\n\n" + table_of_bytes(formulas, name, layouts))
    say("\nEstimates of NCCL's tuner\n\n" + table_of_times(formulas, layouts))


if __name__ == "__main__":
    main()
