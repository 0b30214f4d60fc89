"""Prompts of the teacher's own, such as those with a hint: the rows that a teacher reads instead of the policy's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.python_specs import in_words, load_python
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.tasks import Problem, Text
from megatron_rc.records.rollout import RolloutBatch

FLAG = "--teacher-prompt"


@dataclass(frozen=True, eq=False)
class TeacherRows:
    """Tokens that the teacher reads: its own prompt, and the policy's response.

    Attributes:
        tokens: [n, s] int64, for each row of the rollout batch, with padding.
        shifts: [n] int64, length of the teacher's prompt minus that of the policy's.
    """

    tokens: Tensor
    shifts: Tensor

    def to(self, device: torch.device) -> TeacherRows:
        """The rows with their tensors on a device."""
        return TeacherRows(self.tokens.to(device), self.shifts.to(device))


def prompt_function(spec: str) -> Callable[[Problem], Problem]:
    """Load the function of ``--teacher-prompt``; ConfigurationError if it is none."""
    function = load_python(spec, FLAG)
    if not callable(function):
        raise ConfigurationError(f"{FLAG} {spec} is of type {type(function).__name__}: name a function")
    loaded: Callable[[Problem], Problem] = function
    return loaded


def teacher_prompts(spec: str, problems: Sequence[Problem], text: Text) -> list[list[int]]:
    """Token ids of the teacher's prompt for each problem; ConfigurationError if the function gives no problem."""
    function = prompt_function(spec)
    prompts = []
    for problem in problems:
        try:
            of_teacher = function(problem)
        except Exception as error:  # a user's function can raise anything
            raise ConfigurationError(f"{FLAG} {spec} raises {in_words(error)} for {problem.prompt!r:.80}") from error
        if not isinstance(of_teacher, Problem):
            raise ConfigurationError(
                f"{FLAG} {spec} returned a {type(of_teacher).__name__} for {problem.prompt!r:.80}: return a Problem, "
                "such as dataclasses.replace(problem, prompt=...)"
            )
        prompts.append(text.encode(of_teacher))
    return prompts


def teacher_rows(batch: RolloutBatch, prompts: Sequence[Sequence[int]], config: RunConfig) -> TeacherRows:
    """Put the teacher's prompt in front of each response; ConfigurationError if a row exceeds ``--seq-length``."""
    length = config.training.seq_length
    tokens = batch.tokens.clone()
    shifts = torch.zeros(len(tokens), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        sampled = batch.response_mask[row].nonzero().flatten()
        if not len(sampled):
            continue
        begin = int(sampled[0])
        response = batch.tokens[row, begin : int(sampled[-1]) + 1]
        shifts[row] = len(prompt) - begin
        whole = torch.cat([torch.tensor(prompt, dtype=tokens.dtype), response])
        if len(whole) > length:
            raise ConfigurationError(
                f"{FLAG}: a teacher's prompt of {len(prompt)} tokens and its response of {len(response)} are longer "
                f"than {config.typed('seq_length')}: raise that, or shorten the prompt"
            )
        tokens[row, : len(whole)] = whole
    return TeacherRows(tokens, shifts)


def batch_of_teacher(batch: RolloutBatch, rows: TeacherRows) -> RolloutBatch:
    """The rollout batch with the teacher's prompts, for a pass of the teacher: values of sampled tokens are shifted."""
    counts = batch.support_counts
    return dataclasses.replace(
        batch,
        tokens=rows.tokens,
        response_mask=_shifted(batch.response_mask, rows.shifts),
        rollout_log_probs=torch.zeros_like(batch.rollout_log_probs),
        policy_versions=torch.zeros_like(batch.policy_versions),
        # The kept tokens of a row stay in their order.
        support_counts=None if counts is None else _shifted(counts, rows.shifts),
        turn_rewards=None,
        routed_experts=None,
        old_log_probs=None,
        log_probs=None,
    )


def _shifted(values: Tensor, shifts: Tensor) -> Tensor:
    """[n, s] with each row moved to the right by its shift; 0 or False where nothing comes from."""
    sources = torch.arange(values.shape[1], device=values.device) - shifts.unsqueeze(1)
    is_inside = (sources >= 0) & (sources < values.shape[1])
    moved = values.gather(1, sources.clamp(0, values.shape[1] - 1))
    return torch.where(is_inside, moved, torch.zeros_like(moved))
