"""Syncs of the trainer's weights to the engines of all replicas, in which all ranks take part."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.launch import phases
from megatron_rc.launch.distributed import largest_over_ranks
from megatron_rc.launch.engines import EngineError, RolloutEngine
from megatron_rc.launch.engines.registry import make_sender, served_model
from megatron_rc.launch.engines.server import ServerEngine
from megatron_rc.launch.engines.weight_sender import send_weights
from megatron_rc.launch.rollouts.engine_work import EngineWork
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.tasks import Text
from megatron_rc.launch.weights.converter import export_model
from megatron_rc.launch.weights.export import export_own
from megatron_rc.launch.weights.units import ExpertGroups, Unit, names_of, own_weights, units_of
from megatron_rc.parallel.collectives import all_reduce_max
from megatron_rc.parallel.groups import ParallelGroups, group_device, group_rank, group_size

_PHASE = "the weight sync"
_log = logging.getLogger("megatron_rc")


class WholeModelPublisher:
    """Gathers all weights on the rank with the replica's engine, one at a time; the engine takes them from there.

    This is the way of an engine in this process, and of servers that read files. ``engine`` is None on other ranks.
    """

    def __init__(
        self, config: RunConfig, groups: ParallelGroups, work: EngineWork, engine: RolloutEngine | None
    ) -> None:
        self.config = config
        self.groups = groups
        self.work = work
        self.engine = engine
        self._restarts = 0  # of the engine, at the last sync

    def __call__(self, chunks: Sequence[torch.nn.Module], version: int) -> bool:
        """Send the weights; return True, on every rank, if an engine was started again since the last time.

        Collectives: those of :func:`export_model`, and one MAX of one number over all ranks.

        Raises:
            EngineError: on the engine's rank: the engine refused the weights.
        """
        phases.enter(_PHASE)
        weights = export_model(chunks, self.config, self.groups)
        if self.engine is not None:
            try:
                self.engine.load_weights(weights, version)
            except Exception as problem:
                raise _refused(version, problem) from problem
        _use_up(weights)
        self.work.meet(_PHASE)
        restarts = getattr(self.engine, "restarts", 0)
        (was_restarted,) = largest_over_ranks(self.config, [restarts > self._restarts])
        self._restarts = restarts
        return was_restarted > 0

    def close(self) -> None:
        """Do nothing: there are no groups."""


@dataclass(frozen=True)
class Share:
    """A part of the model that one rank sends, or helps to gather."""

    units: list[Unit]  # rules of its weights
    replicas: list[int]  # data-parallel replicas whose servers get it from this rank; empty: it helps to gather


class PartsPublisher:
    """Lets every rank that holds weights send them to the servers directly, over process groups or through memory.

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
        engine: ServerEngine | None,
        text: Text,
    ) -> None:
        self.config = config
        self.groups = groups
        self.work = work
        self.engine = engine
        self.experts = ExpertGroups.of_megatron()
        self.units = [unit for unit in units_of(config) if unit.is_here(groups, self.experts)]
        self.shares = self._find_shares()
        served = sorted({replica for share in self.shares for replica in share.replicas})
        self.senders = {replica: make_sender(config, replica, dist.get_rank()) for replica in served}
        self.model = served_model(config, text, work.replica) if served else None
        if engine is not None and work.replica == 0:
            self._say_what_was_not_run()

    def _say_what_was_not_run(self) -> None:
        if not self.config.launch.on_cpu:
            _log.warning("--rollout-weight-transfer has been run on CPUs alone, not yet on GPUs")
        if self.config.engine.rollout_engine == "sglang-server":
            _log.warning("--rollout-weight-transfer follows SGLang's source, and has not been run with its server yet")

    def _find_shares(self) -> list[Share]:
        """Shares of this rank: the layers of its stage, then its experts."""
        is_first_of_stage = group_rank(self.groups.tp) == group_rank(self.groups.cp) == 0
        replicas_of_layers = [self.work.replica] if is_first_of_stage else []

        # Each rank of the expert-parallel group names the replica whose server it is the first to serve, or none.
        ep = self.experts.ep
        named = torch.full((group_size(ep),), -1, device=group_device(ep))
        if is_first_of_stage:
            named[group_rank(ep)] = self.work.replica
        replicas_of_group = [replica for replica in all_reduce_max(named, ep).tolist() if replica >= 0]
        holds_whole_experts = group_rank(self.experts.tp) == 0
        replicas_of_experts = replicas_of_group if holds_whole_experts else []
        # Each rank begins with another server, so that they are not all sent to one at a time.
        replicas_of_experts.sort(key=lambda replica: (replica - self.work.replica) % self.config.data_parallel_size)

        layers = [unit for unit in self.units if unit.expert_rank is None]
        experts = [unit for unit in self.units if unit.expert_rank is not None]
        return [Share(layers, replicas_of_layers), Share(experts, replicas_of_experts)]

    def __call__(self, chunks: Sequence[torch.nn.Module], version: int) -> bool:
        """Send the weights of all ranks at once; return False: a server that was started again ends the run.

        Collectives: those of :func:`export_own`, one MAX of one number over all ranks, and those of
        :meth:`EngineWork.run` twice.

        Raises:
            EngineError: on the rank whose server or sender failed; that server keeps the version ``incomplete``.
        """
        engine = cast(ServerEngine, self.engine)  # on the ranks that work
        self.work.run(lambda: engine.begin_update(version), _PHASE)
        phases.enter(_PHASE)
        parameters = own_weights(chunks, self.units)
        for share in self.shares:
            weights = export_own(parameters, share.units, self.config, self.groups, self.experts)
            if self.model is not None and share.replicas:
                senders = [self.senders[replica] for replica in share.replicas]
                try:
                    send_weights(self.model.tensors(weights, names_of(share.units)), senders)
                except Exception as problem:
                    raise _refused(version, problem) from problem
            _use_up(weights)
        self.work.meet(_PHASE)
        # Every part must be there before a server samples: if a rank has failed, the others wait here and are ended.
        largest_over_ranks(self.config, [0.0])
        self.work.run(lambda: engine.end_update(), _PHASE)
        return False

    def close(self) -> None:
        """Leave the groups, whose threads must not live until Python ends."""
        for sender in self.senders.values():
            sender.close()


def _refused(version: int, problem: Exception) -> EngineError:
    return EngineError(f"the rollout engine refused the weights of step {version}: {problem}")


def _use_up(weights: Iterator[tuple[str, Tensor]]) -> None:
    """Take the weights that are left: the iterator's collectives need every rank, also those that send nothing."""
    for _ in weights:
        pass
