"""Collects rollout batches: each data-parallel replica's engine samples, and all its ranks get the batch."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_rc.launch.engines import RolloutEngine
from megatron_rc.launch.engines.registry import make_engine
from megatron_rc.launch.engines.server import ServerEngine
from megatron_rc.launch.engines.vllm_engine import VllmEngine
from megatron_rc.launch.errors import RunError
from megatron_rc.launch.rewards.rewarder import errors_file, source_of
from megatron_rc.launch.rollouts.broadcast import ReplicaBroadcast
from megatron_rc.launch.rollouts.engine_work import EngineWork
from megatron_rc.launch.rollouts.evaluation import answers_of, metrics_of, sums_by_name, write_answers
from megatron_rc.launch.rollouts.excluded import Excluded
from megatron_rc.launch.rollouts.open_rollouts import OpenRollouts
from megatron_rc.launch.rollouts.publishers import PartsPublisher, WholeModelPublisher
from megatron_rc.launch.rollouts.recorded import RecordedRollouts, write_rollouts
from megatron_rc.launch.rollouts.routed_experts import check_routed_experts
from megatron_rc.launch.rollouts.sampler import RolloutSampler, SampledBatch, TeacherInput
from megatron_rc.launch.rollouts.samples import bad_folder
from megatron_rc.launch.rollouts.scheduler import RolloutScheduler
from megatron_rc.launch.rollouts.teacher_prompts import teacher_rows
from megatron_rc.launch.rollouts.teacher_scores import RecordedTeacher, ServedTeacher, make_teacher
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.stopping import StopRequest
from megatron_rc.launch.tasks import Task
from megatron_rc.launch.tasks.prompt_data.source import PromptData
from megatron_rc.parallel.collectives import all_reduce_sum, every_text
from megatron_rc.parallel.groups import ParallelGroups
from megatron_rc.records.rollout import RolloutBatch

_log = logging.getLogger("megatron_rc")


@dataclass(frozen=True)
class CollectedBatch:
    """A replica's share of a rollout batch, on all its ranks, with numbers of the whole batch."""

    batch: RolloutBatch  # the records, with the parts that this rank needs
    # Metrics of the rewards and the responses, equal on all ranks; empty with ``--load-rollouts``.
    reward_metrics: dict[str, float]
    # Responses that were started for the batch on any replica and are not in it, equal on all ranks; None with
    # ``--load-rollouts``: unknown.
    excluded: list[Excluded] | None
    baselines: Tensor | None  # [responses], see SampledBatch
    teacher_input: TeacherInput | None  # see SampledBatch
    # Experts of the batch as the engine or the records gave them, on the engine's rank; None on other ranks.
    routed_experts: Tensor | None


