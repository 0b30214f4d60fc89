"""Tasks: the same problems for everyone, and rewards that only the right answer fills."""

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
    assert scored(count_up, Problem("37", answer), response) == pytest.approx(reward)


def test_the_answers_count_up_to_nine(count_up):
    problems = count_up.problems(0, 50)
    assert {len(problem.label) for problem in problems} == set(range(10))
    for problem in problems:
        assert problem.prompt[-1] + problem.label == "0123456789"[-len(problem.label) - 1 :]


@pytest.mark.parametrize("name", ["count_up", "sums", "reasoning_gym:chain_sum"])
def test_problems_are_numbered_and_repeatable(name):
    task, same, other = make_task(name, 1), make_task(name, 1), make_task(name, 2)
    prompts = [problem.prompt for problem in task.problems(0, 8)]
    assert [p.prompt for p in same.problems(4, 4)] == prompts[4:]
    assert [p.prompt for p in other.problems(0, 8)] != prompts
    for prompt in prompts:
        ids = task.text.encode(Problem(prompt, None))
        assert task.text.tokenizer.token_to_id("<unk>") not in ids
        assert task.text.decode(ids) == prompt


def test_questions_that_leave_no_room_are_passed_over():
    free, kept = (make_task("reasoning_gym:chain_sum", 1, None, length) for length in (None, 32 + 90))
    lengths = [[len(task.text.encode(problem)) for problem in task.problems(0, 200)] for task in (free, kept)]
    assert max(lengths[0]) > 90 >= max(lengths[1])
    short = [index for index, length in enumerate(lengths[0]) if length <= 90]
    assert [lengths[1][index] for index in short] == [lengths[0][index] for index in short], "the others stay"
    with pytest.raises(
        ConfigurationError, match=r"leaves 40 tokens for a prompt, and the shortest of 200 problems has \d+"
    ):
        make_task("reasoning_gym:chain_sum", 1, None, 50, 10).problems(0, 1)


def test_reasoning_gym_scores_its_own_answers():
    task = make_task("reasoning_gym:chain_sum", 1)
    for problem in task.problems(0, 5):
        assert scored(task, problem, problem.label) == 1
        assert scored(task, problem, "no idea") < 0.1


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("4 + 5 = 9, 9 + 6 = 15. Answer: 15", 1),
        (" Answer: 15.\n1 + 1 = ?", 1),
        ("4 + 5 = 9, 9 + 6 = 15. Answer: 14", 0),
        ("Answer: 15 or so", 0),
        ("15", 0),
        ("\nAnswer: 15", 1),
        ("I think\nAnswer: 15", 0),
        ("Answer: 150", 0),
        ("", 0),
    ],
)
def test_sums_reward_the_answer_at_the_end_of_the_first_line(response, reward):
    assert scored(make_task("sums", 1), Problem("4 + 5 + 6 = ?\n", 15), response) == reward


def test_the_examples_of_sums_would_be_rewarded():
    task = make_task("sums", 1)
    for problem in task.problems(0, 3):
        for prompt, answer in problem.examples:
            numbers = [int(word) for word in prompt.split() if word.isdigit()]
            assert scored(task, Problem(prompt, sum(numbers)), answer) == 1
            assert prompt != problem.prompt


@pytest.mark.parametrize(("name", "trained"), [("sums", 1200), ("reasoning_gym:chain_sum", 300)])
def test_what_is_held_out_is_never_trained_on(name, trained):
    task, count = make_task(name, 1), 100
    held_out = {problem.prompt for problem in task.problems(0, count, held_out=True)}
    assert len(held_out) > 90
    assert not held_out & {problem.prompt for problem in task.problems(0, trained)}
    assert [p.prompt for p in make_task(name, 1).problems(7, 3, held_out=True)] == [
        p.prompt for p in task.problems(0, 10, held_out=True)
    ][7:]


def test_every_training_problem_comes_once_a_round():
    task = make_task("sums", 1)
    trained = [problem.prompt for problem in task.problems(0, 582)]
    assert len(set(trained)) == 582
    assert set(trained) == {problem.prompt for problem in task.problems(582, 582)}
    assert trained != [problem.prompt for problem in task.problems(582, 582)]


@pytest.mark.parametrize(
    ("name", "message"),
    [("count_up", "count_up holds no problems out"), ("sums", "holds 145 problems out, 146 were asked for")],
)
def test_more_than_is_held_out_is_refused(name, message):
    with pytest.raises(ConfigurationError, match=message):
        make_task(name, 1).problems(0, 146, held_out=True)


@pytest.mark.parametrize("name", ["chess", "count_up:9", "sums:4", "reasoning_gym", "reasoning_gym:none"])
def test_unknown_tasks_are_named(name):
    with pytest.raises(ConfigurationError, match="--task"):
        make_task(name, 1)
