"""Tasks: the same problems for everyone, and rewards that only the right answer fills."""

import importlib.util

import pytest

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.tasks import Problem, make_task


def scored(task, problem, response):
    return task.reward(prompt=problem.prompt, response=response, label=problem.label, record=problem.record)


@pytest.fixture(scope="module")
def count_up():
    return make_task("count_up", seed=1)


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("56789", "56789", 1.0),
        ("", "", 1.0),
        ("56789", "5678", 4 / 6),
        ("56789", "567890", 5 / 6),
        ("56789", "66789", 0.0),
    ],
)
def test_count_up_rewards_what_is_right_up_to_the_first_mistake(count_up, answer, response, reward):
    assert scored(count_up, Problem("37", answer), response) == pytest.approx(reward)


def test_the_answers_count_up_to_nine(count_up):
    problems = count_up.problems(0, 50)
    assert {len(problem.label) for problem in problems} == set(range(10))
    for problem in problems:
        assert problem.prompt[-1] + problem.label == "0123456789"[-len(problem.label) - 1 :]
    with pytest.raises(ConfigurationError, match="count_up holds no problems out"):
        count_up.problems(0, 1, held_out=True)


@pytest.mark.parametrize("name", ["count_up", pytest.param("reasoning_gym:chain_sum", marks=pytest.mark.reasoning_gym)])
def test_problems_are_numbered_and_repeatable(name):
    task = make_task(name, 1)
    same = make_task(name, 1)
    other = make_task(name, 2)
    prompts = [problem.prompt for problem in task.problems(0, 8)]
    assert [p.prompt for p in same.problems(4, 4)] == prompts[4:]
    assert [p.prompt for p in other.problems(0, 8)] != prompts
    for prompt in prompts:
        ids = task.text.encode(Problem(prompt, None))
        assert task.text.tokenizer.token_to_id("<unk>") not in ids
        assert task.text.decode(ids) == prompt


def test_a_task_of_a_library_that_is_missing_names_its_extra(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "reasoning_gym" else find_spec(name, *rest),
    )
    with pytest.raises(ConfigurationError, match=r"--task reasoning_gym:chain_sum .*pip install .*\[reasoning-gym\]"):
        make_task("reasoning_gym:chain_sum", seed=1)


@pytest.mark.reasoning_gym
def test_questions_that_leave_no_room_are_passed_over():
    free, kept = (make_task("reasoning_gym:chain_sum", 1, None, length) for length in (None, 32 + 90))
    lengths = [[len(task.text.encode(problem)) for problem in task.problems(0, 200)] for task in (free, kept)]
    assert max(lengths[0]) > 90 >= max(lengths[1])
    short = [index for index, length in enumerate(lengths[0]) if length <= 90]
    assert [lengths[1][index] for index in short] == [lengths[0][index] for index in short], "the others stay"
    with pytest.raises(ConfigurationError, match=r"leaves 40 tokens .* 200 problems has \d+"):
        make_task("reasoning_gym:chain_sum", 1, None, 50, 10).problems(0, 1)


@pytest.mark.reasoning_gym
def test_what_is_held_out_is_never_trained_on():
    task = make_task("reasoning_gym:chain_sum", 1)
    count = 100
    held_out = [problem.prompt for problem in task.problems(0, count, held_out=True)]
    assert len(set(held_out)) > 90
    assert not set(held_out) & {problem.prompt for problem in task.problems(0, 300)}
    again = make_task("reasoning_gym:chain_sum", 1).problems(7, 3, held_out=True)
    assert [problem.prompt for problem in again] == held_out[7:10]
    for problem in task.problems(0, 5):
        assert scored(task, problem, problem.label) == 1
        assert scored(task, problem, "no idea") < 0.1
