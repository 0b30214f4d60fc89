"""Scoring of one replica's responses; a response that cannot be scored is written down."""

from __future__ import annotations

import json
import logging
import os
import reprlib
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rc.launch.rewards.outcome import MAX_COMPONENTS, Outcome, outcome_of
from megatron_rc.launch.rewards.pool import RewardPool
from megatron_rc.launch.rewards.rules import Source
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.tasks import Problem, Text

MAX_DEFAULT_WORKERS = 8
ERRORS_FILE = "reward-errors.jsonl"
PENALTY = "overlong_penalty"
# Texts of the earlier turns of a conversation, each with the observation after it.
Turns = Sequence[tuple[str, str]]
# An error that ends the run goes to all ranks in a message of limited length.
_SHOWN = 1000
_log = logging.getLogger("megatron_rc")


class RewardError(RuntimeError):
    """A response that cannot be scored with ``--reward-errors stop``, or a failure that cannot be written down."""


@dataclass(frozen=True)
class Rewards:
    """The scores of some responses."""

    values: list[float]  # numbers to train on, one for each response; a failed response has ``--reward-on-error``
    outcomes: list[Outcome]  # results of the rule, one for each response that is not dropped

    @property
    def errors(self) -> int:
        """Number of responses that could not be scored."""
        return sum(outcome.failure is not None for outcome in self.outcomes)

    def sums(self) -> dict[str, tuple[float, int]]:
        """Sum of each component, and the number of responses that have it, by name."""
        values_by_name = defaultdict[str, list[float]](list)
        for outcome in self.outcomes:
            for name, value in outcome.components.items():
                values_by_name[name].append(value)
        return {name: (sum(values), len(values)) for name, values in values_by_name.items()}


class Rewarder:
    """The rule of a run, and its replies to turns, on the first rank of one replica. Makes no collective."""

    def __init__(self, config: RunConfig, replica: int) -> None:
        self.config = config
        self.settings = config.rewards
        self.replica = replica
        self.source = source_of(config)
        self.file = errors_file(config)
        self._scorer: InProcess | RewardPool
        workers = self.settings.reward_workers or _default_workers()
        if self.source.is_harmless:
            self._scorer = InProcess(self.source)
        else:
            self._scorer = RewardPool(self.source, workers, self.settings.reward_timeout)
        self._replies: RewardPool | None = None
        if config.rollouts.max_turns > 1:
            self._replies = RewardPool(reply_source(config), workers, self.settings.reward_timeout)
        self._names: set[str] = set()
        self._has_said = False

    def score(
        self,
        problems: Sequence[Problem],
        responses: Sequence[str],
        turns: Sequence[Turns] = (),
        token_ids: Sequence[Sequence[int]] = (),
        *,
        step: int,
        held_out: bool = False,
    ) -> Rewards:
        """Score responses, each against its own problem. A response is a text without the end token and the padding.

        Args:
            problems: one for each response.
            responses: the texts; of conversations those of the last turns.
            turns: the earlier turns of each response, each a pair of a turn and the task's reply to it; empty: all
                responses have one turn.
            token_ids: the sampled tokens of each text, with the one that ended it; empty: they are not known.
            step: optimizer steps made so far; written into the file of errors.
            held_out: whether this is an evaluation; written into the file of errors.

        Raises:
            RewardError: a failure cannot be written down; with ``--reward-errors stop``: a response cannot be scored.
            ConfigurationError: the rule cannot be loaded.
        """
        requests = _requests(problems, responses, turns, token_ids)
        outcomes = [self._known(outcome) for outcome in self._scorer.score(requests)]
        self._keep_failures(self.source, requests, outcomes, {"step": step, "held_out": held_out})
        on_error = self.settings.reward_on_error
        return Rewards([on_error if outcome.failure else outcome.reward for outcome in outcomes], outcomes)

    def reply(
        self,
        problems: Sequence[Problem],
        responses: Sequence[str],
        turns: Sequence[Turns],
        token_ids: Sequence[Sequence[int]],
        text: Text,
        *,
        step: int,
        held_out: bool = False,
    ) -> list[Outcome]:
        """The task's reply to the newest turn of each conversation; observations are token ids of ``text``.

        The other arguments and the errors: see :meth:`score`.
        """
        if self._replies is None:
            raise RuntimeError("a run of one turn has no replies")
        requests = _requests(problems, responses, turns, token_ids)
        outcomes = [_in_tokens(outcome, text) for outcome in self._replies.score(requests)]
        source = reply_source(self.config)
        self._keep_failures(source, requests, outcomes, {"step": step, "held_out": held_out})
        return outcomes

    def close(self) -> None:
        """End the worker processes."""
        self._scorer.close()
        if self._replies is not None:
            self._replies.close()

    def _keep_failures(
        self,
        source: Source,
        requests: Sequence[Mapping[str, Any]],
        outcomes: Sequence[Outcome],
        where: Mapping[str, Any],
    ) -> None:
        """Write failures down; end the run for the first one, or say once that the run goes on."""
        failed = [(index, outcome) for index, outcome in enumerate(outcomes) if outcome.failure is not None]
        for index, outcome in failed:
            self._write(requests[index], outcome, {**where, "sample": index, "rule": source.name})
        if not failed:
            return
        index, first = failed[0]
        problem = f"{source.name} {first.failure}, on response {requests[index]['response'][:80]!r}"
        if self.settings.reward_errors == "stop":
            shown = f"its traceback:\n{first.traceback[-_SHOWN:]}\n" if first.traceback else ""
            raise RewardError(
                f"{shown}{problem}: the sample is in {self.file}; mend the rule, or go on with --reward-errors continue"
            )
        if not self._has_said:
            self._has_said = True
            reward = self.settings.reward_on_error
            _log.error("%s: it gets %g, as all that follow; they are in %s", problem, reward, self.file)

    def _known(self, outcome: Outcome) -> Outcome:
        """Return the outcome, or a failure if the run has too many different components."""
        names = self._names | set(outcome.components)
        if len(names) > MAX_COMPONENTS:
            return Outcome(failure=f"gave more than {MAX_COMPONENTS} different components over the run")
        self._names = names
        return outcome

    def _write(self, request: Mapping[str, Any], outcome: Outcome, where: Mapping[str, Any]) -> None:
        """Add a line to the run's file of errors."""
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            **{**where, "replica": self.replica},
            **{"error": outcome.failure, "traceback": outcome.traceback},
            **{name: as_json(value) for name, value in request.items()},
        }
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise RewardError(
                f"{self.file} cannot be written ({error.strerror}): make room, or choose another --runs-dir"
            ) from error


