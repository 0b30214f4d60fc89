"""Sync of weights to servers without files: every rank that holds weights sends its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist

from megatron_rc.launch import phases
from megatron_rc.launch.distributed import agree
from megatron_rc.launch.engines.registry import make_sender, served_model
from megatron_rc.launch.engines.streamed import StreamedEngine
from megatron_rc.launch.engines.weight_sender import send_weights
from megatron_rc.launch.rollouts.engine_work import EngineWork
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.tasks import Text
from megatron_rc.launch.weights.export import export_own
from megatron_rc.launch.weights.units import ExpertGroups, Unit, names_of, own_weights, units_of
from megatron_rc.parallel.collectives import all_reduce_max
from megatron_rc.parallel.groups import ParallelGroups, group_device, group_rank, group_size

_PHASE = "the weight sync"
_log = logging.getLogger("megatron_rc")


# Rules of weights that a rank sends, or helps to gather, and the data-parallel replicas whose servers get them from it.
Share = tuple[list[Unit], list[int]]


class WeightTransfer:
    """Updates of the weights of a replica's server, in which all ranks of all replicas take part.

    The first rank of each pipeline stage sends the layers of its stage to its replica's server. Experts never leave the
    ranks that hold them for another rank: each expert-parallel rank sends its own, to the servers of all replicas whose
    first rank is in its expert-parallel group. ``engine`` is this replica's, on its first rank; None on the others.

    Collectives of the constructor: one MAX of a number for each rank over the expert-parallel group.
    """

    def __init__(
        self,
        config: RunConfig,
        groups: ParallelGroups,
        work: EngineWork,
        engine: StreamedEngine | None,
        text: Text,
    ) -> None:
        self.config, self.groups, self.work, self.engine = config, groups, work, engine
        self.experts = ExpertGroups.of_megatron()
        self.units = [unit for unit in units_of(config) if unit.is_here(groups, self.experts)]
        self.shares = self._find_shares()
        served = sorted({replica for _, replicas in self.shares for replica in replicas})
        self.senders = {replica: make_sender(config, replica, dist.get_rank()) for replica in served}
        self.model = served_model(config, text, work.replica) if served else None
        if engine is not None and work.replica == 0:
            if not config.launch.on_cpu:
                _log.warning("--rollout-weight-transfer has been run on CPUs alone, not yet on GPUs")
            if config.engine.rollout_engine == "sglang-server":
                _log.warning(
                    "--rollout-weight-transfer follows SGLang's source, and has not been run with its server yet"
                )

    def _find_shares(self) -> list[Share]:
        """Shares of this rank: the layers of its stage, then its experts."""
        is_first = group_rank(self.groups.tp) == group_rank(self.groups.cp) == 0
        replica = self.work.replica if is_first else -1
        ep, holds_whole = self.experts.ep, group_rank(self.experts.tp) == 0
        replicas = torch.full((group_size(ep),), -1, device=group_device(ep))
        replicas[group_rank(ep)] = replica
        served = [one for one in all_reduce_max(replicas, ep).tolist() if one >= 0 and holds_whole]
        served.sort(key=lambda one: (one - self.work.replica) % self.config.data_parallel_size)  # not all to one server
        return [
            ([unit for unit in self.units if unit.expert_rank is None], [replica] * is_first),
            ([unit for unit in self.units if unit.expert_rank is not None], served),
        ]

    def __call__(self, chunks: Sequence[torch.nn.Module], version: int) -> None:
        """Send the weights of all ranks at once.

        Raises AgreedError on every rank if a server or a sender failed; that server keeps the version ``incomplete``.

        Collectives: those of :func:`export_own`, three times those of :func:`agree`.
        """
        engine = cast(StreamedEngine, self.engine)  # on the ranks that work
        self.work.run(lambda: engine.begin_update(version), _PHASE)
        phases.enter(_PHASE)
        error, parameters = None, own_weights(chunks, self.units)
        for units, replicas in self.shares:
            weights = export_own(parameters, units, self.config, self.groups, self.experts)
            if self.model is not None and replicas and error is None:
                senders = [self.senders[replica] for replica in replicas]
                try:
                    send_weights(self.model.tensors(weights, names_of(units)), senders)
                except Exception as problem:  # all ranks raise it together below
                    error = f"the rollout engine refused the weights of step {version}: {problem}"
            # The iterator's collectives need every rank, so use it up even if the server failed.
            for _ in weights:
                pass
        self.work.meet(_PHASE)
        agree(self.config, error)
        self.work.run(lambda: engine.end_update(), _PHASE)

    def close(self) -> None:
        """Leave the groups, whose threads must not live until Python ends."""
        for sender in self.senders.values():
            sender.close()
