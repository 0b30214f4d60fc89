"""The findings of a dry run, as text and as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rc.launch.dry_run.batches import batch_numbers, layout_of, numbers_in_words, vocabulary_numbers
from megatron_rc.launch.dry_run.engine_share import engine_bytes, vllm_share
from megatron_rc.launch.dry_run.memory import StageMemory, stage_memories
from megatron_rc.launch.dry_run.memory_report import GIB, check_fit, memory_as_mapping, memory_in_words
from megatron_rc.launch.dry_run.places import places, places_in_words
from megatron_rc.launch.errors import flag
from megatron_rc.launch.flags.checks.megatron import MODULES_OF_TRANSFORMER_ENGINE
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.tasks import Task
from megatron_rc.launch.training.reporting.sources import in_one_line, newest_checkpoint, sources_of

_OPEN = (
    "torchrun's store and the ranks accept every connection without a password. Use a trusted network or a firewall; "
    "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the network interface of the ranks"
)
# Megatron's fields that only its GPU code uses, or that fuse operations, by the beginnings of their names.
_UNCOUNTED = (
    "attention_backend",
    "batch_invariant_mode",
    "batch_p2p",
    "cpu_offloading",
    "cuda_graph",
    "defer_embedding_wgrad_compute",
    "enable_cuda_graph",
    "external_cuda_graph",
    "fine_grained_activation_offloading",
    "fp4",
    "fp8",
    "moe_deepep",
    "moe_enable_deepep",
    "moe_flex_dispatcher",
    "moe_grouped_gemm",
    "moe_hybridep",
    "overlap",
    "pipeline_model_parallel_comm_backend",
    "tp_comm",
    "use_te_",
    "wgrad_deferral_limit",
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

    def as_mapping(self) -> dict[str, Any]:
        """The findings as plain values, for JSON."""
        return {
            "world_size": self.config.launch.world_size,
            "sources": self.sources,
            "layout": layout_of(self.config) | {"ep": self.config.parallel.expert_model_parallel_size},
            "batch": batch_numbers(self.config),
            "vocabulary": vocabulary_numbers(self.config),
            "ends": self.ends,
            "memory": memory_as_mapping(self.memories, self.engine),
            "notes": self.notes,
            "ranks": [place._asdict() for place in places(self.config)],
        }

    def in_words(self) -> list[str]:
        """The findings as lines of text, with an empty line between the parts."""
        settings = [in_one_line(self.sources), *numbers_in_words(self.config)]
        if self.ends:
            settings.append(self.ends)
        parts = [
            settings,
            memory_in_words(self.memories, self.engine, vllm_share(self.config)),
            places_in_words(places(self.config)),
            self.notes,
        ]
        return "\n\n".join("\n".join(part) for part in parts if part).split("\n")

    @property
    def sources(self) -> dict[str, str]:
        """Where weights, tokenizer, task, rewards and responses would come from."""
        return sources_of(self.config, newest_checkpoint(self.config))

    @property
    def notes(self) -> list[str]:
        """Missing packages, settings that the memory leaves out, and open ports of several machines."""
        notes = [f"needed on the run's machines: {sentence}" for sentence in self.missing]
        uncounted = self._uncounted_settings()
        if uncounted:
            notes.append(f"the memory does not count the effect of {', '.join(uncounted)}")
        if self.machines > 1:
            notes.append(f"{self.machines} machines: {_OPEN}")
        return notes

    def _uncounted_settings(self) -> list[str]:
        """Given flags that change the memory on a GPU, and that the formulas leave out."""
        fields = self.config.megatron.given
        flags = [flag(name) for name in fields if name.startswith(_UNCOUNTED) or "fus" in name]
        modules = [name for name in fields.get("recompute_modules", ()) if name in MODULES_OF_TRANSFORMER_ENGINE]
        if modules:
            flags.append(" ".join(["--recompute-modules", *modules]))
        return flags


def examine(
    config: RunConfig, task: Task, missing: Sequence[str], machines: int, device_memory_gib: float | None
) -> DryRun:
    """Compute the memory of each stage, and compare it with a device.

    Raises:
        ConfigurationError: a rank needs more than ``device_memory_gib``.
    """
    engine = engine_bytes(config, None if device_memory_gib is None else device_memory_gib * GIB)
    memories = stage_memories(config)
    if device_memory_gib is not None:
        check_fit(config, memories, engine, device_memory_gib)
    return DryRun(
        config=config,
        ends=task.text.ends.words if config.rollouts.load_rollouts is None else "",
        missing=missing,
        machines=machines,
        memories=memories,
        engine=engine,
    )
