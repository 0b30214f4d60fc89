"""Trace of the correction's collectives in a rollout batch and its optimizer steps.

The groups may be fake and send nothing; their sizes, this rank's place in them and all local work are real. Sizes of
collectives depend on the numbers of sequences and prompts, never on tokens or ranks (benchmarks/SCALING.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rc.correction.inputs import PlanInputs
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.parallel import ParallelGroups, SequenceLayout
from megatron_rc.parallel.groups import group_rank
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.training.micro_batch import MicroBatch as PlannedMicroBatch
from megatron_rc.training.plan import LossScale, Plan, StepError
from megatron_rc.training.rollout_correction import RolloutCorrection
from megatron_rc.training.schedule import masked_loss

PHASES = ("a rollout batch", "a micro-batch", "an optimizer step")
# 1; sequences of a replica; sequences of a micro-batch; prompts of the batch; mini-batches; largest staleness.
COUNTS = ("1", "n", "b", "G", "M", "A")


@dataclass(frozen=True)
class Layout:
    """Number of ranks in each dimension."""

    tp: int
    cp: int
    pp: int
    dp: int

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.pp * self.dp

    def size(self, group: str) -> int:
        """Number of ranks in a group."""
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


@dataclass(frozen=True)
class Batch:
    """Sizes of one replica's part of a rollout batch."""

    length: int = 64  # tokens of each sequence; in a packed batch of the longest
    micro_size: int = 2  # sequences of a micro-batch
    micro_batches: int = 2  # micro-batches of an optimizer step
    mini_batches: int = 2  # optimizer steps
    prompts: int = 4  # prompts of the whole batch, over all replicas
    max_staleness: int = 0  # the last bucket of staleness
    packed: bool = False  # sequences of different lengths in one row, instead of padded rows

    def counts(self) -> dict[str, int]:
        """Value of each symbol in ``COUNTS``."""
        sequences = self.micro_size * self.micro_batches * self.mini_batches
        values = (1, sequences, self.micro_size, self.prompts, self.mini_batches, self.max_staleness)
        return dict(zip(COUNTS, values, strict=True))


class Call(NamedTuple):
    """One collective: SUM, MAX or BROADCAST, in one of ``PHASES``, over ``cp``, ``dp_cp`` or ``pp``."""

    phase: str
    kind: str
    group: str
    elements: int
    payload: int  # bytes


class Recorder(TorchDispatchMode):
    """Records every collective that reaches torch's dispatcher, in order."""

    def __init__(self, groups: ParallelGroups) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        groups_by_name = {"cp": groups.cp, "dp_cp": groups.dp_cp, "pp": groups.pp}
        self._names = {str(group.group_name): name for name, group in groups_by_name.items() if group is not None}
        self._operation = "all-reduce"
        self.calls: list[Call] = []
        self.phase = PHASES[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.calls.append(self._call(func, args))
        return func(*args, **(kwargs or {}))

    def _call(self, func: Any, args: tuple[Any, ...]) -> Call:
        tensors = [value for value in torch.utils._pytree.tree_leaves(args) if isinstance(value, Tensor)]
        # The group is the first script object; functional collectives have none.
        group = next((value for value in args if isinstance(value, torch.ScriptObject)), None)
        name = "another" if group is None else str(dist.ProcessGroup.unbox(group).group_name)
        kind = {"allreduce_": self._operation, "broadcast_": "BROADCAST"}.get(func._opname, func._opname)
        elements = sum(tensor.numel() for tensor in tensors)
        payload = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return Call(self.phase, kind, self._names.get(name, name), elements, payload)

    @contextlib.contextmanager
    def active(self) -> Iterator[Recorder]:
        """Record inside the block. The dispatcher hides SUM or MAX, so ``dist.all_reduce`` is wrapped too."""
        original = dist.all_reduce

        def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, **rest: Any) -> Any:
            self._operation = str(op).rpartition(".")[2]
            work = original(tensor, op=op, **rest)
            self._operation = "all-reduce"
            return work

        with mock.patch.object(dist, "all_reduce", all_reduce), self:
            yield self


class MicroBatch(NamedTuple):
    """This rank's tokens of a micro-batch."""

    layout: SequenceLayout
    train: Tensor
    rollout: Tensor
    mask: Tensor


