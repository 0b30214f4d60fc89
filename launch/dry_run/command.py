"""The dry run as a command: examine the flags of a run, then print the findings."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron_rc.launch.dry_run.batches import batch_numbers, numbers_in_words, vocabulary_numbers
from megatron_rc.launch.dry_run.engine_share import engine_bytes, vllm_share
from megatron_rc.launch.dry_run.places import places, places_in_words
from megatron_rc.launch.errors import ConfigurationError, flag, missing_packages_noted
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.train_ppo import ignore_megatron_warnings

if TYPE_CHECKING:
    from megatron_rc.launch.dry_run.memory import StageMemory
    from megatron_rc.launch.dry_run.theoretical import Theory
    from megatron_rc.launch.dry_run.tracing import Call

_OPEN = (
    "torchrun's store and the ranks accept every connection without a password. Use a trusted network or a firewall; "
    "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the network interface of the ranks"
)


@dataclass(frozen=True)
class DryRun:
    """Findings about a run whose settings work."""

    config: RunConfig  # the run's settings
    missing: Sequence[str]  # a sentence for each package that the run needs and this machine lacks
    memories: Sequence[StageMemory]  # memory of each pipeline stage
    engine: int | None  # bytes of the engine on the first rank of each replica; None if unknown
    theory: Theory | None  # memory by Megatron-LM's formulas; None if the installed Megatron-Core has none
    calls: Sequence[Call]  # collectives of the correction
    machines: int = 1  # number of machines

    def as_mapping(self) -> dict[str, Any]:
        """The findings as plain values, for JSON."""
        from megatron_rc.launch.dry_run import collectives
        from megatron_rc.launch.dry_run.memory_report import memory_as_mapping

        parallel = self.config.parallel
        return {
            "world_size": self.config.launch.world_size,
            "layout": {
                "tp": parallel.tensor_model_parallel_size,
                "cp": parallel.context_parallel_size,
                "pp": parallel.pipeline_model_parallel_size,
                "dp": self.config.data_parallel_size,
                "ep": parallel.expert_model_parallel_size,
            },
            "batch": batch_numbers(self.config),
            "vocabulary": vocabulary_numbers(self.config),
            "memory": memory_as_mapping(self.memories, self.engine, self.theory),
            "collectives": collectives.as_mapping(self.config, self.calls),
            "notes": self.notes,
            "ranks": [place._asdict() for place in places(self.config)],
        }

    def in_words(self) -> list[str]:
        """The findings as lines of text."""
        from megatron_rc.launch.dry_run import collectives
        from megatron_rc.launch.dry_run.memory_report import memory_in_words

        parts = [
            numbers_in_words(self.config),
            memory_in_words(self.memories, self.engine, self.theory, vllm_share(self.config)),
            collectives.in_words(self.config, self.calls),
            places_in_words(places(self.config)),
            self.notes,
        ]
        return [line for part in parts if part for line in (*part, "")][:-1]

    @property
    def notes(self) -> list[str]:
        """Missing packages, settings that the memory leaves out, and open ports of several machines."""
        from megatron_rc.launch.dry_run.fake_ranks import modules_of_gpus, of_gpus

        notes = [f"needed on the run's machines: {words}" for words in self.missing]
        names = ", ".join(flag(name) for name in of_gpus(self.config))
        modules = modules_of_gpus(self.config)
        names += ", " * bool(names and modules) + " ".join(["--recompute-modules", *modules] * bool(modules))
        notes += [f"the memory does not count the effect of {names}"] * bool(names)
        return [*notes, *[f"{self.machines} machines: {_OPEN}"] * (self.machines > 1)]


def dry_run(
    flags: Sequence[str],
    world_size: int,
    *,
    machines: int = 1,
    as_json: bool = False,
    device_memory_gib: float | None = None,
) -> None:
    """Print the findings about a run; refuse it if a rank needs more than ``device_memory_gib``."""
    found = replace(examine(flags, world_size, device_memory_gib), machines=machines)
    text = json.dumps(found.as_mapping(), indent=2) if as_json else "\n".join(found.in_words())
    sys.stdout.write(text + "\n")


def examine(flags: Sequence[str], world_size: int, device_memory_gib: float | None = None) -> DryRun:
    """Check the settings, then measure the memory of each stage and trace the collectives."""
    ignore_megatron_warnings()
    with missing_packages_noted() as missing:
        config, _ = configure(flags, world_size, folders=False, elsewhere=True)
    from megatron_rc.launch.dry_run.collectives import correction_calls
    from megatron_rc.launch.dry_run.memory_report import GIB, check_fit
    from megatron_rc.launch.dry_run.theoretical import theoretical_memory

    if config.has_mamba:
        raise ConfigurationError(
            "a dry run cannot measure Mamba layers, whose kernels run on GPUs alone: start the run, or examine a "
            "--hybrid-layer-pattern without M"
        )
    engine = engine_bytes(config, None if device_memory_gib is None else device_memory_gib * GIB)
    memories = _memories(config)
    if device_memory_gib is not None:
        check_fit(config, memories, engine, device_memory_gib)
    return DryRun(config, missing, memories, engine, theoretical_memory(config), correction_calls(config))


def _memories(config: RunConfig) -> list[StageMemory]:
    from megatron_rc.launch.dry_run.memory import stage_memories

    try:
        return stage_memories(config)
    except (ValueError, AssertionError, NotImplementedError) as error:  # Megatron checks its configs by all three
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"Megatron-Core cannot build or run this model ({reason})") from error
    except (OverflowError, RuntimeError) as error:
        if "overflow" not in str(error).lower():
            raise
        raise ConfigurationError(
            "this model has tensors of more bytes than 64 bits count: lower --seq-length, --micro-batch-size or the "
            "widths of its layers"
        ) from error
