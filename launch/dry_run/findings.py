"""The findings of a dry run, as text and as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_rc.launch.dry_run import collectives
from megatron_rc.launch.dry_run.batches import batch_numbers, layout_of, numbers_in_words, vocabulary_numbers
from megatron_rc.launch.dry_run.engine_share import engine_bytes, vllm_share
from megatron_rc.launch.dry_run.fake_ranks import modules_of_gpus, of_gpus
from megatron_rc.launch.dry_run.memory import StageMemory, stage_memories
from megatron_rc.launch.dry_run.memory_report import GIB, check_fit, memory_as_mapping, memory_in_words
from megatron_rc.launch.dry_run.places import places, places_in_words
from megatron_rc.launch.dry_run.theoretical import Theory, theoretical_memory
from megatron_rc.launch.dry_run.tracing import Call
from megatron_rc.launch.errors import ConfigurationError, flag, one_line
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.tasks import Task
from megatron_rc.launch.training.reporting.sources import in_one_line, newest_checkpoint, sources_of

_OPEN = (
    "torchrun's store and the ranks accept every connection without a password. Use a trusted network or a firewall; "
    "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the network interface of the ranks"
)


@dataclass(frozen=True)
class DryRun:
    """Findings about a run whose settings work."""

    config: RunConfig  # the run's settings
    ends: str  # the line about what ends a response; empty if none is sampled
    missing: Sequence[str]  # a sentence for each package that the run needs and this machine lacks
    machines: int  # number of machines
    memories: Sequence[StageMemory]  # memory of each pipeline stage
    engine: int | None  # bytes of the engine on the first rank of each replica; None if unknown
    theory: Theory | None  # memory by Megatron-LM's formulas; None if the installed Megatron-Core has none
    calls: Sequence[Call]  # collectives of the correction

    def as_mapping(self) -> dict[str, Any]:
        """The findings as plain values, for JSON."""
        return {
            "world_size": self.config.launch.world_size,
            "sources": self.sources,
            "layout": asdict(layout_of(self.config)) | {"ep": self.config.parallel.expert_model_parallel_size},
            "batch": batch_numbers(self.config),
            "vocabulary": vocabulary_numbers(self.config),
            "ends": self.ends,
            "memory": memory_as_mapping(self.memories, self.engine, self.theory),
            "collectives": collectives.as_mapping(self.config, self.calls),
            "notes": self.notes,
            "ranks": [place._asdict() for place in places(self.config)],
        }

    def in_words(self) -> list[str]:
        """The findings as lines of text."""
        parts = [
            [in_one_line(self.sources), *numbers_in_words(self.config), *[self.ends] * bool(self.ends)],
            memory_in_words(self.memories, self.engine, self.theory, vllm_share(self.config)),
            collectives.in_words(self.config, self.calls),
            places_in_words(places(self.config)),
            self.notes,
        ]
        return [line for part in parts if part for line in (*part, "")][:-1]

    @property
    def sources(self) -> dict[str, str]:
        """Where weights, tokenizer, task, rewards and responses would come from."""
        return sources_of(self.config, newest_checkpoint(self.config))

    @property
    def notes(self) -> list[str]:
        """Missing packages, settings that the memory leaves out, and open ports of several machines."""
        notes = [f"needed on the run's machines: {words}" for words in self.missing]
        modules = modules_of_gpus(self.config)
        names = [flag(name) for name in of_gpus(self.config)]
        names += [" ".join(["--recompute-modules", *modules])] * bool(modules)
        notes += [f"the memory does not count the effect of {', '.join(names)}"] * bool(names)
        return [*notes, *[f"{self.machines} machines: {_OPEN}"] * (self.machines > 1)]


def examine(
    config: RunConfig, task: Task, missing: Sequence[str], machines: int, device_memory_gib: float | None
) -> DryRun:
    """Measure the memory of each stage, and trace the collectives."""
    engine = engine_bytes(config, None if device_memory_gib is None else device_memory_gib * GIB)
    try:
        memories = stage_memories(config)
    except (ValueError, AssertionError, NotImplementedError) as error:  # Megatron checks its configs by all three
        raise ConfigurationError(f"Megatron-Core cannot build or run this model ({one_line(error)})") from error
    if device_memory_gib is not None:
        check_fit(config, memories, engine, device_memory_gib)
    theory, calls = theoretical_memory(config), collectives.correction_calls(config)
    ends = task.text.ends.words if config.rollouts.load_rollouts is None else ""
    return DryRun(config, ends, missing, machines, memories, engine, theory, calls)
