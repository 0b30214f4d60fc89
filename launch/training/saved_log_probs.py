"""Saving the trainer's log-probs of a rollout batch into its record (``--save-log-probs``)."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rc.launch.errors import RunError
from megatron_rc.launch.rollouts.collector import RolloutCollector
from megatron_rc.launch.rollouts.recorded import add_log_probs
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.batches.micro_batches import LocalBatch
from megatron_rc.launch.training.trainer import PreparedBatch, Trainer
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.collectives import all_reduce_sum, broadcast
from megatron_rc.parallel.groups import group_size


class SavedLogProbs:
    """Saves log π_old, and log π_θ of each token's last optimizer step if the two differ."""

    def __init__(
        self, config: RunConfig, groups: ParallelGroups, trainer: Trainer, collector: RolloutCollector
    ) -> None:
        self.config = config
        self.groups = groups
        self.trainer = trainer
        self.collector = collector
        self._current: Tensor | None = None
        if config.rollouts.save_log_probs and self._differ:
            trainer.keeps_log_probs = True

    @property
    def _differ(self) -> bool:
        """Whether π_θ of a batch's last step differs from π_old; its first step has π_θ = π_old."""
        return self.config.correction.corrects_in_loss or self.config.updates_per_rollout > 1

    def after_update(self, prepared: PreparedBatch | None, update: int, mini_batch: int) -> None:
        """Keep the step's log-probs; after the batch's last step, write them. ``prepared`` is None if left out.

        ``update`` counts earlier steps on the batch. Collectives, after the last step: one SUM over CP and one
        broadcast over PP of all tokens of the batch. RunError on the rank whose write failed.
        """
        if prepared is None or not self.config.rollouts.save_log_probs:
            return
        if self._differ:
            self._keep(prepared.batch, mini_batch, update)
        if update < self.config.updates_per_rollout - 1:
            return
        of_this_rank: dict[str, Tensor | None] = {}
        if not self.config.correction.corrects_in_loss:
            of_this_rank["old_log_probs"] = prepared.batch.local.train_log_probs
        if self._differ:
            of_this_rank["log_probs"] = self._current
        whole = {name: self._gathered(prepared.batch, values) for name, values in of_this_rank.items()}
        if self.collector.is_engine_rank:
            begun = self.trainer.iteration - self.config.updates_per_rollout
            try:
                add_log_probs(str(self.config.rollouts.save_rollouts), begun, self.collector.replica, whole)
            except (OSError, ValueError) as error:
                raise RunError(f"--save-log-probs: {error}") from error

    def _keep(self, batch: LocalBatch, mini_batch: int, update: int) -> None:
        """Copy the log-probs of the step's loss, on the last stage, to their places in the local batch."""
        # Empty the trainer's list, so that a step that fails before its pass does not find older ones.
        log_probs_of_step = self.trainer.kept_log_probs
        self.trainer.kept_log_probs = []
        if not self.groups.is_last_stage:
            return
        if update == 0 or self._current is None:
            self._current = torch.full_like(batch.local.rollout_log_probs, torch.nan)
        # A step that was left out kept fewer, or none.
        for cut, log_probs in zip(batch.cuts[mini_batch], log_probs_of_step, strict=False):
            self._current[cut.tokens] = log_probs

    def _gathered(self, batch: LocalBatch, values: Tensor | None) -> Tensor:
        """Return log-probs, [rows, s] in token positions, on the host of every rank; NaN at tokens without a score."""
        local = batch.local
        columns = self.config.training.seq_length
        rows = self.config.rollouts.sequences // self.config.data_parallel_size
        whole = torch.zeros(2, rows, columns, device=local.tokens.device)
        if values is not None:
            mask = local.response_mask
            places = local.layout.expand(batch.rows)[mask], local.positions.expand_as(mask)[mask]
            whole[0][places] = values[mask].float()
            whole[1][places] = 1.0
            whole = all_reduce_sum(whole, self.groups.cp)
        log_probs, counts = broadcast(whole, group_size(self.groups.pp) - 1, self.groups.pp)
        labels = torch.where(counts > 0, log_probs, torch.nan).cpu()
        return torch.nn.functional.pad(labels[:, :-1], (1, 0), value=torch.nan)
