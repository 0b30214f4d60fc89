"""The dry run of a launch file and its flags: what it prints, and how it ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from megatron_rc.launch.dry_run.batches import batch_numbers, numbers_in_words, vocabulary_numbers
from megatron_rc.launch.dry_run.places import as_mappings, places, places_in_words
from megatron_rc.launch.errors import ConfigurationError, missing_packages_noted
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.run_config import RunConfig

USAGE_ERROR = 2


def dry_run(flags: Sequence[str], world_size: int, *, as_json: bool = False) -> int:
    """Say what this run would be, on standard output; its exit code: 0, or 2 where it would not run.

    Args:
        flags: of the run.
        world_size: number of its processes.
        as_json: one JSON object instead of words; an error is its only entry.
    """
    try:
        with missing_packages_noted() as missing:
            config, _ = configure(flags, world_size, folders=False, elsewhere=True)
        found = _found(config, missing)
    except ConfigurationError as error:
        if as_json:
            sys.stdout.write(json.dumps({"error": str(error)}) + "\n")
        sys.stderr.write(f"error: {error}\n")
        return USAGE_ERROR
    text = json.dumps(found, indent=2) if as_json else "\n".join(_in_words(config, found))
    sys.stdout.write(text + "\n")
    return 0


def _found(config: RunConfig, missing: Sequence[str]) -> dict[str, Any]:
    parallel = config.parallel
    return {
        "world_size": config.launch.world_size,
        "layout": {
            "tp": parallel.tensor_model_parallel_size,
            "cp": parallel.context_parallel_size,
            "pp": parallel.pipeline_model_parallel_size,
            "dp": config.data_parallel_size,
            "ep": parallel.expert_model_parallel_size,
        },
        "batch": batch_numbers(config),
        "vocabulary": vocabulary_numbers(config),
        "notes": [f"not looked for on this machine: {words}" for words in missing],
        "ranks": as_mappings(places(config)),
    }


def _in_words(config: RunConfig, found: dict[str, Any]) -> list[str]:
    return [*numbers_in_words(config), "", *places_in_words(places(config)), *_notes(found["notes"])]


def _notes(notes: Sequence[str]) -> list[str]:
    return ["", *notes] if notes else []
