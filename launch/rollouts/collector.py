"""Collects rollout batches: each data-parallel replica's engine samples, and all its ranks get the batch."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_rc.launch import phases
from megatron_rc.launch.distributed import AgreedError, agree
from megatron_rc.launch.engines import RolloutEngine
from megatron_rc.launch.engines.registry import make_engine
from megatron_rc.launch.engines.streamed import StreamedEngine
from megatron_rc.launch.engines.vllm_engine import VllmEngine
from megatron_rc.launch.rewards.rewarder import errors_file, source_of
from megatron_rc.launch.rollouts.broadcast import ReplicaBroadcast
from megatron_rc.launch.rollouts.engine_work import EngineWork
from megatron_rc.launch.rollouts.evaluation import Graded, answers_of, metrics_of, sums_by_name, write_answers
from megatron_rc.launch.rollouts.open_rollouts import OpenRollouts
from megatron_rc.launch.rollouts.prefetch import PrefetchedRollouts, check_versions
from megatron_rc.launch.rollouts.recorded import RecordedRollouts, check_split_rollouts, write_rollouts
from megatron_rc.launch.rollouts.routed_experts import check_routed_experts
from megatron_rc.launch.rollouts.sampler import RolloutSampler, SampledBatch
from megatron_rc.launch.rollouts.samples import bad_folder
from megatron_rc.launch.rollouts.weight_transfer import WeightTransfer
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.stopping import StopRequest
from megatron_rc.launch.tasks import Task
from megatron_rc.launch.tasks.prompt_data.source import PromptData
from megatron_rc.launch.weights.converter import export_model
from megatron_rc.parallel.collectives import all_reduce_sum, every_text
from megatron_rc.parallel.groups import ParallelGroups
from megatron_rc.records.rollout import RolloutBatch, SamplingParams

_log = logging.getLogger("megatron_rc")


class WeightSync(Protocol):
    """Sends the trainer's weights to the engines."""

    @property
    def is_wanted(self) -> bool:
        """Whether the engines need the weights although no rollout follows, because an evaluation is due."""

    def __call__(self, lap: Callable[[str], None]) -> None:
        """Send the weights now; call ``lap`` with the name of each phase when it ends."""


