"""Rules that the launcher brings."""

import re

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
        (34, "34", 1),
        (34.0, "34", 1),
        (34.0, "34.0", 1),
        (34, "34.0", 0),
        (1e-05, "0.00001", 1),
        ("34.0", "34", 0),
        ("", " ", 1),
        (["seven", 7], "7", 1),
        (["seven", 7], "seven", 1),
        (["seven", 7], "8", 0),
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
        ("34", r"so \boxed{34}", 1),
        (34, r"so \boxed{34}", 1),
        (34.0, r"so \boxed{34}", 1),
        (34.0, r"so \boxed{34.0}", 1),
        ("34", "34.0", 1),
        (34, "35", 0),
        (-0.5, r"$-\frac{1}{2}$", 1),
        # Python writes these numbers with an e, which is a constant or a name in mathematics.
        (1e-05, "0.00001", 1),
        (1e-05, "4", 0),
        (1e22, "1" + 22 * "0", 1),
        (["34", r"\frac{1}{2}", 7], "0.5", 1),
        (["34", r"\frac{1}{2}", 7], "7", 1),
        (["34", r"\frac{1}{2}", 7], "8", 0),
    ],
)
def test_math_verify_compares_expressions(label, response, reward):
    assert score("math-verify", label, response).reward == reward


@pytest.mark.parametrize(
    ("label", "failure"),
    [
        ("", "raised TypeError: --reward math-verify .* an empty text"),
        ("$$", "raised ValueError: math-verify "),
        (None, "raised TypeError: --reward math-verify .* null"),
        (True, "raised TypeError: --reward math-verify .* true or false"),
        ({"ground_truth": "42"}, "raised TypeError: --reward math-verify .* an object"),
        ([["42"]], "raised TypeError: --reward math-verify .* a list"),
        (float("nan"), "raised TypeError: --reward math-verify .* nan"),
    ],
)
def test_math_verify_wants_an_expression_for_a_label(label, failure, caplog):
    """A task's label may be anything; that of a file is refused at the start."""
    assert re.match(failure, score("math-verify", label, "42").failure)
    assert not caplog.records, "that its own time limit is off goes without saying"


def test_what_can_hang_runs_in_workers():
    assert all(Source(task, 1, reward).is_harmless for reward, task in (("exact", "python:a:B"), (None, "count_up")))
    hanging = [(None, "reasoning_gym:chain_sum"), (None, "python:a:B"), ("math-verify", "count_up")]
    assert not any(Source(task, 1, reward).is_harmless for reward, task in [*hanging, ("python:a:b", "count_up")])


def test_a_function_gets_the_tokens_if_it_has_such_a_parameter():
    given = {"prompt": "?", "response": "ab", "label": None, "record": {}, "turns": [], "token_ids": [5, 6, 1]}
    of_tokens, length = (Source("count_up", 1, f"python:tests.support.user_rewards:{name}").load() for name in USERS)
    assert of_tokens(**given) == {"reward": 2, "tokens": 3, "last": 1}
    assert length(**given) == 2
    reply = Source("count_up", 1, "python:tests.support.user_replies:after_observation", "reply").load()
    assert (reply(**given), reply(**given | {"token_ids": [4]})) == (None, "7")


USERS = ("of_tokens", "length")


@pytest.mark.parametrize("name", ["later", "one_by_one", "called_later"])
def test_a_function_that_gives_no_result_when_it_is_called_is_refused(name):
    with pytest.raises(ConfigurationError, match=f"^--reward .*:{name} gives no result when it is called: make it nei"):
        Source("count_up", 1, f"python:tests.support.user_rewards:{name}").load()
