"""Collect a rollout batch: the engine of each data-parallel replica samples, scores and shares it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_rc.launch import phases
from megatron_rc.launch.distributed import AgreedError, agree, agree_and_share
from megatron_rc.launch.engines import RolloutEngine
from megatron_rc.launch.engines.registry import make_engine
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.rewards.rewarder import errors_file, source_of
from megatron_rc.launch.rollouts.broadcast import ReplicaBroadcast
from megatron_rc.launch.rollouts.evaluation import Graded, answers_of, metrics_of, sums_of, write_answers
from megatron_rc.launch.rollouts.prefetch import PrefetchedRollouts, check_versions
from megatron_rc.launch.rollouts.recorded import RecordedRollouts, write_rollouts
from megatron_rc.launch.rollouts.reward_metrics import gather_reward_metrics
from megatron_rc.launch.rollouts.sampler import RolloutSampler, SampledBatch
from megatron_rc.launch.rollouts.samples import bad_folder
from megatron_rc.launch.rollouts.waiting import EngineWaits
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.stopping import Interrupted, Stopped, StopRequest
from megatron_rc.launch.tasks import Task
from megatron_rc.launch.tasks.prompt_data.source import PromptData
from megatron_rc.launch.weights.converter import export_model
from megatron_rc.parallel.collectives import all_reduce_sum, every_text
from megatron_rc.parallel.groups import ParallelGroups, group_rank
from megatron_rc.records.rollout import RolloutBatch, SamplingParams

T = TypeVar("T")
_log = logging.getLogger("megatron_rc")


class WeightSync(Protocol):
    """Gives the engines the trainer's weights."""

    @property
    def is_wanted(self) -> bool:
        """Whether the engines need the weights although no rollout is due: an evaluation is."""
        ...

    def __call__(self, lap: Callable[[str], None]) -> None:
        """Send the weights now; ``lap`` is called with the name of each phase when it ends."""
        ...


