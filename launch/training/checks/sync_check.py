"""Probe after a weight sync: engine and trainer score a few tokens, if no rollout batch can be compared.

It finds weights that did not arrive (such as an output layer that an engine packed at its start and keeps), a prefix
cache made with older weights, and log-probs of another temperature or of shifted tokens.
:mod:`megatron_rc.launch.training.checks.batch_check` finds the same in the log-probs of rollout batches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from torch import Tensor

from megatron_rc.launch.distributed import largest_over_ranks
from megatron_rc.launch.rollouts.collector import RolloutCollector
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.batches.micro_batches import LocalBatch, cut_batch
from megatron_rc.launch.training.checks.batch_check import EngineDistance
from megatron_rc.parallel.groups import ParallelGroups

SEQUENCES = 8
TOKENS = 16


class SyncCheck:
    """Compares the engine of each replica with the trainer, on the first prompts of the task.

    The prompts are always the same, so that an outdated prefix cache is found. ``score`` returns the trainer's
    log-probs on the last stage, None on other stages.
    """

    def __init__(
        self,
        config: RunConfig,
        score: Callable[[LocalBatch], Tensor | None],
        collector: RolloutCollector,
        groups: ParallelGroups,
    ) -> None:
        self.config = config
        self.score = score
        self.collector = collector
        self.groups = groups
        parallel = config.parallel
        length = config.training.seq_length
        unit = config.training.micro_batch_size * parallel.micro_batch_unit
        self._rows = math.ceil(SEQUENCES / unit) * unit
        self._tokens = min(TOKENS, config.rollouts.max_response_length)
        # All ranks of an expert group need sequences of one length, which CP and SP can split.
        shortest = length - config.rollouts.max_response_length + self._tokens
        self._length = min(length, math.ceil(shortest / parallel.packing_unit) * parallel.packing_unit)
        # All rows are one mini-batch.
        training = dataclasses.replace(config.training, global_batch_size=self._rows * config.data_parallel_size)
        self._cut_config = dataclasses.replace(config, training=training)

    def __call__(self, step: int) -> dict[str, float]:
        """Compare the engines' log-probs of a few tokens with the trainer's, whose weights are of this step.

        Returns ``rollout/sync_error``, the mean |Δ log-prob| in nats of the worst replica, equal on all ranks; raises
        an error on every rank alike if it is more than rounding explains, see :meth:`EngineDistance.check`.

        Collectives: of a small rollout and a forward-only pass, and one MAX over all ranks.
        """
        batch = self.collector.probe(self._rows, self._tokens, self._length)
        cut = cut_batch(batch, self._cut_config, self.groups)
        distance = EngineDistance(self.config, self.groups)
        log_probs = self.score(cut)
        if log_probs is not None:
            distance.add(log_probs, cut.local)
        return distance.check(largest_over_ranks(self.config, distance.numbers), step)
