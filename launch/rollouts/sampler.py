"""Sampling for one replica: ask the engine, score its responses, and build the records."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from megatron_rc.launch.engines import EngineError, RolloutEngine, Sample
from megatron_rc.launch.engines.answers import derive_seed
from megatron_rc.launch.rewards.outcome import Outcome
from megatron_rc.launch.rewards.rewarder import Rewarder, Rewards, penalised
from megatron_rc.launch.rollouts.batches import batch_of
from megatron_rc.launch.rollouts.evaluation import Graded, sampling_of, share_of
from megatron_rc.launch.rollouts.excluded import Excluded
from megatron_rc.launch.rollouts.open_rollouts import OpenRollouts
from megatron_rc.launch.rollouts.samples import GoodSamples
from megatron_rc.launch.rollouts.teacher_prompts import TeacherRows, teacher_prompts
from megatron_rc.launch.rollouts.teacher_scores import TeacherScores
from megatron_rc.launch.rollouts.turns import Conversation, Reply, converse
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.tasks import Problem, Task
from megatron_rc.launch.tasks.prompt_data.source import PromptData
from megatron_rc.records.rollout import RolloutBatch, SamplingParams

# Responses of an evaluation in one request: an engine in this process holds all their tokens in memory.
_MOST_AT_ONCE = 256
# Numbers and seeds of replacement prompts begin at _REPLACED_FROM; each further try adds _APART to the numbers.
_REPLACED_FROM = 1 << 33
_APART = 1 << 32
# Added to the number of a call for greedy responses, so that no other call has its seed.
_GREEDY_FROM = 1 << 35


TeacherInput = TeacherScores | TeacherRows


@dataclass(frozen=True)
class SampledBatch:
    """A replica's share of a rollout batch, with numbers for the metrics."""

    batch: RolloutBatch  # the records
    counts: Mapping[str, int] = field(default_factory=dict)  # metrics that add up over the replicas
    # Sum of each component of the rewards, and the number of responses that have it.
    sums: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    # [responses], reward of the greedy response to each response's prompt; None unless the estimator needs it.
    baselines: Tensor | None = None
    # Token ids of the teacher's own prompt of each row; None without ``--teacher-prompt``.
    teacher_prompts: list[list[int]] | None = None
    # A teacher's log-probs from a server or from files, or the rows with the teacher's own prompts; None: neither.
    teacher_input: TeacherInput | None = None
    # The responses that were started and are not in the batch, without greedy ones; None: unknown, as of records.
    excluded: Sequence[Excluded] | None = None


@dataclass(frozen=True)
class Group:
    """The responses to one problem, with the reward and outcome of each; a dropped one has reward 0 and no outcome."""

    problem: Problem
    responses: list[Conversation]
    rewards: list[float]
    outcomes: list[Outcome | None]

    @property
    def is_flat(self) -> bool:
        """Whether the rewards are all equal, or there are none: such responses give no advantage."""
        pairs = zip(self.rewards, self.outcomes, strict=True)
        return len({reward for reward, outcome in pairs if outcome is not None}) <= 1

    def excluded(self, prompt: tuple[int, int], *, is_replaced: bool) -> list[Excluded]:
        """The responses that do not get into the batch: the bad ones, and if the prompt is replaced the others too.

        ``prompt`` is the number of the prompt, see :class:`Excluded`.
        """
        excluded = []
        for response in self.responses:
            excluded += [Excluded(prompt, num_tokens, is_bad=True) for num_tokens in response.bad_lengths]
            if is_replaced and response.token_ids:
                excluded.append(Excluded(prompt, len(response.log_probs), is_bad=False))
        return excluded


