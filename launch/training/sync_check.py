"""A few tokens that engine and trainer both score after every weight sync, so that stale weights end the run.

What it finds: weights that did not arrive (an output layer that an engine packed at its start and keeps), a cache of
prompts that older weights computed, log-probs of another temperature or shifted ones.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from megatron_rc.launch.distributed import agree
from megatron_rc.launch.rollouts.agreement import judge, lag_distances, tolerance
from megatron_rc.launch.rollouts.collector import RolloutCollector
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.micro_batches import cut_batch
from megatron_rc.launch.training.trainer import Trainer
from megatron_rc.parallel.collectives import all_reduce_sum, broadcast
from megatron_rc.parallel.groups import ParallelGroups, group_size

SEQUENCES, TOKENS = 8, 16


class SyncCheck:
    """Compares the engine of each replica with the trainer, on the first prompts of the task.

    They are the same prompts every time: an engine that keeps what older weights made of them is caught.

    Args:
        config: of the run.
        trainer: with the weights that the engine should have.
        collector: with the engine.
        groups: of this rank.
    """

    def __init__(
        self, config: RunConfig, trainer: Trainer, collector: RolloutCollector, groups: ParallelGroups
    ) -> None:
        self.config, self.trainer, self.collector, self.groups = config, trainer, collector, groups
        parallel, length = config.parallel, config.training.seq_length
        unit = config.training.micro_batch_size * parallel.micro_batch_unit
        self._rows = math.ceil(SEQUENCES / unit) * unit
        self._tokens = min(TOKENS, config.rollouts.max_response_length)
        # All ranks of an expert group need sequences of one length, and it must split like the trainer's.
        shortest = length - config.rollouts.max_response_length + self._tokens
        tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        pieces = math.lcm(2 * cp, tp * cp)
        self._length = min(length, math.ceil(shortest / pieces) * pieces)
        # One mini-batch of these rows.
        training = dataclasses.replace(config.training, global_batch_size=self._rows * config.data_parallel_size)
        self._cut_config = dataclasses.replace(config, training=training)

    def __call__(self) -> dict[str, float]:
        """Compare a few log-probs of the engines with the trainer's.

        Returns:
            ``rollout/sync_error``: mean |Δ log-prob| in nats, of the first replica on its ranks; equal in a replica.

        Collectives: those of a small rollout and a forward-only pass, one SUM over CP, one broadcast over PP.

        Raises:
            AgreedError: on every rank, if a replica's engine disagrees by more than rounding explains.
        """
        batch = self.collector.probe(self._rows, self._tokens, self._length)
        cut = cut_batch(batch, self._cut_config, self.groups)
        train, local = self.trainer.score(cut), cut.local
        sums = torch.zeros(6, dtype=torch.float64, device=batch.tokens.device)
        if train is not None:
            mask, rollout = local.response_mask, local.rollout_log_probs
            distance = torch.where(mask, (train.double() - rollout.double()).abs(), 0.0).sum()
            pairs = lag_distances(train, rollout, mask, local.positions)
            sums = torch.cat([torch.stack([distance, mask.sum().double()]), pairs])
        sums = broadcast(all_reduce_sum(sums, self.groups.cp), group_size(self.groups.pp) - 1, self.groups.pp)
        total, tokens, *by_lag = sums.tolist()
        mean = total / tokens
        agree(self.config, None if mean <= tolerance(self.config) else self._words(mean, by_lag))
        return {"rollout/sync_error": mean}

    def _words(self, mean: float, pairs: list[float]) -> str:
        configured, limit = self.config.rollouts.rl_default_temperature, tolerance(self.config)
        shift = [finding for finding in judge({configured: pairs}, configured, limit) if finding.about == "shift"]
        hint = "".join(f"; {finding.words}" for finding in shift if not finding.agrees)
        return (
            f"after the weight sync of step {self.trainer.iteration} the rollout engine and the trainer disagree by "
            f"{mean:.4f} nats a token, up to {limit} is rounding{hint}: does the engine keep older weights, or a cache "
            "that they filled? Compare the two with python -m megatron_rc.launch.check_engine; raise "
            "--rollout-check-tolerance only if the engine rounds more than --rollout-dtype says"
        )
