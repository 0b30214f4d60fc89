"""Tasks: the same problems for everyone, and rewards that only the right answer fills."""

import pytest

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.tasks import Problem, make_task


@pytest.fixture(scope="module")
def count_up():
    return make_task("count_up", seed=1)


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("56789", "56789", 1.0),
        ("", "", 1.0),
        ("56789", "", 0.0),
        ("56789", "5678", 4 / 6),
        ("56789", "567890", 5 / 6),
        ("56789", "56780", 4 / 6),
        ("56789", "9", 0.0),
        ("56789", "66789", 0.0),
        ("", "0", 0.0),
        ("89", "8901234567", 2 / 3),
        ("89", "8x", 1 / 3),
    ],
)
def test_count_up_rewards_what_is_right_up_to_the_first_mistake(count_up, answer, response, reward):
    assert count_up.reward(Problem("37", answer), response) == pytest.approx(reward)


def test_the_answers_count_up_to_nine(count_up):
    problems = count_up.problems(0, 50)
    assert {len(problem.data) for problem in problems} == set(range(10))
    for problem in problems:
        assert problem.prompt[-1] + problem.data == "0123456789"[-len(problem.data) - 1 :]


@pytest.mark.parametrize("name", ["count_up", "reasoning_gym:chain_sum"])
def test_problems_are_numbered_and_repeatable(name):
    task, same, other = make_task(name, 1), make_task(name, 1), make_task(name, 2)
    prompts = [problem.prompt for problem in task.problems(0, 8)]
    assert [p.prompt for p in same.problems(4, 4)] == prompts[4:]
    assert [p.prompt for p in other.problems(0, 8)] != prompts
    for prompt in prompts:
        ids = task.tokenizer.encode(prompt)
        assert "<unk>" not in ids.tokens
        assert task.tokenizer.decode(ids.ids) == prompt


def test_reasoning_gym_scores_its_own_answers():
    task = make_task("reasoning_gym:chain_sum", 1)
    for problem in task.problems(0, 5):
        assert task.reward(problem, problem.data["answer"]) == 1
        assert task.reward(problem, "no idea") < 0.1


@pytest.mark.parametrize("name", ["chess", "count_up:9", "reasoning_gym", "reasoning_gym:none"])
def test_unknown_tasks_are_named(name):
    with pytest.raises(ConfigurationError, match="--task"):
        make_task(name, 1)
