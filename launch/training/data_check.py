"""Checks that all ranks, and a run and its checkpoint, read the same prompts."""

from __future__ import annotations

import logging

from megatron_rc.launch.distributed import agree_alike
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.checkpoints.folders import iteration_folder
from megatron_rc.launch.training.checkpoints.settings import settings_beside

_log = logging.getLogger("megatron_rc")


def check_data(config: RunConfig) -> None:
    """Raise AgreedError unless the files of all ranks have the same rows.

    Collectives: with ``--prompt-data`` one all-reduce of two numbers over all ranks, else none.
    """
    if config.data.rows_digest is not None:
        message = "the files of --prompt-data and --eval-data differ between machines: copy them again"
        agree_alike(config, config.data.rows_digest, message)


def compare_with_checkpoint(config: RunConfig, iteration: int) -> None:
    """Warn if the training prompts or their order differ from the run that wrote the checkpoint of this step."""
    load, digest = config.checkpoints.load, config.data.order_digest
    if not load or not iteration:
        return
    settings = settings_beside(iteration_folder(load, iteration))
    seed = (settings.get("training") or {}).get("seed")
    if digest is None and seed not in (None, config.training.seed):
        _log.warning(
            "--seed %d differs from the seed of checkpoint %d, which is %d: prompts and samples will differ from an "
            "uninterrupted run",
            *(config.training.seed, iteration, seed),
        )
    kept = (settings.get("data") or {}).get("order_digest")
    if digest is not None and kept not in (None, digest):
        _log.warning(
            "--prompt-data (rows, weights or lengths that fit) or --seed differs from checkpoint %d: prompts will come "
            "in another order than in an uninterrupted run",
            iteration,
        )
