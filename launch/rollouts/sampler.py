"""Sampling for one replica: ask the engine, score its responses, and build the records."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from megatron_rc.launch.rollouts.open_rollouts import OpenRollouts
from megatron_rc.launch.rollouts.samples import GoodSamples
from megatron_rc.launch.rollouts.turns import Conversation, converse
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.tasks import Problem, Task
from megatron_rc.launch.tasks.prompt_data.source import PromptData
from megatron_rc.records.rollout import RolloutBatch, SamplingParams

# Responses of an evaluation in one request: an engine in this process holds all their tokens in memory.
_MOST_AT_ONCE = 256
# Numbers and seeds of replacement prompts begin at _REPLACED_FROM; each further try adds _APART to the numbers.
_REPLACED_FROM, _APART = 1 << 33, 1 << 32
# Added to the number of a call for greedy responses, so that no other call has its seed.
_GREEDY_FROM = 1 << 35


@dataclass(frozen=True)
class SampledBatch:
    """A replica's share of a rollout batch, with numbers for the metrics."""

    batch: RolloutBatch  # the records
    counts: Mapping[str, int] = field(default_factory=dict)  # metrics that add up over the replicas
    # Sum of each component of the rewards, and the number of responses that have it.
    sums: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    # [responses], reward of the greedy response to each response's prompt; None unless the estimator needs it.
    baselines: Tensor | None = None


