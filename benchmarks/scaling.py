"""What the correction sends in layouts of up to 16,384 ranks: collectives and bytes, traced with fake process groups.

    python benchmarks/scaling.py [--ranks 8 64 512 4096 16384] [--formulas]

Real are Megatron's ``parallel_state``, the groups' sizes, this rank's place in them, its tokens and all local work; the
groups' collectives return the data as it is. Each layout is traced on its corners: first and last rank of context,
pipeline and data parallelism. A dispatch mode records every collective of torch, ours or not.

How many numbers a collective carries is fitted on the first layout as a linear function of the counts in ``COUNTS``.
Every other trace, of other batches, tokens, ranks and layouts, has to equal those formulas call by call. Bytes are what
one rank sends: 2 (p - 1)/p times the payload for a ring all-reduce over p ranks, the payload for a broadcast along a
chain.

``--formulas`` prints the first table only, the one that ``docs/scaling.md`` holds and
``tests/correction/test_scaling.py`` reads.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rc import PlanInputs, RolloutCorrection, RolloutCorrectionConfig
from megatron_rc.loss.policy import PolicyLossConfig, policy_loss
from megatron_rc.parallel import ParallelGroups, SequenceLayout
from megatron_rc.parallel.groups import group_rank, group_size
from megatron_rc.settings.criteria import CRITERIA

PHASES = ("a rollout batch", "a micro-batch", "an optimizer step")
# Bytes a token that all ranks of a CP group of 8 send together, for the sequence statistics of one batch.
GATHERING = {"verl": (28, 28), "NeMo-RL": (29, 29), "slime": (58, 117)}


@dataclass(frozen=True)
class Layout:
    """How many ranks split each dimension."""

    tp: int
    cp: int
    pp: int
    dp: int

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.pp * self.dp

    def size(self, group: str) -> int:
        """Ranks of one group."""
        return {"cp": self.cp, "dp_cp": self.dp * self.cp, "pp": self.pp}[group]

    @property
    def first_of_last_stage(self) -> int:
        """The first rank of the last pipeline stage."""
        return self.tp * self.cp * self.dp * (self.pp - 1)

    def corners(self) -> list[int]:
        """First and last rank of CP, PP and DP in all combinations, in Megatron's order tp, cp, dp, pp."""
        ends = [sorted({0, size - 1}) for size in (self.pp, self.dp, self.cp)]
        return [self.tp * (cp + self.cp * (dp + self.dp * pp)) for pp, dp, cp in itertools.product(*ends)]

    def __str__(self) -> str:
        return f"TP {self.tp} × CP {self.cp} × PP {self.pp} × DP {self.dp}"


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


@dataclass(frozen=True)
class Batch:
    """What one data-parallel replica holds of a rollout batch.

    Attributes:
        length: tokens of each sequence, or of the longest one of a packed batch.
        micro_size: sequences of a micro-batch.
        micro_batches: of one optimizer step.
        mini_batches: optimizer steps.
        prompts: of the whole batch, all replicas together.
        max_staleness: the last bucket of staleness.
        packed: sequences of different lengths one after the other, instead of rows.
    """

    length: int = 64
    micro_size: int = 2
    micro_batches: int = 2
    mini_batches: int = 2
    prompts: int = 4
    max_staleness: int = 0
    packed: bool = False

    def counts(self) -> dict[str, int]:
        """What formulas are made of."""
        sequences = self.micro_size * self.micro_batches * self.mini_batches
        return dict(
            zip(
                COUNTS,
                (1, sequences, self.micro_size, self.prompts, self.mini_batches, self.max_staleness),
                strict=True,
            )
        )


