"""Sync of weights from the trainer to the engines."""

from __future__ import annotations

from pathlib import Path

from megatron_rc.launch.distributed import largest_over_ranks
from megatron_rc.launch.rollouts.collector import RolloutCollector
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.checks.sync_check import SyncCheck
from megatron_rc.launch.training.reporting.metrics_file import METRICS_FILE, last_evaluation
from megatron_rc.launch.training.reporting.reporter import Reporter
from megatron_rc.launch.training.trainer import Trainer
from megatron_rc.parallel import ParallelGroups


class WeightSync:
    """Sends weights to the engines and checks that they arrived; evaluates them.

    Attributes:
        evaluated: step of the last evaluation; -1 if there was none.
    """

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        collector: RolloutCollector,
        groups: ParallelGroups,
        reporter: Reporter | None,
    ) -> None:
        self.config = config
        self.trainer = trainer
        self.collector = collector
        self.reporter = reporter
        self.check: SyncCheck | None = None
        if not config.rollouts.load_rollouts:
            self.check = SyncCheck(config, trainer.score, collector, groups)
        has_new_tokens = not config.rollouts.rollout_staleness or config.engine.rl_partial_rollouts
        trainer.batch_check.is_on = self.check is not None and has_new_tokens
        self._syncs = 0
        self.evaluated = self._last_evaluation()

    def _last_evaluation(self) -> int:
        """Step of the last evaluation in the run's metrics; a stopped run may have missed one that was due."""
        step = self.trainer.iteration
        if self.config.evaluation.eval_interval is None or not step:
            return -1
        launch = self.config.launch
        path = Path(launch.runs_dir) / launch.run_name / METRICS_FILE
        # Only rank 0 has the file.
        step_in_file = -1 if self.reporter is None else last_evaluation(path, step)
        (evaluated,) = largest_over_ranks(self.config, [step_in_file])
        return int(evaluated)

    @property
    def is_evaluation_due(self) -> bool:
        """Whether an interval or the run has ended since the last evaluation."""
        interval = self.config.evaluation.eval_interval
        step = self.trainer.iteration
        if interval is None or step == self.evaluated:
            return False
        return bool(step // interval > self.evaluated // interval or step >= self.config.training.train_iters)

    def sync(self) -> dict[str, float]:
        """Send the trainer's weights to the engines; returns metrics of the check, if one is due.

        No request is running meanwhile, unless ``--rl-partial-rollouts`` is given.
        """
        return self._send(self.trainer.iteration)

    def sync_sampling_weights(self) -> None:
        """Send the weights that sampled the rollouts which a checkpoint left unfinished."""
        sampling_weights = self.trainer.sampling_weights
        with sampling_weights.in_place_of(self.trainer.chunks):
            self._send(sampling_weights.version)

    def evaluate(self) -> None:
        """Evaluate the engines' weights, which are the trainer's."""
        step = self.trainer.iteration
        self.evaluated = step
        metrics = self.collector.evaluate(step)
        if self.reporter is not None:
            self.reporter.evaluation(step, metrics)

    def _send(self, version: int) -> dict[str, float]:
        """Send weights of ``version``; the check compares with the weights that the trainer has meanwhile."""
        was_restarted = self.collector.sync_weights(self.trainer.chunks, version)
        is_due = was_restarted or self._probe_is_due()
        self._syncs += 1
        if self.check is None or not is_due:
            return {}
        return self.check(self.trainer.iteration)

    def _probe_is_due(self) -> bool:
        """Whether a probe follows this sync: after the first sync, by interval, and if no rollout batch can be checked.

        Tokens of older weights cannot be checked, and no batch follows the last sync.
        """
        is_last = self.trainer.iteration >= self.config.training.train_iters
        if self.config.rollouts.rollout_staleness or is_last:
            return True
        interval = self.config.engine.sync_probe_interval
        if not interval:
            return self._syncs == 0
        return self._syncs % interval == 0