def micro_batch(batch: Batch, layout: Layout, groups: ParallelGroups, index: int) -> MicroBatch:
    """Random tokens that differ between ranks; the last rank has none that count."""
    rank = group_rank(groups.cp)
    local = batch.length // layout.cp
    if batch.packed:
        lengths = [2 * (1 + 7 * (index + row) % (local // 2)) for row in range(batch.micro_size)]
        cut = SequenceLayout.packed([0, *itertools.accumulate(lengths)], cp_rank=rank, cp_size=layout.cp)
    else:
        cut = SequenceLayout.padded(batch.micro_size, local, cp_rank=rank, cp_size=layout.cp)
    dp_cp_rank = group_rank(groups.dp_cp)
    generator = torch.Generator().manual_seed(dp_cp_rank * 1000 + index)
    rollout = -3 * torch.rand(cut.shape, generator=generator) - 0.01
    train = (rollout + 0.05 * torch.randn(cut.shape, generator=generator)).clamp(max=0)
    mask = torch.rand(cut.shape, generator=generator) > 0.25
    return MicroBatch(cut, train, rollout, mask & (dp_cp_rank < layout.dp * layout.cp - 1))


def plan_inputs(parts: Sequence[MicroBatch], batch: Batch, bypass: bool) -> PlanInputs:
    """The inputs of a plan with every optional field."""
    size = batch.micro_size
    steps = len(parts) // batch.mini_batches
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


def score(correction: RolloutCorrection, part: MicroBatch, planned: PlannedMicroBatch, scale: LossScale) -> None:
    """Run the loss of a micro-batch forward and backward; π_ref and the entropy are arbitrary numbers."""
    log_probs = part.train.clone().requires_grad_()
    planned = dataclasses.replace(planned, ref_log_probs=part.rollout)
    masked_loss(correction, planned, log_probs, entropy=part.train, scale=scale)[0].backward()


def trace(
    config: RolloutCorrectionConfig,
    loss: PolicyLossConfig,
    batch: Batch,
    layout: Layout,
    groups: ParallelGroups,
    *,
    one_pass: bool = False,
) -> list[Call]:
    """This rank's collectives in a rollout batch and its optimizer steps."""
    correction = RolloutCorrection(config, groups, loss=loss, one_pass=one_pass)
    count = batch.micro_batches
    parts = list[MicroBatch]()
    inputs = None
    if groups.is_last_stage:
        parts = [micro_batch(batch, layout, groups, index) for index in range(count * batch.mini_batches)]
        inputs = plan_inputs(parts, batch, correction.corrects_in_loss)
    with Recorder(groups).active() as recorder:
        plan = _planned(correction, inputs, batch)
        planned = [] if inputs is None else plan.micro_batches(inputs)
        for step in range(batch.mini_batches):
            recorder.phase = PHASES[1]
            scale = plan.loss_scale(step, num_microbatches=count)
            for index in range(len(parts))[step * count : (step + 1) * count]:
                score(correction, parts[index], planned[index], scale)
            recorder.phase = PHASES[2]
            _finish(correction)
    return recorder.calls


def _planned(correction: RolloutCorrection, inputs: PlanInputs | None, batch: Batch) -> Plan:
    """The checked plan of a rollout batch, with its metrics made."""
    plan = correction.plan(
        inputs,
        num_mini_batches=batch.mini_batches,
        num_groups=batch.prompts,
        current_version=batch.max_staleness,
        max_staleness=batch.max_staleness,
    )
    plan.check()
    plan.metrics()
    return plan


def _finish(correction: RolloutCorrection) -> None:
    """Reduce the sums of an optimizer step, and make its metrics."""
    # The plan counts whole sequences on CP rank 0 alone, so that other ranks' own sums do not agree with it.
    refusals = [StepError] if group_rank(correction.groups.cp) > 0 else []
    with contextlib.suppress(*refusals):
        correction.finish_step(torch.device("cpu"))
        correction.loss_metrics()
        if correction.step is not None:
            correction.step.check()
            correction.step.metrics()
    # A step that was refused stays open.
    correction.reset_step()


def once(calls: Sequence[Call], batch: Batch) -> list[Call]:
    """The calls of one micro-batch and one optimizer step, if all of them are equal."""
    calls_of_phase = {phase: [call for call in calls if call.phase == phase] for phase in PHASES}
    times = {PHASES[0]: 1, PHASES[1]: batch.micro_batches * batch.mini_batches, PHASES[2]: batch.mini_batches}
    return [call for phase in PHASES for call in calls_of_phase[phase][: len(calls_of_phase[phase]) // times[phase]]]


def sent(calls: Sequence[Call], layout: Layout, group: str) -> float:
    """Bytes that one rank sends over a group."""
    size = layout.size(group)
    ring = 2 * (size - 1) / size
    return sum(call.payload * (1 if call.kind == "BROADCAST" else ring) for call in calls if call.group == group)


def amount(number: float) -> str:
    """A number of bytes with a unit."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} B"