class RolloutSampler:
    """Samples for one data-parallel replica, on its first rank. Makes no collective."""

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        engine: RolloutEngine,
        replica: int,
        open_rollouts: OpenRollouts | None = None,
    ) -> None:
        self.config = config
        self.task = task
        self.engine = engine
        self.replica = replica
        self.rewarder = Rewarder(config, replica)
        self.good_samples = GoodSamples(config, engine, task.text.ends, replica, open_rollouts)
        self.sampling = config.rollouts.sampling
        # Held by calls of the task and the rewarder: with --rl-partial-rollouts several threads sample and evaluate.
        self._task_is_busy = threading.Lock()

    def sample(self, step: int) -> SampledBatch:
        """This replica's share of the rollout batch that starts at optimizer step ``step``, with rewards."""
        rollouts = self.config.rollouts
        prompts_of_replica = rollouts.grpo_prompts_per_step // self.config.data_parallel_size
        batch_number = step // self.config.updates_per_rollout
        first_prompt = batch_number * rollouts.grpo_prompts_per_step + self.replica * prompts_of_replica
        first_step = batch_number * self.config.updates_per_rollout
        seed = self.config.training.seed + 1_000_003 * first_step + self.replica
        bad_before = self.good_samples.bad

        groups = self._groups(self._problems(first_prompt, prompts_of_replica), rollouts.grpo_group_size, seed, step)
        replaced = self._replace_flat(groups, first_prompt, seed, step)
        excluded: list[Excluded] = []
        first_group = self.replica * prompts_of_replica
        for index, group in enumerate(groups):
            excluded += group.excluded((first_group + index, 0), is_replaced=False)
            for number, former in enumerate(replaced[index], start=1):
                excluded += former.excluded((first_group + index, number), is_replaced=True)
        baselines = None
        if self.config.advantages.advantage_estimator == "remax":
            baselines = self._greedy_rewards(groups, seed, step)

        responses = [response for group in groups for response in group.responses]
        rewards = [reward for group in groups for reward in group.rewards]
        outcomes = [outcome for group in groups for outcome in group.outcomes if outcome is not None]
        scores = Rewards(rewards, outcomes)
        counts = {
            "reward/errors": scores.errors,
            "rollout/bad_samples": self.good_samples.bad - bad_before,
            "rollout/dropped_samples": len(rewards) - len(outcomes),
        }
        if rollouts.dynamic_sampling:
            counts["rollout/replaced_prompts"] = sum(map(len, replaced))
            counts["rollout/flat_prompts"] = sum(group.is_flat for group in groups)
        sums = scores.sums()
        if baselines is not None:
            sums["greedy"] = (float(baselines.double().sum()), len(baselines))
        batch = self._batch(responses, rewards, first_group)
        return SampledBatch(
            batch, counts, sums, baselines, teacher_prompts=self._teacher_prompts(groups), excluded=excluded
        )

    def _teacher_prompts(self, groups: Sequence[Group]) -> list[list[int]] | None:
        """Token ids of the teacher's own prompt of each response; None without ``--teacher-prompt``."""
        settings = self.config.distillation
        if settings is None or settings.teacher_prompt is None:
            return None
        problems = [group.problem for group in groups]
        with self._task_is_busy:
            prompts = teacher_prompts(settings.teacher_prompt, problems, self.task.text)
        return [prompt for group, prompt in zip(groups, prompts, strict=True) for _ in group.responses]

    def probe(self, rows: int, longest: int, length: int) -> RolloutBatch:
        """Sample responses to the replica's first prompts, the same at each call, without rewards."""
        problems = self._problems(self.replica * rows, rows)
        seed = self.config.training.seed + self.replica
        responses = self._responses(problems, 1, self.sampling, longest, seed)
        batch = self._batch(responses, [0.0] * rows, self.replica * rows)
        usable = batch.response_mask
        if self.config.correction.bad_log_probs != "error":
            usable = usable & batch.rollout_log_probs.isfinite()
        if not usable.any():
            raise EngineError(f"no token of {rows} responses can be compared: none of their log-probs can be used")
        return replace(batch, response_mask=usable).at_length(length, self.task.text.pad)

    def evaluate(self) -> list[Graded]:
        """Sample and grade ``--eval-samples`` responses to each held-out problem of this replica."""
        numbers = share_of(self.config, self.replica)
        problems = self._problems(numbers.start, len(numbers), held_out=True)
        at_once = max(1, _MOST_AT_ONCE // self.config.evaluation.eval_samples)
        graded: list[Graded] = []
        for part, begin in enumerate(range(0, len(problems), at_once)):
            graded += self._graded(problems[begin : begin + at_once], part)
        if not self.config.data.eval_names:
            return graded
        name_of = cast(PromptData, self.task).name_of_held_out
        return [replace(problem, data=name_of(number)) for problem, number in zip(graded, numbers, strict=True)]

    def close(self) -> None:
        """End the processes that score."""
        self.rewarder.close()

    def _replace_flat(self, groups: list[Group], first_prompt: int, seed: int, step: int) -> list[list[Group]]:
        """Replace groups whose responses have equal rewards, in the list.

        Returns, for each index of the list, the groups that stood there before. A replacement depends only on the step,
        the index and the try.
        """
        replaced: list[list[Group]] = [[] for _ in groups]
        for attempt in range(self.config.rollouts.dynamic_sampling):
            flat_indices = [index for index, group in enumerate(groups) if group.is_flat]
            if not flat_indices:
                break
            first_number = _REPLACED_FROM + attempt * _APART + first_prompt
            problems = [self._problems(first_number + index, 1)[0] for index in flat_indices]
            seed_of_attempt = derive_seed(seed, _REPLACED_FROM + attempt)
            replacements = self._groups(problems, self.config.rollouts.grpo_group_size, seed_of_attempt, step)
            for index, replacement in zip(flat_indices, replacements, strict=True):
                replaced[index].append(groups[index])
                groups[index] = replacement
        return replaced

    def _greedy_rewards(self, groups: Sequence[Group], seed: int, step: int) -> Tensor:
        """[responses], reward of the greedy response to each response's prompt; 0 if that response was dropped."""
        problems = [group.problem for group in groups]
        greedy_seed = derive_seed(seed, _GREEDY_FROM)
        greedy_groups = self._groups(problems, 1, greedy_seed, step, SamplingParams(top_k=1))
        rewards = torch.tensor([group.rewards[0] for group in greedy_groups], dtype=torch.float32)
        return rewards.repeat_interleave(self.config.rollouts.grpo_group_size)

    def _groups(
        self, problems: Sequence[Problem], size: int, seed: int, step: int, sampling: SamplingParams | None = None
    ) -> list[Group]:
        """Sample and reward ``size`` responses to each problem; ``sampling`` None: as rollouts are sampled."""
        longest = self.config.rollouts.max_response_length
        reply = partial(self._reply, problems, size, step=step)
        responses = self._responses(problems, size, sampling or self.sampling, longest, seed, reply, step)

        # Dropped responses have no tokens, and are not scored.
        non_empty = [index for index, response in enumerate(responses) if response.token_ids]
        scored = self._rewards(
            [problems[index // size] for index in non_empty], [responses[index] for index in non_empty], step=step
        )
        scored = penalised(scored, [len(responses[index].token_ids) for index in non_empty], self.config)
        rewards = [0.0] * len(responses)
        outcomes: list[Outcome | None] = [None] * len(responses)
        for index, reward, outcome in zip(non_empty, scored.values, scored.outcomes, strict=True):
            rewards[index] = reward
            outcomes[index] = outcome

        groups = []
        for number, problem in enumerate(problems):
            of_group = slice(number * size, (number + 1) * size)
            groups.append(Group(problem, responses[of_group], rewards[of_group], outcomes[of_group]))
        return groups

    def _graded(self, problems: Sequence[Problem], part: int) -> Iterator[Graded]:
        """Sample and grade responses to some problems; ``part``: number of the call."""
        size = self.config.evaluation.eval_samples
        longest = self.config.rollouts.max_response_length
        seed = self.config.training.seed + 1_000_003 * part + self.replica
        step = self.engine.version
        reply = partial(self._reply, problems, size, step=step, held_out=True)
        responses = self._responses(problems, size, sampling_of(self.config), longest, seed, reply)
        problem_of_each = [problem for problem in problems for _ in range(size)]
        rewards = self._rewards(problem_of_each, responses, step=step, held_out=True)
        with self._task_is_busy:
            earlier_turns, newest_turns = self._texts(responses)
        texts = []
        for turns, newest in zip(earlier_turns, newest_turns, strict=True):
            texts.append("".join(turn + observation for turn, observation in turns) + newest)
        for number, problem in enumerate(problems):
            of_problem = slice(number * size, (number + 1) * size)
            yield Graded(problem, texts[of_problem], rewards.values[of_problem], rewards.outcomes[of_problem])

    def _problems(self, start: int, count: int, *, held_out: bool = False) -> list[Problem]:
        """Problems of the task, from number ``start`` on."""
        with self._task_is_busy:
            return list(self.task.problems(start, count, held_out=held_out))

    def _rewards(
        self, problems: Sequence[Problem], responses: Sequence[Conversation], *, step: int, held_out: bool = False
    ) -> Rewards:
        """Rewards of one response to each problem, with the rewards of its turns; see :meth:`Rewarder.score`.

        A response with a failed reply is not scored; it has the reward of errors.
        """
        indices = [index for index, response in enumerate(responses) if response.failed is None]
        with self._task_is_busy:
            turns, texts = self._texts([responses[index] for index in indices])
            scored = self.rewarder.score(
                [problems[index] for index in indices],
                texts,
                turns,
                [responses[index].turns[-1].token_ids for index in indices],
                step=step,
                held_out=held_out,
            )
        values = [self.config.rewards.reward_on_error] * len(responses)
        outcomes = [response.failed for response in responses]
        for index, value, outcome in zip(indices, scored.values, scored.outcomes, strict=True):
            values[index] = value if outcome.failure else value + responses[index].reward
            outcomes[index] = outcome
        return Rewards(values, cast(list[Outcome], outcomes))

    def _reply(
        self,
        problems: Sequence[Problem],
        size: int,
        indices: Sequence[int],
        responses: Sequence[Conversation],
        *,
        step: int,
        held_out: bool = False,
    ) -> list[Outcome]:
        """Replies to conversations, ``size`` of which belong to each problem; see :meth:`Rewarder.reply`."""
        problem_of_each = [problems[index // size] for index in indices]
        token_ids = [response.turns[-1].token_ids for response in responses]
        with self._task_is_busy:
            turns, texts = self._texts(responses)
            return self.rewarder.reply(
                problem_of_each, texts, turns, token_ids, self.task.text, step=step, held_out=held_out
            )

    def _texts(self, responses: Sequence[Conversation]) -> tuple[list[list[tuple[str, str]]], list[str]]:
        """Texts of the earlier turns, each with its observation, and of the newest turn of each conversation."""
        text = self.task.text
        earlier_and_newest = [response.texts(text.response_text, text.text_of) for response in responses]
        return [earlier for earlier, _ in earlier_and_newest], [newest for _, newest in earlier_and_newest]

    def _responses(
        self,
        problems: Sequence[Problem],
        size: int,
        sampling: SamplingParams,
        longest: int,
        seed: int,
        reply: Reply | None = None,
        step: int | None = None,
    ) -> list[Conversation]:
        """``size`` responses to each problem, of up to ``--max-turns`` turns if there is a ``reply``.

        ``step``: optimizer step at which their rollout batch begins; None: they belong to none.
        """
        prompts: list[list[int]] = []
        with self._task_is_busy:
            for problem in problems:
                prompts += [self.task.text.encode(problem)] * size
        room = self.config.training.seq_length - self.config.rollouts.max_response_length
        longest_prompt = max(map(len, prompts))
        if longest_prompt > room:
            raise ValueError(f"a prompt has {longest_prompt} tokens, --seq-length leaves room for {room}")

        def ask(texts: list[list[int]], seed: int) -> list[Sample]:
            samples = self.good_samples(texts, sampling, longest, seed, step)
            version = self.engine.version
            return [
                replace(sample, versions=sample.versions or [version] * len(sample.token_ids)) for sample in samples
            ]

        max_turns = self.config.rollouts.max_turns
        return converse(prompts, ask, seed, reply=reply if max_turns > 1 else None, max_turns=max_turns, room=room)

    def _batch(self, responses: Sequence[Conversation], rewards: Sequence[float], first_prompt: int) -> RolloutBatch:
        """The batch of groups of responses; ``first_prompt``: number of the first one's prompt, over all replicas."""
        size = self.config.rollouts.grpo_group_size
        batch = batch_of(
            responses,
            self.config.training.seq_length,
            self.task.text.pad,
            self.sampling,
            has_experts=self.config.replays_rollouts,
            has_support=self.config.rollouts.replays_sampling,
            has_turns=self.config.rollouts.max_turns > 1,
        )
        return replace(
            batch,
            sample_ids=batch.sample_ids + first_prompt * size,
            group_ids=batch.group_ids // size + first_prompt,
            rewards=torch.tensor(rewards, dtype=torch.float32),
        )
