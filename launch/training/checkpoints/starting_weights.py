"""Initial weights of the policy and its reference from a Hugging Face directory or a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from megatron.core.models.gpt import GPTModel

from megatron_rc.launch.distributed import agree
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.checkpoints.load import read_weights
from megatron_rc.launch.weights.converter import load_model
from megatron_rc.parallel import ParallelGroups


def start_from(
    folder: str | Path, flag: str, config: RunConfig, groups: ParallelGroups, chunks: Sequence[GPTModel]
) -> None:
    """Load these chunks' weights from a Hugging Face directory; AgreedError on every rank if it does not fit."""
    error = None
    try:
        load_model(chunks, config, groups, folder)
    except ValueError as problem:
        error = f"{flag}: {problem}"
    agree(config, error)


def reference_reader(config: RunConfig, groups: ParallelGroups) -> Callable[[Sequence[GPTModel]], None] | None:
    """Function that loads ``--ref-load`` or ``--ref-load-hf`` into chunks; None if neither is given."""
    reference = config.reference
    if reference.ref_load:
        return partial(read_weights, reference.ref_load, config, "--ref-load")
    if reference.ref_load_hf:
        return partial(start_from, reference.ref_load_hf, "--ref-load-hf", config, groups)
    return None
