"""Prompts of the teacher's own: rows with the same responses, and functions and lengths that cannot be used."""

import dataclasses

import pytest
import torch

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.rollouts.teacher_prompts import batch_of_teacher, teacher_prompts, teacher_rows
from megatron_rc.launch.tasks import Problem
from megatron_rc.launch.tasks.text import CharacterText
from tests.support.recorded_training import flags, recorded_batch, run_config

HERE = "python:tests.launch.rollouts.test_teacher_prompts"
PROBLEMS = [Problem("12", "3456789"), Problem("78", "9")]


def doubled(problem):
    return dataclasses.replace(problem, prompt=problem.prompt * 2)


def nothing(problem):
    return problem.prompt


def failing(problem):
    raise KeyError(problem.label)


def test_prompts_are_those_of_the_function():
    text = CharacterText("0123456789")
    prompts = teacher_prompts(f"{HERE}:doubled", PROBLEMS, text)
    assert prompts == [text.tokens_of("1212"), text.tokens_of("7878")]


@pytest.mark.parametrize(
    ("name", "words"),
    [("nothing", r"returned a str for '12': return a Problem"), ("failing", r"raises KeyError: '3456789' for '12'")],
)
def test_functions_that_give_no_problem(name, words):
    with pytest.raises(ConfigurationError, match=f"--teacher-prompt {HERE}:{name} {words}"):
        teacher_prompts(f"{HERE}:{name}", PROBLEMS, CharacterText("0123456789"))


@pytest.fixture
def config(tmp_path):
    return run_config(flags(tmp_path))


def test_each_response_follows_the_teachers_prompt(config):
    """Also one that is shorter than the policy's; a row without a sampled token stays as it is."""
    batch = recorded_batch(0)
    batch = dataclasses.replace(batch, response_mask=batch.response_mask & (torch.arange(16)[:, None] > 0))
    prompts = [[5] * (1 + row % 2) for row in range(len(batch.tokens))]
    rows = teacher_rows(batch, prompts, config)
    of_teacher = batch_of_teacher(batch, rows)
    assert torch.equal(rows.tokens[0], batch.tokens[0])
    for row in range(1, len(prompts)):
        begin = int(batch.response_mask[row].nonzero()[0])
        assert int(rows.shifts[row]) == len(prompts[row]) - begin
        assert rows.tokens[row, : len(prompts[row])].tolist() == prompts[row]
        sampled = batch.tokens[row][batch.response_mask[row]]
        assert torch.equal(of_teacher.tokens[row][of_teacher.response_mask[row]], sampled)


def test_a_prompt_that_is_too_long(config):
    prompts = [[5] * 16] * 16
    with pytest.raises(ConfigurationError, match=r"a teacher's prompt of 16 tokens .* --seq-length 16"):
        teacher_rows(recorded_batch(0), prompts, config)