# One; sequences of a replica; of a micro-batch; prompts of the batch; mini-batches; largest staleness.
COUNTS = ("1", "n", "b", "G", "M", "A")
BASE = Batch()
# Each differs from BASE in one of the counts.
VARIANTS = {
    "n": Batch(micro_batches=4),
    "b": Batch(micro_size=4, micro_batches=1),
    "G": Batch(prompts=7),
    "M": Batch(micro_batches=1, mini_batches=4),
    "A": Batch(max_staleness=3),
}
# More tokens; other tokens, packed; every count another.
OTHERS = (
    Batch(length=512),
    Batch(length=256, packed=True),
    Batch(length=128, micro_size=3, micro_batches=1, mini_batches=3, prompts=11, max_staleness=2),
)
# For the bytes: 64 sequences of 32k tokens a replica.
LARGE = Batch(length=2**15, micro_size=4, micro_batches=8, mini_batches=2, prompts=64)


@dataclass(frozen=True)
class Case:
    """A configuration of the correction, and the objective."""

    fields: dict[str, Any]
    algorithm: str | None = None

    @property
    def config(self) -> RolloutCorrectionConfig:
        """As the user would make it."""
        return RolloutCorrectionConfig(**self.fields)


def rejection(names: str, threshold: str) -> dict[str, Any]:
    """The fields of some criteria."""
    return {"rollout_rs": names, "rollout_rs_threshold": threshold}


def everything() -> dict[str, Any]:
    """The fields that make the correction send the most: all criteria at once."""
    bounded = [criterion for criterion in CRITERIA.values() if criterion.bounds.takes_threshold]
    bounds = ["0.5_2" if criterion.bounds.on_ratio else "0.1" for criterion in bounded]
    fields = {"rollout_is": "token", "rollout_is_mode": "mask", "rollout_token_veto_threshold": 1e-4}
    scope = {"rollout_is_batch_normalize": True, "rollout_is_batch_normalize_scope": "accepted"}
    return {**fields, **scope, **rejection(",".join(CRITERIA), ",".join(bounds))}


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
SHOWN = ("token IS", "bypass, token IS")  # whose bytes are printed


class Call(NamedTuple):
    """One collective: SUM, MAX or BROADCAST, in one of ``PHASES``, over ``cp``, ``dp_cp`` or ``pp``."""

    phase: str
    kind: str
    group: str
    elements: int
    payload: int  # bytes


class Recorder(TorchDispatchMode):
    """Every collective that reaches torch's dispatcher, in order."""

    def __init__(self, groups: ParallelGroups) -> None:
        super().__init__()
        known = {"cp": groups.cp, "dp_cp": groups.dp_cp, "pp": groups.pp}
        self._names = {str(group.group_name): name for name, group in known.items() if group is not None}
        self._operation = "all-reduce"
        self.calls: list[Call] = []
        self.phase = PHASES[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.calls.append(self._call(func, args))
        return func(*args, **(kwargs or {}))

    def _call(self, func: Any, args: tuple[Any, ...]) -> Call:
        tensors = [value for value in torch.utils._pytree.tree_leaves(args) if isinstance(value, Tensor)]
        # The group comes before the operation; functional collectives have none of the two as objects.
        group = next((value for value in args if isinstance(value, torch.ScriptObject)), None)
        name = "another" if group is None else str(dist.ProcessGroup.unbox(group).group_name)
        kind = {"allreduce_": self._operation, "broadcast_": "BROADCAST"}.get(func._opname, func._opname)
        elements = sum(tensor.numel() for tensor in tensors)
        payload = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return Call(self.phase, kind, self._names.get(name, name), elements, payload)

    @contextlib.contextmanager
    def active(self) -> Iterator[Recorder]:
        """Record; the dispatcher does not show which reduction it is, so the public function is looked at as well."""
        original = dist.all_reduce

        def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, **rest: Any) -> Any:
            self._operation = str(op).rpartition(".")[2]
            work = original(tensor, op=op, **rest)
            self._operation = "all-reduce"
            return work

        with mock.patch.object(dist, "all_reduce", all_reduce), self:
            yield self


