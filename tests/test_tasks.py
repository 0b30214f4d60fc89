"""Tasks: the same problems for everyone, and rewards that only the right answer fills."""

import pytest

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.tasks import Problem, make_task


@pytest.fixture(scope="module")
def count_up():
    return make_task("count_up", seed=1)


@pytest.mark.parametrize(
    ("digit", "response", "reward"),
    [
        ("4", "56789", 1.0),
        ("9", "", 1.0),
        ("0", "123456789", 1.0),
        ("4", "", 0.0),
        ("4", "5678", 4 / 6),
        ("4", "567890", 5 / 7),
        ("4", "56780", 4 / 6),
        ("4", "9", 1 / 6),  # the end after a 9
        ("4", "789", 3 / 6),  # two steps and the end
        ("9", "0", 0.0),
        ("7", "8901234567", 2 / 11),
        ("7", "x9", 1 / 3),
    ],
)
def test_count_up_rewards_right_places(count_up, digit, response, reward):
    assert count_up.reward(Problem("3" + digit, digit), response) == pytest.approx(reward)


def test_only_the_right_answer_earns_everything(count_up):
    for problem in count_up.problems(0, 50):
        right = "0123456789"[int(problem.data) + 1 :]
        assert count_up.reward(problem, right) == 1
        for wrong in (right + "9", right[:-1], right + "0", "1" + right):
            assert wrong == right or count_up.reward(problem, wrong) < 1


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