def penalised(rewards: Rewards, lengths: Sequence[int], config: RunConfig) -> Rewards:
    """Subtract the penalty of long responses, which becomes a component; without ``--overlong penalise`` do nothing.

    Yu et al. 2025, "DAPO", Eq. 13 (verl's ``overlong_buffer``): L tokens at most, the last B of them the buffer, n
    tokens of a response, its end included. The penalty is factor · max(0, n - (L - B)) / B: the whole factor at n = L.
    """
    buffer = config.rewards.overlong_buffer
    if config.rewards.overlong != "penalise" or buffer is None:
        return rewards
    free = config.rollouts.max_response_length - buffer
    factor = config.rewards.overlong_penalty_factor
    penalties = [factor * max(0, length - free) / buffer for length in lengths]
    outcomes = [
        replace(outcome, components={**outcome.components, PENALTY: penalty})
        for outcome, penalty in zip(rewards.outcomes, penalties, strict=True)
    ]
    values = [value - penalty for value, penalty in zip(rewards.values, penalties, strict=True)]
    return Rewards(values, outcomes)


class InProcess:
    """Scoring in this process by a rule that can neither hang nor crash; for use in place of :class:`RewardPool`."""

    def __init__(self, source: Source) -> None:
        self._rule = source.load()
        self._read = source.read

    def score(self, requests: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """Return one outcome for each request, in order."""
        return [outcome_of(partial(self._rule, **request), self._read) for request in requests]

    def close(self) -> None:
        """Do nothing: there are no processes."""


def source_of(config: RunConfig) -> Source:
    """Return the source of a run's rule."""
    return Source(config.task.task, config.training.seed, config.rewards.reward)


def reply_source(config: RunConfig) -> Source:
    """Return the source of a run's replies to turns."""
    return Source(config.task.task, config.training.seed, config.rewards.reply, "reply")


def errors_file(config: RunConfig) -> Path:
    """Return the path of the file of responses that could not be scored."""
    return Path(config.launch.runs_dir) / config.launch.run_name / ERRORS_FILE


def as_json(value: Any) -> Any:
    """Return the value, or a text for a value that JSON cannot express."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return reprlib.repr(value)
    return value


def _requests(
    problems: Sequence[Problem],
    responses: Sequence[str],
    turns: Sequence[Turns],
    token_ids: Sequence[Sequence[int]],
) -> list[dict[str, Any]]:
    """Return the keywords of a rule for one response to each problem."""
    none: list[Any] = [()] * len(responses)
    return [
        {
            "prompt": problem.prompt,
            "response": text,
            "label": problem.label,
            "record": dict(problem.record),
            "turns": list(earlier),
            "token_ids": list(ids),
        }
        for problem, text, earlier, ids in zip(problems, responses, turns or none, token_ids or none, strict=True)
    ]


def _in_tokens(outcome: Outcome, text: Text) -> Outcome:
    """Return a reply with its observation as token ids, or a failure if the tokenizer lacks some."""
    if outcome.observation is None:
        return outcome
    try:
        return replace(outcome, observation=text.observed(outcome.observation))
    except ValueError as problem:
        return Outcome(failure=str(problem))


def _default_workers() -> int:
    """Return this process's share of the machine's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_DEFAULT_WORKERS, max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
