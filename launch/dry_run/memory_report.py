"""Report of the memory of all stages, and the check against a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron_rc.launch.dry_run.memory import KINDS, StageMemory
from megatron_rc.launch.dry_run.places import aligned
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.run_config import RunConfig

GIB = 2**30


def memory_in_words(memories: Sequence[StageMemory], engine: int | None, share: float) -> list[str]:
    """A table with a row for each stage, then the engine's memory.

    ``share``: vLLM's share of a device, for an ``engine`` of unknown size.
    """
    unit, size = _unit(max(memory.peak for memory in memories))
    rows = [["stage", "parameters", *KINDS, "in flight", "peak"]]
    for memory in memories:
        cells = [f"{getattr(memory, name) / size:.2f}" for name in (*KINDS, "peak")]
        cells.insert(-1, str(memory.in_flight))
        rows.append([str(memory.stage), f"{memory.parameters:,}", *cells])
    lines = [f"memory of a rank, in {unit}", *aligned(rows)]
    if engine is None:
        lines.append(f"and vLLM takes {share:.0%} of the device of the first rank of each replica")
    elif engine:
        lines.append(f"and the engine {engine / size:.2f} {unit} on the first rank of each replica")
    return lines


def memory_as_mapping(memories: Sequence[StageMemory], engine: int | None) -> dict[str, Any]:
    """The memory as plain values, for JSON."""
    stages = [dataclasses.asdict(memory) | {"peak": memory.peak} for memory in memories]
    return {"stages": stages, "engine": engine}


def check_fit(config: RunConfig, memories: Sequence[StageMemory], engine: int | None, device_gib: float) -> None:
    """Refuse a run of which some rank needs more than ``device_gib`` GiB."""
    for memory in memories:
        engine_of_stage = (engine or 0) if memory.stage == 0 else 0
        needed = memory.peak + engine_of_stage
        if needed > device_gib * GIB:
            parts = {name: getattr(memory, name) for name in KINDS} | {"engine": engine_of_stage}
            largest = max(parts, key=lambda name: parts[name])
            unit, size = _unit(needed)
            raise ConfigurationError(
                f"--device-memory-gib {device_gib:g} is less than the {needed / size:.1f} {unit} of a rank of stage "
                f"{memory.stage}, of which {parts[largest] / size:.1f} are {_WORDS.get(largest, largest)}: "
                f"{_remedy(config, largest)}"
            )


def _unit(most: float) -> tuple[str, int]:
    """Name and bytes of the unit for numbers up to ``most`` bytes."""
    return ("GiB", GIB) if most > GIB else ("MiB", 2**20)


_WORDS = {
    "engine": "the engine's",
    "batch": "the rollout batch",
    "critic": "the critic's",
    "teacher": "the teacher's",
}


def _remedy(config: RunConfig, part: str) -> str:
    split = "raise --tensor-model-parallel-size or --pipeline-model-parallel-size"
    is_split = config.optimizer.use_distributed_optimizer
    is_full = config.compute.recompute_granularity == "full"
    offload = "" if config.critic is None or config.critic.critic_offload else "give --critic-offload, "
    activations = "raise --context-parallel-size" if is_full else "give --recompute-granularity full"
    remedies = {
        "optimizer": f"start more data-parallel ranks, or {split}" if is_split else "give --use-distributed-optimizer",
        "logits": "give --fused-linear-log-probs, or lower --micro-batch-size",
        "activations": f"lower --micro-batch-size, or {activations}",
        "reference": f"give --grpo-kl-beta 0, or {split}",
        "critic": f"{offload}use an --advantage-estimator that needs none, or {split}",
        "teacher": f"use a smaller teacher, --teacher-url, or {split}",
        "batch": "lower --grpo-prompts-per-step",
        "engine": "use --rollout-engine vllm-server or sglang-server",
    }
    return remedies.get(part, split)