class RolloutCollector:
    """Samples on the first rank of each replica (TP, CP and PP rank 0), and broadcasts to its other ranks."""

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        groups: ParallelGroups,
        engine: RolloutEngine | None = None,
        request: StopRequest | None = None,
        open_rollouts: OpenRollouts | None = None,
    ) -> None:
        self.config, self.task, self.groups, self.open_rollouts = config, task, groups, open_rollouts
        self.replica = parallel_state.get_data_parallel_rank()
        self.is_engine_rank = groups.is_first_of_replica
        self.work = EngineWork(config, self.replica, self.is_engine_rank, request or StopRequest())
        self.engine: RolloutEngine | None = None
        self.recorded: RecordedRollouts | None = None
        self.sampler: RolloutSampler | None = None
        self.work.run(lambda: self._start(engine), "the start of the engines")
        self.transfer: WeightTransfer | None = None  # None: weights go through files, or there is no engine
        if config.engine.rollout_weight_transfer != "files":
            streamed = cast("StreamedEngine | None", self.engine)
            self.transfer = WeightTransfer(config, groups, self.work, streamed, task.text)
        self.sampling = config.rollouts.sampling
        is_recorded = config.rollouts.load_rollouts is not None
        self.broadcast = ReplicaBroadcast(config, groups, self.sampling)
        self._rows = config.rollouts.sequences // config.data_parallel_size
        self.routed_experts: Tensor | None = None  # those of the newest batch as recorded, on the engine's rank
        self._said_experts, self._restarts = False, 0
        steps = 0 if is_recorded else config.rollouts.rollout_staleness or 0
        self.window = steps // config.updates_per_rollout
        self.is_partial = config.engine.rl_partial_rollouts and not is_recorded
        self.is_window_over = True  # whether the next batches are sampled by the weights of the last batch's step
        self._window_end = -1
        elsewhere = getattr(self.engine, "is_elsewhere", False)
        self.reward_metrics: dict[str, float] = {}  # of the last batch, equal on all ranks; empty with --load-rollouts
        self.baselines: Tensor | None = None  # [responses], see SampledBatch, on all ranks of the replica
        self._unscored = self._asked = 0
        threads = (self.window + 1 if self.is_partial else 1) if self.window and elsewhere else 0
        self.prefetched = PrefetchedRollouts(self._obtain, threads)

    def next_batch(self, step: int, weight_sync: WeightSync, lap: Callable[[str], None]) -> RolloutBatch:
        """The rollout batch that starts at optimizer step ``step``; also syncs the engines' weights when it is time.

        Without ``--rollout-staleness``: sync the weights, then sample. With it: take the batch that was sampled ahead.
        After the last one of a window, sync the weights and order the next window (see :mod:`prefetch`).
        ``weight_sync`` is called only while the engines have no open request, ``lap`` with the name of each phase when
        it ends. With ``--rl-partial-rollouts``: sync the weights while the engines sample, order the batches ahead,
        then take the batch.

        Raises AgreedError as :meth:`sync_weights` and :meth:`collect` do, or if no response could be scored.
        """
        if self.is_partial:
            if self.open_rollouts is not None:
                self.open_rollouts.forget_before(step)
            weight_sync(lap)
            steps = (step, *self._following(step))
            self.prefetched.order([later for later in steps if later not in self.prefetched])
            return self._collect_scored(step, lap)
        is_fresh = step not in self.prefetched
        if is_fresh:
            weight_sync(lap)
        batch = self._collect_scored(step, lap)
        if self.config.engine.rollout_colocate:
            self.work.run(lambda: cast(VllmEngine, self.engine).sleep(), "the end of the rollout")
        # Orders end at --train-iters, but a window does not: a longer run continues it after a resume.
        self.is_window_over = is_fresh or step == self._window_end
        if self.is_window_over:
            following = self._following(step)
            if not is_fresh and (following or weight_sync.is_wanted):
                weight_sync(lap)
            self._order(following, step)
        return batch

    def go_on(self, step: int, version: int, weight_sync: Callable[[], None]) -> None:
        """Order again, after a resume at ``step``, the batches that the ended run was sampling.

        ``version`` is the step of the weights that the engines had, −1 if unknown; ``weight_sync`` sends them again.
        """
        following = self._following(version) if version >= 0 else []
        if step in following:
            weight_sync()
            self._order([later for later in following if later >= step], version)

    def _order(self, steps: Sequence[int], version: int) -> None:
        self.prefetched.order(steps)
        self._window_end = version + self.window * self.config.updates_per_rollout

    def _following(self, version: int) -> list[int]:
        """Steps whose batches are sampled ahead by the weights of step ``version``."""
        steps = [version + number * self.config.updates_per_rollout for number in range(1, self.window + 1)]
        return [later for later in steps if later < self.config.training.train_iters]

    def close(self) -> None:
        """End the sampling, the scoring processes and the engine. Collectives: none."""
        if self.sampler is not None:
            self.sampler.close()
        self.prefetched.close()
        if self.transfer is not None:
            self.transfer.close()
        try:
            getattr(self.engine, "close", lambda: None)()
        except Exception as problem:  # must not hide the error that ended the run
            _log.error("the rollout engine did not end cleanly: %s", problem)

    def sync_weights(self, chunks: Sequence[torch.nn.Module], version: int) -> bool:
        """Send the trainer's weights to every engine; nothing with ``--load-rollouts``.

        Returns True, on every rank, if an engine was started again since the last time. Raises AgreedError, on every
        rank, if an engine refused the weights.
        """
        if self.config.rollouts.load_rollouts:
            return False
        if self.config.engine.rollout_colocate:
            torch.cuda.empty_cache()  # on all ranks, since vLLM may use the GPUs of several
        if self.transfer is not None:
            self.transfer(chunks, version)
            return False
        phases.enter("the weight sync", waits=self.engine is None)
        error = None
        weights = export_model(chunks, self.config, self.groups)
        if self.engine is not None:
            try:
                self.engine.load_weights(weights, version)
            except Exception as problem:  # all ranks raise it together below
                error = f"the rollout engine refused the weights of step {version}: {problem}"
        # The iterator's collectives need every rank, so use it up even if the engine failed.
        for _ in weights:
            pass
        self.work.meet("the weight sync")
        before, self._restarts = self._restarts, getattr(self.engine, "restarts", 0)
        (was_restarted,) = agree(self.config, error, [self._restarts > before])
        return was_restarted > 0

    def collect(self, step: int) -> RolloutBatch:
        """The replica's share of the rollout batch that starts at optimizer step ``step``, on all its ranks.

        Raises, on every rank, AgreedError if sampling, scoring or the checks failed on any, and Stopped if any was told
        to stop. :meth:`probe` and :meth:`evaluate` raise the same.
        """
        if not self.is_engine_rank:
            self.prefetched.forget(step)
        sampled = self.work.run(lambda: self._checked(self.prefetched.take(step), step), f"the rollout of step {step}")
        batch, baselines = (None, None) if sampled is None else (sampled.batch, sampled.baselines)
        shared = self.broadcast.batch(batch, self._rows, self.config.training.seq_length)
        if self.config.rollouts.load_rollouts is None:
            self.reward_metrics = self.broadcast.reward_metrics(sampled)
            self._unscored += int(self.reward_metrics["reward/errors"])
            self._asked += self.config.rollouts.sequences
        if self.config.advantages.advantage_estimator == "remax":
            self.baselines = self.broadcast.tensor(torch.zeros(self._rows) if baselines is None else baselines)
        self.routed_experts = None if batch is None else batch.routed_experts
        if self.routed_experts is not None and self.config.routing is None and not self._said_experts:
            _log.warning("the rollouts name the experts of each token: --moe-enable-routing-replay replays them")
            self._said_experts = True
        return shared

    def probe(self, rows: int, longest: int, length: int) -> RolloutBatch:
        """Answers to the replica's first prompts, the same at each call, on all its ranks; ``length``: columns."""
        what = "the check of the rollout engine"
        batch = self.work.run(lambda: cast(RolloutSampler, self.sampler).probe(rows, longest, length), what)
        return self.broadcast.batch(batch, rows, length)

    def evaluate(self, step: int) -> dict[str, float]:
        """Metrics of responses to the ``--eval-problems`` held-out problems; equal on all ranks.

        The engines answer, with their rounded weights. The answers to the first problems go to a file.

        Collectives: one broadcast in the replica and one SUM over DP; one gather of texts between the engines' ranks.
        """

        def answer() -> tuple[list[Graded], str]:
            graded = cast(RolloutSampler, self.sampler).evaluate()
            return graded, answers_of(graded, self.config, self.replica)

        graded, answers = self.work.run(answer, "the evaluation") or ([], "")
        # groups.dp of an engine's rank consists of the engines' ranks.
        written = every_text(answers, self.groups.dp) if self.is_engine_rank else []

        def write() -> None:
            if self.replica == 0:
                write_answers("".join(lines or "" for lines in written), self.config, step)

        self.work.run(write, "the evaluation")
        samples, names = self.config.evaluation.eval_samples, self.config.data.eval_names
        sums = all_reduce_sum(self.broadcast.tensor(sums_by_name(graded, samples, names)), self.groups.dp)
        return metrics_of(sums, samples, names)

    def unscored_in_words(self) -> str:
        """Sentence about the run's responses that could not be scored, equal on all ranks; empty if there are none."""
        if not self._unscored:
            return ""
        return f"{self._unscored} of {self._asked} responses could not be scored, see {errors_file(self.config)}"

    def _collect_scored(self, step: int, lap: Callable[[str], None]) -> RolloutBatch:
        """The batch of a step; AgreedError on every rank if no response has a score or more than half were dropped."""
        batch = self.collect(step)
        errors, number = int(self.reward_metrics.get("reward/errors", 0)), self.config.rollouts.sequences
        dropped = int(self.reward_metrics.get("rollout/dropped_samples", 0))
        if 2 * dropped > number:
            raise AgreedError(
                f"the rollout of step {step} failed: {dropped} of its {number} responses were left out, more than "
                f"half, see {bad_folder(self.config)}: repair the engine"
            )
        if errors and errors + dropped == number:
            raise AgreedError(
                f"the rollout of step {step} failed: none of its {errors} responses could be scored by "
                f"{source_of(self.config).name}, see {errors_file(self.config)}: repair the rule"
            )
        lap("rollout")
        return batch

    def data_metrics(self, step: int) -> dict[str, float]:
        """Metrics of ``--prompt-data``'s use up to and with the batch that starts at ``step``; empty without it."""
        if self.config.rollouts.load_rollouts or not isinstance(self.task, PromptData):
            return {}
        batches = step // self.config.updates_per_rollout + 1
        return self.task.metrics(batches * self.config.rollouts.grpo_prompts_per_step)

    def _start(self, engine: RolloutEngine | None) -> None:
        """Make this replica's sampler, or its reader of recorded rollouts."""
        config, rollouts = self.config, self.config.rollouts
        if rollouts.load_rollouts:
            self.recorded = RecordedRollouts(
                rollouts.load_rollouts, config.training.seq_length, rollouts.sequences, rollouts.grpo_prompts_per_step
            )
            return
        self.engine = engine or self._default_engine()
        self.sampler = RolloutSampler(config, self.task, self.engine, self.replica, self.open_rollouts)

    def _checked(self, sampled: SampledBatch, step: int) -> SampledBatch:
        """Check the records, write them if ``--save-rollouts`` is given, and sort the kept tokens for the trainer."""
        batch = sampled.batch
        rollouts, updates = self.config.rollouts, self.config.updates_per_rollout
        batch.validate(
            vocab_size=self.config.model.vocab_size,
            allow_truncated_sampling=rollouts.allow_truncated_sampling,
            allow_bad_log_probs=self.config.correction.bad_log_probs != "error",
        )
        if self.config.replays_rollouts:
            check_routed_experts(batch, self.config)
        if rollouts.replays_sampling and batch.support_ids is None:
            raise ValueError(
                "the rollouts were sampled from a part of the vocabulary, but do not have the tokens that the engine "
                "kept (support_ids): record them, sample from all tokens, or give --allow-truncated-sampling"
            )
        if rollouts.rollout_staleness is not None:
            # A run that resumes inside a recorded batch reads all of it again.
            begun = step if self.recorded is None else step // updates * updates
            check_versions(batch, begun, rollouts.rollout_staleness)
        if rollouts.save_rollouts:
            write_rollouts(batch, rollouts.save_rollouts, step, self.replica)
        return dataclasses.replace(sampled, batch=batch.with_sorted_support())

    def _obtain(self, step: int) -> SampledBatch:
        """Sample or read this replica's records; may run on a prefetching thread."""
        config = self.config
        if self.recorded is None:
            return cast(RolloutSampler, self.sampler).sample(step)
        batch = self.recorded.read(step // config.updates_per_rollout, self.replica, config.data_parallel_size)
        self._check_sampling(batch.sampling)
        check_split_rollouts(batch, config)
        return SampledBatch(batch)

    def _check_sampling(self, recorded: SamplingParams) -> None:
        """Check that records were sampled as the flags say, for the trainer computes the same distribution."""
        flags = {"temperature": "rl-default-temperature"}
        if not self.config.rollouts.allow_truncated_sampling:
            flags |= {name: f"rollout-{name.replace('_', '-')}" for name in ("top_p", "top_k", "min_p")}
        for name, flag in flags.items():
            was, now = getattr(recorded, name), getattr(self.sampling, name)
            if was != now:
                raise ValueError(
                    f"the rollouts in {self.config.rollouts.load_rollouts} were sampled at {name} {was}, --{flag} is "
                    f"{now}: set it alike"
                )

    def _default_engine(self) -> RolloutEngine:
        return make_engine(self.config, self.task.text, self.replica)