@contextlib.contextmanager
def fake_groups(layout: Layout, rank: int) -> Iterator[tuple[ParallelGroups, float]]:
    """(Megatron's groups as one rank of the layout sees them, seconds that it took to make them)."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_rc.launch.training.cpu import cpu_backend

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


class MicroBatch(NamedTuple):
    """This rank's tokens of some sequences."""

    layout: SequenceLayout
    train: Tensor
    rollout: Tensor
    mask: Tensor


def micro_batch(batch: Batch, layout: Layout, groups: ParallelGroups, index: int) -> MicroBatch:
    """Other tokens on every rank, and none that count on the last of all."""
    rank, local = group_rank(groups.cp), batch.length // layout.cp
    if batch.packed:
        lengths = [2 * (1 + 7 * (index + row) % (local // 2)) for row in range(batch.micro_size)]
        cut = SequenceLayout.packed([0, *itertools.accumulate(lengths)], cp_rank=rank, cp_size=layout.cp)
    else:
        cut = SequenceLayout.padded(batch.micro_size, local, cp_rank=rank, cp_size=layout.cp)
    place = group_rank(groups.dp_cp)
    generator = torch.Generator().manual_seed(place * 1000 + index)
    rollout = -3 * torch.rand(cut.shape, generator=generator) - 0.01
    train = (rollout + 0.05 * torch.randn(cut.shape, generator=generator)).clamp(max=0)
    mask = torch.rand(cut.shape, generator=generator) > 0.25
    return MicroBatch(cut, train, rollout, mask & (place < layout.dp * layout.cp - 1))


def plan_inputs(parts: Sequence[MicroBatch], batch: Batch, bypass: bool) -> PlanInputs:
    """The rollout batch of this rank, with all that a trainer knows of it."""
    size, steps = batch.micro_size, len(parts) // batch.mini_batches
    ids = [torch.full((size,), index // steps) for index in range(len(parts))]
    return PlanInputs(
        None if bypass else [part.train for part in parts],
        [part.rollout for part in parts],
        [part.mask for part in parts],
        [part.layout for part in parts],
        advantages=[torch.ones(size)] * len(parts),
        rewards=[torch.ones(size)] * len(parts),
        group_ids=[torch.arange(size) % batch.prompts] * len(parts),
        policy_versions=[torch.zeros(size, dtype=torch.int64)] * len(parts),
        mini_batch_ids=ids,
    )


def score(correction: RolloutCorrection, part: MicroBatch, step: int) -> None:
    """What the loss function does with a micro-batch."""
    weights, old, mean_log_ratio = None, part.train, None
    if correction.config.bypass_mode:
        versions = torch.zeros(part.layout.num_sequences, dtype=torch.int64)
        found = correction.in_loss(
            part.train, part.rollout, part.mask, layout=part.layout, policy_versions=versions, mini_batch=step
        )
        weights, old, mean_log_ratio = found.weights, part.rollout, found.mean_log_ratio
    policy = policy_loss(
        part.train,
        old,
        torch.ones(part.layout.num_sequences),
        part.mask,
        algorithm=correction.loss.algorithm or "ppo_clip",
        weights=weights,
        layout=part.layout,
        groups=correction.groups,
        sequence_log_ratio=mean_log_ratio,
    )
    correction.steps.record(policy.statistics)


def trace(case: Case, batch: Batch, layout: Layout, groups: ParallelGroups) -> list[Call]:
    """All collectives of a rollout batch and its optimizer steps, on this rank."""
    correction = RolloutCorrection(case.config, groups, loss=PolicyLossConfig(algorithm=case.algorithm))
    count, parts = batch.micro_batches, []
    if groups.is_last_stage:
        parts = [micro_batch(batch, layout, groups, index) for index in range(count * batch.mini_batches)]
    with Recorder(groups).active() as recorder:
        plan = correction.plan(
            plan_inputs(parts, batch, correction.config.bypass_mode) if parts else None,
            num_mini_batches=batch.mini_batches,
            num_groups=batch.prompts,
            current_version=batch.max_staleness,
            max_staleness=batch.max_staleness,
        )
        plan.check()
        plan.metrics()
        for step in range(batch.mini_batches):
            recorder.phase = PHASES[1]
            for part in parts[step * count : (step + 1) * count]:
                score(correction, part, step)
            recorder.phase = PHASES[2]
            correction.finish_step(torch.device("cpu"))
            correction.loss_metrics()
            if correction.step is not None:
                correction.step.check()
                correction.step.metrics()
    return recorder.calls


class Formula(NamedTuple):
    """How many numbers one collective of a phase carries, as the factors of ``COUNTS``."""

    phase: str
    kind: str
    group: str
    factors: tuple[int, ...]

    def elements(self, batch: Batch) -> int:
        """How many numbers it carries for a batch."""
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


def once(calls: Sequence[Call], batch: Batch) -> list[Call]:
    """One micro-batch and one optimizer step of a trace in which they are all alike."""
    found = {phase: [call for call in calls if call.phase == phase] for phase in PHASES}
    times = {PHASES[0]: 1, PHASES[1]: batch.micro_batches * batch.mini_batches, PHASES[2]: batch.mini_batches}
    return [call for phase in PHASES for call in found[phase][: len(found[phase]) // times[phase]]]


def fit(traced: Callable[[Batch], list[Call]]) -> list[Formula]:
    """The formulas, from traces that differ in one count each."""
    base = once(traced(BASE), BASE)
    factors: list[dict[str, int]] = [{} for _ in base]
    for name, batch in VARIANTS.items():
        change = batch.counts()[name] - BASE.counts()[name]
        for index, call in enumerate(once(traced(batch), batch)):
            factors[index][name] = (call.elements - base[index].elements) // change
    return [
        Formula(*call[:3], (call.elements - sum(found[name] * BASE.counts()[name] for name in found), *found.values()))
        for call, found in zip(base, factors, strict=True)
    ]


def expected(formulas: Sequence[Formula], batch: Batch, layout: Layout, is_last_stage: bool) -> list[Call]:
    """The whole trace that the formulas stand for: float64 numbers, none in a group of size 1."""
    calls = {phase: list[Call]() for phase in PHASES}
    for formula in formulas:
        if layout.size(formula.group) > 1 and (is_last_stage or formula.group == "pp"):
            elements = formula.elements(batch)
            calls[formula.phase].append(Call(*formula[:3], elements, 8 * elements))
    first, micro, last = (calls[phase] for phase in PHASES)
    return first + (micro * batch.micro_batches + last) * batch.mini_batches


def sent(calls: Sequence[Call], layout: Layout, group: str) -> float:
    """Bytes that one rank sends over a group."""
    size = layout.size(group)
    ring = 2 * (size - 1) / size
    return sum(call.payload * (1 if call.kind == "BROADCAST" else ring) for call in calls if call.group == group)


def gathered(per_token: int, batch: Batch, layout: Layout) -> float:
    """Bytes that one rank sends where tokens are gathered over CP, from the figure for 8 ranks together.

    In an all-gather over c ranks every token is sent c - 1 times: by all ranks but the last that it comes to.
    """
    return per_token * (layout.cp - 1) / 7 / layout.cp * batch.length * batch.counts()["n"]


def fit_all(layout: Layout = LAYOUTS[0]) -> dict[str, list[Formula]]:
    """The formulas of every case, as the first rank of the last stage sees them."""
    with fake_groups(layout, layout.first_of_last_stage) as (groups, _):
        return {name: fit(lambda batch, case=case: trace(case, batch, layout, groups)) for name, case in CASES.items()}


def table_of_formulas(formulas: dict[str, list[Formula]]) -> str:
    """A row a case, a column a phase; read back by :func:`read_formulas`."""
    rows = [f"| case | {' | '.join(PHASES)} |", "|---|---|---|---|"]
    for name, found in formulas.items():
        cells = [", ".join(f"`{formula}`" for formula in found if formula.phase == phase) for phase in PHASES]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def read_formulas(text: str) -> dict[str, list[Formula]]:
    """The formulas of every case in a document that holds :func:`table_of_formulas`."""
    found: dict[str, list[Formula]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if cells and cells[0] in CASES and len(cells) == 1 + len(PHASES):
            pairs = zip(PHASES, cells[1:], strict=True)
            found[cells[0]] = [
                Formula.parse(phase, item) for phase, cell in pairs for item in re.findall(r"`([^`]+)`", cell)
            ]
    return found


@dataclass(frozen=True)
class Checked:
    """What came of tracing one layout: seconds to make a rank's groups (median), ranks and traces; all as expected."""

    seconds: float
    ranks: int
    traces: int


def check(layout: Layout, formulas: dict[str, list[Formula]]) -> Checked:
    """Trace every case with several batches on the corners of a layout.

    Raises:
        RuntimeError: a trace that the formulas do not give.
    """
    seconds, traces = [], 0
    for rank in layout.corners():
        with fake_groups(layout, rank) as (groups, taken):
            seconds.append(taken)
            for (name, case), batch in itertools.product(CASES.items(), (BASE, *OTHERS)):
                if trace(case, batch, layout, groups) != expected(formulas[name], batch, layout, groups.is_last_stage):
                    raise RuntimeError(f"{name} on rank {rank} of {layout} with {batch} is not as the formulas say")
                traces += 1
    return Checked(statistics.median(seconds), len(seconds), traces)


def check_large(formulas: dict[str, list[Formula]], layout: Layout = LAYOUTS[-2]) -> None:
    """The same for the batch whose bytes are shown, with all its tokens, on the first rank of the last stage."""
    with fake_groups(layout, layout.first_of_last_stage) as (groups, _):
        for name, case in CASES.items():
            if trace(case, LARGE, layout, groups) != expected(formulas[name], LARGE, layout, True):
                raise RuntimeError(f"{name} with {LARGE} is not as the formulas say")


def amount(number: float) -> str:
    """A number of bytes as a person writes it."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} B"


def table_of_bytes(formulas: dict[str, list[Formula]], name: str, layouts: Sequence[Layout]) -> str:
    """What a rank of the last stage sends for ``LARGE``, and what gathering its tokens over CP would."""
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


def say(text: str) -> None:
    """Print at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    """Trace and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", help="only the layouts with so many ranks")
    parser.add_argument("--formulas", action="store_true", help="fit the formulas, print them and stop")
    args = parser.parse_args()
    layouts = [layout for layout in LAYOUTS if args.ranks is None or layout.world in args.ranks]
    unknown = set(args.ranks or ()) - {layout.world for layout in LAYOUTS}
    if unknown or not layouts:
        sizes = ", ".join(str(size) for size in sorted({layout.world for layout in LAYOUTS}))
        parser.error(f"--ranks {' '.join(map(str, args.ranks))}: take some of {sizes}")
    # Megatron's words on packages that are not there, and the CPU switch's for every layout.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    formulas = fit_all()
    say("Float64 numbers of each collective\n\n" + table_of_formulas(formulas))
    if args.formulas:
        return
    say("\nTraces, all equal to the formulas\n")
    say("| ranks | layout | groups made in | ranks traced | traces |\n|---|---|---|---|---|")
    for layout in layouts:
        found = check(layout, formulas)
        say(f"| {layout.world} | {layout} | {found.seconds:.3f} s | {found.ranks} | {found.traces} |")
    check_large(formulas)
    for name in SHOWN:
        say(f"\nBytes a rank sends, {name}: {LARGE}\n\n" + table_of_bytes(formulas, name, layouts))


if __name__ == "__main__":
    main()
