"""The correction's collectives in a run: number, size and group."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron_rc.launch.dry_run.batches import batch_numbers, layout_of, sequences_of_micro_batch
from megatron_rc.launch.dry_run.fake_ranks import fake_groups, first_rank_of_stage
from megatron_rc.launch.dry_run.tracing import PHASES, Batch, Call, amount, once, sent, trace
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.passes import is_one_pass
from megatron_rc.launch.train_ppo import cpu_backend
from megatron_rc.parallel import ParallelGroups


def correction_calls(config: RunConfig) -> list[Call]:
    """Collectives of one rollout batch, one micro-batch and one optimizer step, on a rank of the last pipeline stage.

    Their sizes depend neither on the number of tokens nor of ranks. So the trace has short sequences and few ranks.
    """
    numbers, layout = batch_numbers(config), layout_of(config)
    mini, each = numbers["mini_batches"], numbers["sequences_of_a_replica"] // numbers["mini_batches"]
    common = Batch(
        length=2 * layout.cp,
        mini_batches=mini,
        prompts=numbers["prompts"],
        max_staleness=config.rollouts.rollout_staleness or 0,
    )
    # The plan sees the same sequences however they are cut into micro-batches.
    whole = dataclasses.replace(common, micro_size=each, micro_batches=1)
    piece = dataclasses.replace(common, micro_size=sequences_of_micro_batch(config), micro_batches=1, mini_batches=1)
    # At most two data-parallel ranks (one alone would send nothing), and no expert parallelism.
    ranks = config.parallel.model_size * min(2, config.data_parallel_size)
    small = config.changed(launch={"on_cpu": True, "world_size": ranks}, parallel={"expert_model_parallel_size": 1})
    one_pass = is_one_pass(config)
    with cpu_backend(), fake_groups(small, first_rank_of_stage(small, layout.pp - 1)):
        groups = ParallelGroups.from_megatron()
        calls, micro = (
            once(trace(config.correction, config.loss, batch, layout_of(small), groups, one_pass=one_pass), batch)
            for batch in (whole, piece)
        )
    found = {PHASES[0]: calls, PHASES[1]: micro, PHASES[2]: calls}
    return [call for phase in PHASES for call in found[phase] if call.phase == phase]


def bytes_sent(config: RunConfig, calls: Sequence[Call]) -> float:
    """Bytes that one rank of the last stage sends for a rollout batch and all its optimizer steps."""
    numbers = batch_numbers(config)
    steps = numbers["optimizer_steps"]
    times = dict(zip(PHASES, (1, steps * numbers["micro_batches"], steps), strict=True))
    layout = layout_of(config)
    return sum(times[call.phase] * sent([call], layout, call.group) for call in calls)


def as_mapping(config: RunConfig, calls: Sequence[Call]) -> dict[str, Any]:
    """The collectives as plain values, for JSON."""
    found: dict[str, Any] = {phase: [] for phase in PHASES}
    for phase, kind, group, elements, payload in calls:
        found[phase].append({"operation": kind, "group": group, "numbers": elements, "bytes": payload})
    return found | {"bytes_sent": bytes_sent(config, calls)}


def in_words(config: RunConfig, calls: Sequence[Call]) -> list[str]:
    """One line for each phase with collectives, and one for the bytes of all."""
    lines = []
    for phase in PHASES:
        of_phase = [call for call in calls if call.phase == phase]
        if of_phase:
            shown = ", ".join(f"{call.kind} {call.group} {amount(call.payload)}" for call in of_phase)
            lines.append(f"the correction's collectives of {phase}: {shown}")
    total = amount(bytes_sent(config, calls))
    return [*lines, f"the correction sends {total} a rank for a rollout batch and its optimizer steps"]
