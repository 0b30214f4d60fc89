"""Rules that the launcher brings."""

import pytest

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.rewards.outcome import outcome_of, read_score
from megatron_rc.launch.rewards.rules import Source


def score(reward, label, response):
    rule = Source("count_up", 1, reward).load()
    return outcome_of(lambda: rule(prompt="?", response=response, label=label, record={}), read_score)


@pytest.mark.parametrize(
    ("label", "response", "reward"),
    [
        ("42", " 42\n", 1),
        (" a b ", "a b", 1),
        (1.5, "1.5", 1),
        ("42", "42.", 0),
    ],
)
def test_exact_compares_all_but_white_space_around(label, response, reward):
    assert score("exact", label, response).reward == reward


@pytest.mark.parametrize(
    ("label", "response", "reward"),
    [
        ("42", "6 times 7 is 42.", 1),
        ("42", "It is 41.", 0),
        (42, r"so \boxed{42}", 1),
        (r"\frac{1}{2}", "The answer is $0.5$", 1),
        (r"\boxed{3}", "3", 1),
        ("1,000", "1000", 1),
    ],
)
def test_math_verify_compares_expressions(label, response, reward):
    assert score("math-verify", label, response).reward == reward


def test_math_verify_wants_an_expression_for_a_label(caplog):
    assert score("math-verify", "", "42").failure.startswith("raised ValueError: math-verify ")
    assert not caplog.records, "that its own time limit is off goes without saying"


def test_what_can_hang_runs_in_workers():
    assert all(Source(task, 1, reward).is_harmless for reward, task in (("exact", "python:a:B"), (None, "count_up")))
    hanging = [(None, "reasoning_gym:chain_sum"), (None, "python:a:B"), ("math-verify", "count_up")]
    assert not any(Source(task, 1, reward).is_harmless for reward, task in [*hanging, ("python:a:b", "count_up")])


@pytest.mark.parametrize("name", ["later", "one_by_one", "called_later"])
def test_a_function_that_gives_no_result_when_it_is_called_is_refused(name):
    with pytest.raises(ConfigurationError, match=f"^--reward .*:{name} gives no result when it is called: make it nei"):
        Source("count_up", 1, f"python:tests.support.user_rewards:{name}").load()