class RolloutCollector:
    """Samples on the first rank of each replica (TP, CP and PP rank 0) and broadcasts to the rest of it.

    Args:
        config: of the run.
        task: prompts and rewards.
        groups: of this rank.
        engine: on the first rank of each replica; default there: the one that ``--rollout-engine`` names. Unused
            elsewhere, and with ``--load-rollouts``, which reads what another run sampled.
        request: to stop; it ends what the engines have under way.

    Attributes:
        is_window_over: nothing is sampled ahead of the last batch yet: weights of its step sample what follows.
        baselines: [responses of the replica], of the last batch, with the estimator of advantages that needs them: the
            reward of the most likely response to the prompt of each.
        reward_metrics: of the last batch, equal on all ranks; empty with ``--load-rollouts``.
    """

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        groups: ParallelGroups,
        engine: RolloutEngine | None = None,
        request: StopRequest | None = None,
    ) -> None:
        self.config, self.task, self.groups = config, task, groups
        self.device = config.launch.device
        self.replica = parallel_state.get_data_parallel_rank()
        self.is_engine_rank = group_rank(groups.tp) == group_rank(groups.cp) == group_rank(groups.pp) == 0
        self.request = request or StopRequest()
        self.waits = EngineWaits(config, self.replica, self.is_engine_rank)
        self.engine: RolloutEngine | None = None
        self.recorded: RecordedRollouts | None = None
        self.sampler: RolloutSampler | None = None
        self._on_engine_rank(lambda: self._start(engine), "the start of the engines")
        self.sampling = SamplingParams(temperature=config.rollouts.rl_default_temperature)
        is_recorded = config.rollouts.load_rollouts is not None
        self.broadcast = ReplicaBroadcast(groups, self.device, self.sampling, may_name_experts=is_recorded)
        self._rows = config.rollouts.sequences // config.data_parallel_size
        self._has_named_experts = False
        self._restarts = 0
        steps = 0 if config.rollouts.load_rollouts else config.rollouts.rollout_staleness or 0
        self.window = steps // config.updates_per_rollout
        self.is_window_over, self._window_end = True, -1
        elsewhere = getattr(self.engine, "is_elsewhere", False)
        self.reward_metrics: dict[str, float] = {}
        self.baselines: Tensor | None = None
        self._unscored = self._asked = 0
        self.prefetched = PrefetchedRollouts(self._obtain, in_background=self.window > 0 and elsewhere)

    def next_batch(self, step: int, weight_sync: WeightSync, lap: Callable[[str], None]) -> RolloutBatch:
        """The rollout batch of optimizer step ``step``, and new weights for the engine where it is their turn.

        Without ``--rollout-staleness``: new weights, then the batch. With it: the batch, which was sampled ahead; where
        it was the last such one, new weights, and orders for those after it (see
        :mod:`megatron_rc.launch.rollouts.prefetch`).

        Args:
            step: that the batch starts at.
            weight_sync: gives the engines the trainer's weights; they have no request under way then.
            lap: is told where ``rollout`` ends, and handed on.

        Raises:
            AgreedError: see :meth:`sync_weights` and :meth:`collect`; or no response of the batch could be scored.
        """
        is_fresh = step not in self.prefetched
        if is_fresh:
            weight_sync(lap)
        batch = self.collect(step)
        self._check_scored(step)
        lap("rollout")
        # Not by what is left of the orders: a run that goes on for longer takes up the window where this one ends.
        self.is_window_over = is_fresh or step == self._window_end
        if self.is_window_over:
            following = self._following(step)
            if not is_fresh and (following or weight_sync.is_wanted):
                weight_sync(lap)
            self._order(following, step)
        return batch

    def go_on(self, step: int, version: int, weight_sync: Callable[[], None]) -> None:
        """Have what was under way when a run ended sampled again.

        Args:
            step: that the run goes on at.
            version: step of the weights that the engines had; −1: it is not known.
            weight_sync: gives them these weights once more.
        """
        following = self._following(version) if version >= 0 else []
        if step in following:
            weight_sync()
            self._order([later for later in following if later >= step], version)

    def _order(self, steps: Sequence[int], version: int) -> None:
        self.prefetched.order(steps)
        self._window_end = version + self.window * self.config.updates_per_rollout

    def _following(self, version: int) -> list[int]:
        """The steps whose batches are sampled ahead by weights of one step."""
        steps = [version + number * self.config.updates_per_rollout for number in range(1, self.window + 1)]
        return [later for later in steps if later < self.config.training.train_iters]

    def close(self) -> None:
        """End the sampling that is under way, if any is, what scores, and the engine where it can be.

        Collectives: none.
        """
        if self.sampler is not None:
            self.sampler.close()
        self.prefetched.close()
        end = getattr(self.engine, "close", None)
        if end is not None:
            try:
                end()
            except Exception as problem:  # must not take the place of what ended the run
                _log.error("the rollout engine did not end cleanly: %s", problem)

    def sync_weights(self, chunks: Sequence[torch.nn.Module], version: int) -> bool:
        """Hand the trainer's weights to every engine, where there are any.

        Returns:
            True on every rank if an engine was started again since the last time.

        Raises:
            AgreedError: on every rank, if an engine refused them.
        """
        if self.config.rollouts.load_rollouts:
            return False
        phases.enter("the weight sync")
        error = None
        weights = export_model(chunks, self.config, self.groups)
        if self.engine is not None:
            try:
                self.engine.load_weights(weights, version)
            except Exception as problem:  # other ranks wait in the iterator for whatever it raises
                error = f"the rollout engine refused the weights of step {version}: {problem}"
        # The other ranks gather and send inside the iterator; an engine that failed must not leave them waiting.
        for _ in weights:
            pass
        self.waits.meet("the weight sync")
        before, self._restarts = self._restarts, getattr(self.engine, "restarts", 0)
        _, (was_restarted,) = agree_and_share(self.config, [float(self._restarts > before)], error)
        return was_restarted > 0

    def collect(self, step: int) -> RolloutBatch:
        """The replica's share of the rollout batch that starts at optimizer step ``step``, on all its ranks.

        Raises:
            AgreedError: on every rank, if sampling, scoring or the checks failed on any.
            Stopped: on every rank, if any was told to stop; so do :meth:`probe` and :meth:`evaluate`.
        """
        if not self.is_engine_rank:
            self.prefetched.forget(step)
        sampled = self._on_engine_rank(
            lambda: self._checked(self.prefetched.take(step), step), f"the rollout of step {step}"
        )
        shared = self.broadcast.batch(
            None if sampled is None else sampled.batch, self._rows, self.config.training.seq_length
        )
        if self.config.rollouts.load_rollouts is None:
            may_replace = self.config.rollouts.dynamic_sampling > 0
            self.reward_metrics = gather_reward_metrics(sampled, self.broadcast, self.groups, may_replace=may_replace)
            self._unscored += int(self.reward_metrics["reward/errors"])
            self._asked += self.config.rollouts.sequences
        if self.config.advantages.advantage_estimator == "remax":
            given = None if sampled is None else sampled.baselines
            self.baselines = self.broadcast.tensor(torch.zeros(self._rows) if given is None else given)
        if shared.routed_experts is not None and not self._has_named_experts:
            _log.warning("the rollouts name the experts of each token: they are carried to all ranks, and not used yet")
            self._has_named_experts = True
        return shared

    def probe(self, rows: int, longest: int, length: int) -> RolloutBatch:
        """A few responses to the replica's first prompts, the same prompts each time, on all its ranks.

        Args:
            rows: responses.
            longest: most tokens of each.
            length: columns of the batch.

        Raises:
            AgreedError: on every rank, if an engine failed on any.
        """
        what = "the check of the rollout engine"
        batch = self._on_engine_rank(lambda: self._required_sampler().probe(rows, longest, length), what)
        return self.broadcast.batch(batch, rows, length)

    def evaluate(self, step: int) -> dict[str, float]:
        """Mean reward, share of right answers and pass@k of responses to ``--eval-problems`` that are held out.

        The engine answers, with its own rounded weights. Equal on all ranks. The first answers are written down.
        Collectives: one broadcast in the replica, one SUM over DP; between the engines' ranks one gather of texts.

        Args:
            step: optimizer steps that lie behind.

        Raises:
            AgreedError: on every rank, if sampling or scoring failed on any, or the answers could not be written.
        """
        graded, answers = self._on_engine_rank(self._graded, "the evaluation") or ([], "")
        # The engines' ranks are one group together.
        written = every_text(answers, self.groups.dp) if self.is_engine_rank else []
        self._on_engine_rank(lambda: self._write(written, step), "the evaluation")
        samples = self.config.evaluation.eval_samples
        sums = all_reduce_sum(self.broadcast.tensor(sums_of(graded, samples)), self.groups.dp)
        return metrics_of(sums, samples)

    def unscored_in_words(self) -> str:
        """What the end of a run says of responses that could not be scored; equal on all ranks, empty without any."""
        if not self._unscored:
            return ""
        return f"{self._unscored} of {self._asked} responses could not be scored, see {errors_file(self.config)}"

    def _check_scored(self, step: int) -> None:
        """A batch without any score trains nothing: it ends the run on every rank alike."""
        errors, number = int(self.reward_metrics.get("reward/errors", 0)), self.config.rollouts.sequences
        dropped = int(self.reward_metrics.get("rollout/dropped_samples", 0))
        if 2 * dropped > number:
            raise AgreedError(
                f"the rollout of step {step} failed: {dropped} of its {number} responses were left out, more than "
                f"half, see {bad_folder(self.config)}: mend the engine"
            )
        if errors and errors + dropped == number:
            raise AgreedError(
                f"the rollout of step {step} failed: none of its {errors} responses could be scored by "
                f"{source_of(self.config).name}, see {errors_file(self.config)}: mend the rule"
            )

    def _graded(self) -> tuple[list[Graded], str]:
        """This replica's part of an evaluation, and what of it is written down."""
        graded = self._required_sampler().evaluate()
        return graded, answers_of(graded, self.config, self.replica)

    def _write(self, answers: Sequence[str | None], step: int) -> None:
        """The first replica writes down what all have answered."""
        if self.replica == 0:
            write_answers("".join(lines or "" for lines in answers), self.config, step)

    def data_metrics(self, step: int) -> dict[str, float]:
        """How much of the prompt data is used, the batch that starts at a step included; of a task there is nothing."""
        if self.config.rollouts.load_rollouts or not isinstance(self.task, PromptData):
            return {}
        batches = step // self.config.updates_per_rollout + 1
        return self.task.metrics(batches * self.config.rollouts.grpo_prompts_per_step)

    def _on_engine_rank(self, work: Callable[[], T], what: str) -> T | None:
        """The result there, None elsewhere; whatever it raises, every rank raises."""
        result, error = None, None
        if self.is_engine_rank:
            minutes = self.config.launch.rollout_wait_minutes
            late = f"it did not end in {minutes:g} minutes (--rollout-wait-minutes)"
            phases.enter(what, engine=self._engine_in_words())
            try:
                with self.request.interrupts(60 * minutes, late):
                    result = work()
            except Interrupted:
                pass  # the request says so
            except ConfigurationError as problem:  # names its flag: it is no failure of an engine
                error = str(problem)
            # Whatever an engine, a task or a reward raises, sys.exit() included, the other ranks must hear of it.
            except (Exception, SystemExit) as problem:
                error = f"{what} failed: {type(problem).__name__}: {problem}"
        phases.enter(what, waits=True)
        self.waits.meet(what)
        if agree(self.config, error, stop=self.request.signal is not None):
            raise Stopped
        return result

    def _start(self, engine: RolloutEngine | None) -> None:
        """What samples, or reads, for this replica."""
        config, rollouts = self.config, self.config.rollouts
        if rollouts.load_rollouts:
            self.recorded = RecordedRollouts(
                rollouts.load_rollouts, config.training.seq_length, rollouts.sequences, rollouts.grpo_prompts_per_step
            )
            return
        self.engine = engine or self._default_engine()
        self.sampler = RolloutSampler(config, self.task, self.engine, self.replica)

    def _engine_in_words(self) -> str:
        if self.config.rollouts.load_rollouts:
            return f"what reads {self.config.rollouts.load_rollouts}"
        urls = (self.config.engine.rollout_url or "").split(",")
        where = f" at {urls[self.replica % len(urls)]}" if urls[0] else ""
        return f"the engine {self.config.engine.rollout_engine}{where}"

    def _checked(self, sampled: SampledBatch, step: int) -> SampledBatch:
        """The records, if they can be trained on; written down where that is asked for."""
        batch = sampled.batch
        rollouts, updates = self.config.rollouts, self.config.updates_per_rollout
        batch.validate(
            vocab_size=self.config.model.vocab_size,
            allow_truncated_sampling=rollouts.allow_truncated_sampling,
            allow_bad_log_probs=self.config.correction.bad_log_probs != "error",
        )
        if rollouts.rollout_staleness is not None:
            # A run that was stopped within a recorded batch takes up the whole of it again.
            begun = step if self.recorded is None else step // updates * updates
            check_versions(batch, begun, rollouts.rollout_staleness)
        if rollouts.save_rollouts:
            write_rollouts(batch, rollouts.save_rollouts, step, self.replica)
        return sampled

    def _obtain(self, step: int) -> SampledBatch:
        """This replica's records, sampled or read; in the background on another thread."""
        config = self.config
        if self.recorded is None:
            return self._required_sampler().sample(step)
        batch = self.recorded.read(step // config.updates_per_rollout, self.replica, config.data_parallel_size)
        if batch.sampling.temperature != self.sampling.temperature:
            raise ValueError(
                f"the rollouts in {config.rollouts.load_rollouts} were sampled at temperature "
                f"{batch.sampling.temperature}, --rl-default-temperature is {self.sampling.temperature}: set it alike"
            )
        return SampledBatch(batch, rewards=None)

    def _required_sampler(self) -> RolloutSampler:
        if self.sampler is None:
            raise RuntimeError("an engine samples on the first rank of a replica only")
        return self.sampler

    def _default_engine(self) -> RolloutEngine:
        return make_engine(self.config, self.task.text.eos, self.task.text.pad, self.replica)