@dataclass(frozen=True)
class Answered:
    """A problem with its responses, and the reward and outcome of each; a dropped one has reward 0 and no outcome."""

    problem: Problem
    samples: list[Conversation]
    scored: list[tuple[float, Outcome | None]]

    @property
    def is_flat(self) -> bool:
        """Whether the rewards are all equal, or there are none: such responses give no advantage."""
        return len({value for value, outcome in self.scored if outcome is not None}) <= 1


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
        self.config, self.task, self.engine, self.replica = config, task, engine, replica
        self.rewarder = Rewarder(config, replica)
        self.good_samples = GoodSamples(config, engine, task.text.ends, replica, open_rollouts)
        self.sampling = config.rollouts.sampling
        # Held by calls of the task and the rewarder: with --rl-partial-rollouts several threads sample and evaluate.
        self._task_is_busy = threading.Lock()

    def sample(self, step: int) -> SampledBatch:
        """This replica's share of the rollout batch that starts at optimizer step ``step``, with rewards."""
        config, replica, bad = self.config, self.replica, self.good_samples.bad
        prompts = config.rollouts.grpo_prompts_per_step // config.data_parallel_size
        number = step // config.updates_per_rollout
        first = number * config.rollouts.grpo_prompts_per_step + replica * prompts
        seed = config.training.seed + 1_000_003 * number * config.updates_per_rollout + replica
        answered = self._scored(self._problems(first, prompts), config.rollouts.grpo_group_size, seed, step)
        replaced = self._replace_flat(answered, first, seed, step)
        greedy = self._greedy(answered, seed, step) if config.advantages.advantage_estimator == "remax" else None
        samples = [sample for one in answered for sample in one.samples]
        scored = [pair for one in answered for pair in one.scored]
        values = [value for value, _ in scored]
        batch = self._batch(samples, values, replica * prompts)
        rewards = Rewards(values, [outcome for _, outcome in scored if outcome is not None])
        counts = {
            "reward/errors": rewards.errors,
            "rollout/bad_samples": self.good_samples.bad - bad,
            "rollout/dropped_samples": len(scored) - len(rewards.outcomes),
        }
        if config.rollouts.dynamic_sampling:
            flat = sum(one.is_flat for one in answered)
            counts |= {"rollout/replaced_prompts": replaced, "rollout/flat_prompts": flat}
        sums = rewards.sums()
        if greedy is not None:
            sums["greedy"] = (float(greedy.double().sum()), len(greedy))
        return SampledBatch(batch, counts, sums, greedy)

    def _replace_flat(self, answered: list[Answered], first: int, seed: int, step: int) -> int:
        """Replace prompts whose responses have equal rewards; return the number of replacements.

        A replacement depends only on the step, the place and the try.
        """
        replaced = 0
        for number in range(self.config.rollouts.dynamic_sampling):
            flat = [place for place, one in enumerate(answered) if one.is_flat]
            if not flat:
                break
            begin = _REPLACED_FROM + number * _APART + first
            problems = [self._problems(begin + place, 1)[0] for place in flat]
            seed_of_try = derive_seed(seed, _REPLACED_FROM + number)
            others = self._scored(problems, self.config.rollouts.grpo_group_size, seed_of_try, step)
            for place, other in zip(flat, others, strict=True):
                answered[place] = other
            replaced += len(flat)
        return replaced

    def _greedy(self, answered: list[Answered], seed: int, step: int) -> Tensor:
        """[responses], reward of the greedy response to each response's prompt; 0 if that response was dropped."""
        problems, own = [one.problem for one in answered], derive_seed(seed, _GREEDY_FROM)
        best = self._scored(problems, 1, own, step, SamplingParams(top_k=1))
        rewards = torch.tensor([one.scored[0][0] for one in best], dtype=torch.float32)
        return rewards.repeat_interleave(self.config.rollouts.grpo_group_size)

    def _scored(
        self, problems: Sequence[Problem], size: int, seed: int, step: int, sampling: SamplingParams | None = None
    ) -> list[Answered]:
        """Sample and reward ``size`` responses to each problem; ``sampling`` None: as rollouts are sampled."""
        longest = self.config.rollouts.max_response_length
        reply = partial(self._reply, problems, size, step=step)
        samples = self._responses(problems, size, sampling or self.sampling, longest, seed, reply, step)
        kept = [index for index, sample in enumerate(samples) if sample.token_ids]
        asked, given = [problems[index // size] for index in kept], [samples[index] for index in kept]
        rewards = self._rewards(asked, given, step=step)
        rewards = penalised(rewards, [len(samples[index].token_ids) for index in kept], self.config)
        scored: list[tuple[float, Outcome | None]] = [(0.0, None)] * len(samples)
        for index, value, outcome in zip(kept, rewards.values, rewards.outcomes, strict=True):
            scored[index] = value, outcome
        owns = [slice(start, start + size) for start in range(0, len(samples), size)]
        return [Answered(problem, samples[own], scored[own]) for problem, own in zip(problems, owns, strict=True)]

    def probe(self, rows: int, longest: int, length: int) -> RolloutBatch:
        """Sample responses to the replica's first prompts, the same at each call, without rewards."""
        problems = self._problems(self.replica * rows, rows)
        seed = self.config.training.seed + self.replica
        samples = self._responses(problems, 1, self.sampling, longest, seed)
        batch = self._batch(samples, [0.0] * rows, self.replica * rows)
        usable = batch.response_mask
        if self.config.correction.bad_log_probs != "error":
            usable = usable & batch.rollout_log_probs.isfinite()
        if not usable.any():
            raise EngineError(f"no token of {rows} responses can be compared: none of their log-probs can be used")
        return replace(batch, response_mask=usable).at_length(length, self.task.text.pad)

    def evaluate(self) -> list[Graded]:
        """Sample and grade ``--eval-samples`` responses to each held-out problem of this replica."""
        share = share_of(self.config, self.replica)
        problems = self._problems(share.start, len(share), held_out=True)
        at_once = max(1, _MOST_AT_ONCE // self.config.evaluation.eval_samples)
        parts = [problems[begin : begin + at_once] for begin in range(0, len(problems), at_once)]
        graded = [one for number, part in enumerate(parts) for one in self._graded(part, number)]
        if not self.config.data.eval_names:
            return graded
        name_of = cast(PromptData, self.task).name_of_held_out
        return [replace(one, data=name_of(number)) for one, number in zip(graded, share, strict=True)]

    def _graded(self, problems: Sequence[Problem], part: int) -> Iterator[Graded]:
        """Sample and grade responses to some problems."""
        tries, longest = self.config.evaluation.eval_samples, self.config.rollouts.max_response_length
        repeated = [problem for problem in problems for _ in range(tries)]
        seed = self.config.training.seed + 1_000_003 * part + self.replica
        reply = partial(self._reply, problems, tries, step=self.engine.version, held_out=True)
        samples = self._responses(problems, tries, sampling_of(self.config), longest, seed, reply)
        rewards = self._rewards(repeated, samples, step=self.engine.version, held_out=True)
        with self._task_is_busy:
            texts = [
                "".join([*(part for turn in earlier for part in turn), newest])
                for earlier, newest in zip(*self._texts(samples), strict=True)
            ]
        for index, problem in enumerate(problems):
            own = slice(index * tries, (index + 1) * tries)
            yield Graded(problem, texts[own], rewards.values[own], rewards.outcomes[own])

    def close(self) -> None:
        """End the processes that score."""
        self.rewarder.close()

    def _problems(self, start: int, count: int, *, held_out: bool = False) -> list[Problem]:
        """Problems of the task, from number ``start`` on."""
        with self._task_is_busy:
            return list(self.task.problems(start, count, held_out=held_out))

    def _rewards(
        self, problems: Sequence[Problem], samples: Sequence[Conversation], *, step: int, held_out: bool = False
    ) -> Rewards:
        """Rewards of one response to each problem, with the rewards of its turns; see :meth:`Rewarder.score`."""
        whole = [(problem, one) for problem, one in zip(problems, samples, strict=True) if one.failed is None]
        with self._task_is_busy:
            turns, texts = self._texts([one for _, one in whole])
            scored = self.rewarder.score(
                [problem for problem, _ in whole],
                texts,
                turns,
                [one.turns[-1].token_ids for _, one in whole],
                step=step,
                held_out=held_out,
            )
        pairs = iter(zip(scored.values, scored.outcomes, strict=True))
        failed = self.config.rewards.reward_on_error
        values, outcomes = [], []
        for one in samples:
            value, outcome = next(pairs) if one.failed is None else (failed, one.failed)
            values.append(value if outcome.failure else value + one.reward)
            outcomes.append(outcome)
        return Rewards(values, outcomes)

    def _reply(
        self,
        problems: Sequence[Problem],
        size: int,
        places: Sequence[int],
        samples: Sequence[Conversation],
        *,
        step: int,
        held_out: bool = False,
    ) -> list[Outcome]:
        """Replies to conversations, ``size`` of which belong to each problem; see :meth:`Rewarder.reply`."""
        asked = [problems[place // size] for place in places]
        with self._task_is_busy:
            turns, texts = self._texts(samples)
            token_ids = [sample.turns[-1].token_ids for sample in samples]
            return self.rewarder.reply(asked, texts, turns, token_ids, self.task.text, step=step, held_out=held_out)

    def _texts(self, samples: Sequence[Conversation]) -> tuple[list[list[tuple[str, str]]], list[str]]:
        """Texts of the earlier turns and of the newest turn of each conversation."""
        text = self.task.text
        found = [sample.texts(text.response_text, text.text_of) for sample in samples]
        return [earlier for earlier, _ in found], [newest for _, newest in found]

    def _responses(
        self,
        problems: Sequence[Problem],
        size: int,
        sampling: SamplingParams,
        longest: int,
        seed: int,
        reply: Callable[[list[int], list[Conversation]], list[Outcome]] | None = None,
        step: int | None = None,
    ) -> list[Conversation]:
        """``size`` responses to each problem, of up to ``--max-turns`` turns if there is a ``reply``.

        ``step``: optimizer step at which their rollout batch begins; None: they belong to none.
        """
        with self._task_is_busy:
            encoded = [ids for problem in problems for ids in [self.task.text.encode(problem)] * size]
        room = self.config.training.seq_length - self.config.rollouts.max_response_length
        if max(map(len, encoded)) > room:
            raise ValueError(f"a prompt has {max(map(len, encoded))} tokens, --seq-length leaves room for {room}")

        def ask(texts: list[list[int]], seed: int) -> list[Sample]:
            given, version = self.good_samples(texts, sampling, longest, seed, step), self.engine.version
            return [replace(one, versions=one.versions or [version] * len(one.token_ids)) for one in given]

        most = self.config.rollouts.max_turns
        return converse(encoded, ask, seed, reply=reply if most > 1 else None, most=most, room=room)

    def _batch(self, samples: Sequence[Conversation], rewards: Sequence[float], first_prompt: int) -> RolloutBatch:
        """The batch of groups of responses; ``first_prompt``: number of the first one's prompt, over all replicas."""
        config, size = self.config, self.config.rollouts.grpo_group_size
        batch = batch_of(
            samples,
            config.training.seq_length,
            self.task.text.pad,
            self.sampling,
            has_experts=config.replays_rollouts,
            has_support=config.rollouts.replays_sampling,
            has_turns=config.rollouts.max_turns > 1,
        )
        return replace(
            batch,
            sample_ids=batch.sample_ids + first_prompt * size,
            group_ids=batch.group_ids // size + first_prompt,
            rewards=torch.tensor(rewards, dtype=torch.float32),
        )
