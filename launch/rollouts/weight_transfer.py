"""Sync of weights to servers over process groups: every pipeline stage of a replica sends its own weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from megatron_rc.launch import phases
from megatron_rc.launch.distributed import agree
from megatron_rc.launch.engines.registry import make_sender
from megatron_rc.launch.engines.streamed import StreamedEngine
from megatron_rc.launch.engines.weight_sender import WeightSender
from megatron_rc.launch.rollouts.engine_work import EngineWork
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.weights.converter import export_model
from megatron_rc.launch.weights.units import names_of
from megatron_rc.parallel.groups import ParallelGroups, group_rank

_PHASE = "the weight sync"
_log = logging.getLogger("megatron_rc")


class WeightTransfer:
    """Updates of the weights of a replica's server, in which all ranks of all replicas take part.

    Args:
        config: settings of the run.
        groups: process groups of this rank.
        work: runs work on the engines' ranks.
        engine: this replica's engine, on its first rank; None on the others.
        eos_token_id: token that ends a response.
    """

    def __init__(
        self,
        config: RunConfig,
        groups: ParallelGroups,
        work: EngineWork,
        engine: StreamedEngine | None,
        eos_token_id: int,
    ) -> None:
        self.config, self.groups, self.work, self.engine = config, groups, work, engine
        stage = group_rank(groups.pp)
        self.sender: WeightSender | None = None
        if group_rank(groups.tp) == group_rank(groups.cp) == 0:
            self.sender, self.model = make_sender(config, eos_token_id, work.replica, stage)
            self.names = names_of(config, stage)
        if engine is not None and work.replica == 0:
            if config.engine.rollout_weight_transfer == "nccl":
                _log.warning("--rollout-weight-transfer nccl has been run over gloo alone, not yet on GPUs")
            if config.engine.rollout_engine == "sglang-server":
                _log.warning(
                    "--rollout-weight-transfer follows SGLang's source, and has not been run with its server yet"
                )

    def __call__(self, chunks: Sequence[torch.nn.Module], version: int) -> None:
        """Send the weights of all stages at once.

        Collectives: those of :func:`export_weights`, three times those of :func:`agree`.

        Raises:
            AgreedError: on every rank, if a server or a sender failed; that server keeps the version ``incomplete``.
        """
        self.work.run(lambda: self._of_engine().begin_update(version), _PHASE)
        phases.enter(_PHASE)
        weights = export_model(chunks, self.config, self.groups, by_stage=True)
        error = None
        if self.sender is not None:
            try:
                self.sender.send(self.model.tensors(weights, self.names))
            except Exception as problem:  # all ranks raise it together below
                error = f"the rollout engine refused the weights of step {version}: {problem}"
        # The iterator's collectives need every rank, so use it up even if the server failed.
        for _ in weights:
            pass
        self.work.meet(_PHASE)
        agree(self.config, error)
        self.work.run(lambda: self._of_engine().end_update(), _PHASE)

    def close(self) -> None:
        """Leave the groups, whose threads must not live until Python ends."""
        if self.sender is not None:
            self.sender.close()

    def _of_engine(self) -> StreamedEngine:
        if self.engine is None:
            raise RuntimeError("only the first rank of a replica has an engine")
        return self.engine