class RolloutCollector:
    """Samples on the first rank of each replica (TP, CP and PP rank 0), and broadcasts to its other ranks.

    An engine that fails ends its rank with an EngineError, see :class:`EngineWork`; all ranks raise Stopped together
    if one was told to stop.

    Attributes:
        engine: this replica's engine; None on other ranks, and with ``--load-rollouts``.
        open_rollouts: responses of the batches under way, for checkpoints; None without ``--rl-partial-rollouts``.
    """

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        groups: ParallelGroups,
        engine: RolloutEngine | None = None,
        request: StopRequest | None = None,
        open_rollouts: OpenRollouts | None = None,
    ) -> None:
        self.config = config
        self.task = task
        self.groups = groups
        self.open_rollouts = open_rollouts
        self.replica = parallel_state.get_data_parallel_rank()
        self.is_engine_rank = groups.is_first_of_replica
        self.engine: RolloutEngine | None = None
        self.recorded: RecordedRollouts | None = None
        self.sampler: RolloutSampler | None = None
        self._teacher: ServedTeacher | RecordedTeacher | None = None
        self._said_experts = False
        self._num_unscored = 0
        self._num_responses = 0

        self.work = EngineWork(config, self.replica, self.is_engine_rank, request or StopRequest())
        self.work.run(lambda: self._start(engine), "the start of the engines")
        self.publisher: WholeModelPublisher | PartsPublisher
        if config.engine.rollout_weight_transfer == "files":
            self.publisher = WholeModelPublisher(config, groups, self.work, self.engine)
        else:
            server = cast("ServerEngine | None", self.engine)
            self.publisher = PartsPublisher(config, groups, self.work, server, task.text)
        self.broadcast = ReplicaBroadcast(config, groups)
        is_elsewhere = getattr(self.engine, "is_elsewhere", False)
        self.scheduler = RolloutScheduler(config, self._obtain, is_elsewhere=is_elsewhere)

    def _start(self, engine: RolloutEngine | None) -> None:
        """Make this replica's sampler, or its reader of recorded rollouts, and its teacher if that is no model here."""
        rollouts = self.config.rollouts
        self._teacher = make_teacher(self.config, self.task.text, self.replica)
        if rollouts.load_rollouts:
            length = self.config.training.seq_length
            self.recorded = RecordedRollouts(
                rollouts.load_rollouts, length, rollouts.sequences, rollouts.grpo_prompts_per_step
            )
            return
        self.engine = engine or make_engine(self.config, self.task.text, self.replica)
        self.sampler = RolloutSampler(self.config, self.task, self.engine, self.replica, self.open_rollouts)

    def sync_weights(self, chunks: Sequence[torch.nn.Module], version: int) -> bool:
        """Send the trainer's weights to every engine; nothing with ``--load-rollouts``.

        Returns True, on every rank, if an engine was started again since the last time.
        """
        if self.config.rollouts.load_rollouts:
            return False
        if self.config.engine.rollout_colocate:
            torch.cuda.empty_cache()  # on all ranks, since vLLM may use the GPUs of several
        return self.publisher(chunks, version)

    def collect(self, step: int) -> CollectedBatch:
        """Collect the rollout batch that starts at optimizer step ``step``: the replica's share, on all its ranks.

        With ``--rollout-colocate`` the engine sleeps afterwards.

        Collectives: those of :class:`EngineWork` and :class:`ReplicaBroadcast`.
        """
        if self.open_rollouts is not None:
            self.open_rollouts.forget_before(step)
        if not self.is_engine_rank:
            self.scheduler.forget(step)
        what = f"the rollout of step {step}"
        sampled = self.work.run(lambda: self._scored(self._checked(self.scheduler.take(step), step), step), what)

        batch = None if sampled is None else sampled.batch
        shared = self.broadcast.batch(batch)
        reward_metrics: dict[str, float] = {}
        excluded = None
        if self.config.rollouts.load_rollouts is None:
            reward_metrics, excluded = self.broadcast.summary(sampled)
            self._num_unscored += int(reward_metrics["reward/errors"])
            self._num_responses += self.config.rollouts.sequences
        baselines = None
        if self.config.advantages.advantage_estimator == "remax":
            local_baselines = None if sampled is None else sampled.baselines
            baselines = self.broadcast.value(local_baselines).to(self.config.launch.device)
        teacher_input = None
        if self.config.has_teacher_input:
            local_input = None if sampled is None else sampled.teacher_input
            teacher_input = cast(TeacherInput, self.broadcast.value(local_input)).to(self.config.launch.device)
        routed_experts = None if batch is None else batch.routed_experts
        if routed_experts is not None and self.config.routing is None and not self._said_experts:
            _log.warning("the rollouts name the experts of each token: --moe-enable-routing-replay replays them")
            self._said_experts = True

        if self.config.engine.rollout_colocate:
            self.work.run(lambda: cast(VllmEngine, self.engine).sleep(), "the end of the rollout")
        return CollectedBatch(
            batch=shared,
            reward_metrics=reward_metrics,
            excluded=excluded,
            baselines=baselines,
            teacher_input=teacher_input,
            routed_experts=routed_experts,
        )

    def check_scores(self, collected: CollectedBatch, step: int) -> None:
        """Raise RunError on every rank if no response of the batch has a score, or more than half were dropped."""
        num_responses = self.config.rollouts.sequences
        num_errors = int(collected.reward_metrics.get("reward/errors", 0))
        num_dropped = int(collected.reward_metrics.get("rollout/dropped_samples", 0))
        if 2 * num_dropped > num_responses:
            raise RunError(
                f"the rollout of step {step} failed: {num_dropped} of its {num_responses} responses were left out, "
                f"more than half, see {bad_folder(self.config)}: repair the engine"
            )
        if num_errors and num_errors + num_dropped == num_responses:
            raise RunError(
                f"the rollout of step {step} failed: none of its {num_errors} responses could be scored by "
                f"{source_of(self.config).name}, see {errors_file(self.config)}: repair the rule"
            )

    def probe(self, rows: int, longest: int, length: int) -> RolloutBatch:
        """Answers to the replica's first prompts, the same at each call, on all its ranks; ``length``: columns."""
        sampler = cast(RolloutSampler, self.sampler)
        batch = self.work.run(lambda: sampler.probe(rows, longest, length), "the check of the rollout engine")
        return self.broadcast.batch(batch)

    def evaluate(self, step: int) -> dict[str, float]:
        """Metrics of responses to the ``--eval-problems`` held-out problems; equal on all ranks.

        The engines answer, with their rounded weights. The answers to the first problems go to a file.

        Collectives: one broadcast in the replica and one SUM over DP; one gather of texts between the engines' ranks.
        """
        sampler = cast(RolloutSampler, self.sampler)
        graded = self.work.run(lambda: sampler.evaluate(), "the evaluation")
        if graded is not None:
            answers = answers_of(graded, self.config, self.replica)
            # groups.dp of an engine's rank consists of the engines' ranks.
            answers_of_replicas = every_text(answers, self.groups.dp)
            if self.replica == 0:
                write_answers("".join(text or "" for text in answers_of_replicas), self.config, step)
        num_samples = self.config.evaluation.eval_samples
        names = self.config.data.eval_names
        sums = self.broadcast.value(None if graded is None else sums_by_name(graded, num_samples, names))
        return metrics_of(all_reduce_sum(sums.to(self.config.launch.device), self.groups.dp), num_samples, names)

    def data_metrics(self, step: int) -> dict[str, float]:
        """Metrics of ``--prompt-data``'s use up to and with the batch that starts at ``step``; empty without it."""
        if self.config.rollouts.load_rollouts or not isinstance(self.task, PromptData):
            return {}
        num_batches = step // self.config.updates_per_rollout + 1
        return self.task.metrics(num_batches * self.config.rollouts.grpo_prompts_per_step)

    def unscored_in_words(self) -> str:
        """Sentence about the run's responses that could not be scored, equal on all ranks; empty if there are none."""
        if not self._num_unscored:
            return ""
        return (
            f"{self._num_unscored} of {self._num_responses} responses could not be scored, see "
            f"{errors_file(self.config)}"
        )

    def close(self) -> None:
        """End the sampling, the scoring processes and the engine. Collectives: none."""
        if self.sampler is not None:
            self.sampler.close()
        self.scheduler.close()
        self.publisher.close()
        try:
            getattr(self.engine, "close", lambda: None)()
        except Exception as problem:  # must not hide the error that ended the run
            _log.error("the rollout engine did not end cleanly: %s", problem)
        self.work.close()

    def _obtain(self, step: int) -> SampledBatch:
        """Sample or read this replica's records; may run on a thread, see :class:`RolloutScheduler`."""
        if self.recorded is None:
            return cast(RolloutSampler, self.sampler).sample(step)
        index = step // self.config.updates_per_rollout
        return SampledBatch(self.recorded.read_for(self.config, index, self.replica))

    def _checked(self, sampled: SampledBatch, step: int) -> SampledBatch:
        """Check the records, write them if ``--save-rollouts`` is given, and sort the kept tokens for the trainer."""
        batch = sampled.batch
        rollouts = self.config.rollouts
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
            first_step = step
            if self.recorded is not None:
                # A run that resumes inside a recorded batch reads all of it again.
                first_step = step // self.config.updates_per_rollout * self.config.updates_per_rollout
            check_versions(batch, first_step, rollouts.rollout_staleness)
        if rollouts.save_rollouts:
            write_rollouts(batch, rollouts.save_rollouts, step, self.replica)
        return dataclasses.replace(sampled, batch=batch.with_sorted_support())

    def _scored(self, sampled: SampledBatch, step: int) -> SampledBatch:
        """Add a teacher's log-probs of the batch, or the rows with its own prompts; write a server's log-probs."""
        prompts = sampled.teacher_prompts
        if self._teacher is None:
            if prompts is None:
                return sampled
            return dataclasses.replace(sampled, teacher_input=teacher_rows(sampled.batch, prompts, self.config))
        if isinstance(self._teacher, RecordedTeacher):
            if self.recorded is None:
                raise RuntimeError("a recorded teacher has recorded rollouts")
            names = self.recorded.names(step // self.config.updates_per_rollout)
            return dataclasses.replace(sampled, teacher_input=self._teacher.read(sampled.batch, names))
        scores = self._teacher.score(sampled.batch, prompts)
        self._teacher.save(scores, step)
        return dataclasses.replace(sampled, teacher_input=scores)


def check_versions(batch: RolloutBatch, step: int, limit: int) -> None:
    """Raise ValueError for tokens whose weights are newer than ``step``, or more than ``limit`` steps older."""
    versions = batch.policy_versions.long()
    is_wrong = batch.response_mask & ((versions > step) | (versions < step - limit))
    if not is_wrong.any():
        return
    row, token = is_wrong.nonzero()[0].tolist()
    version = int(versions[row, token])
    where = f"sample {int(batch.sample_ids[row])}, token {token} was sampled by weights of version {version}"
    if version > step:
        raise ValueError(
            f"{where}, newer than the trainer's at step {step}: rollouts of another run or program count other steps, "
            "leave --rollout-staleness out"
        )
    raise ValueError(
        f"{where}, {step - version} steps behind the trainer at step {step}: --rollout-staleness allows {limit}"
    )
