"""Whether all ranks, and a run and the one that it goes on from, read the same prompts."""

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
        message = "--prompt-data and --eval-data hold other rows on some machines: copy them anew"
        agree_alike(config, config.data.rows_digest, message)


def compare_with_checkpoint(config: RunConfig, iteration: int) -> None:
    """Say that training prompts are others than in the run that wrote the checkpoint, or in another order.

    Args:
        config: the settings.
        iteration: of the checkpoint; 0: there is none.
    """
    load, digest = config.checkpoints.load, config.data.order_digest
    if not load or not iteration:
        return
    settings = settings_beside(iteration_folder(load, iteration))
    seed = (settings.get("training") or {}).get("seed")
    if digest is None and seed not in (None, config.training.seed):
        _log.warning(
            "--seed %d is not that of checkpoint %d, %d: from here on prompts and samples are others than they would "
            "have been",
            *(config.training.seed, iteration, seed),
        )
    kept = (settings.get("data") or {}).get("order_digest")
    if digest is not None and kept not in (None, digest):
        _log.warning(
            "--prompt-data (its rows, its weights, or which of them fit) or --seed is not that of checkpoint %d: from "
            "here on prompts come in another order than they would have",
            iteration,
        )
