"""Which file a prompt comes from, and in which order: shares, epochs, and random access."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.tasks.prompt_data.mixture import parse_mixture, place

WEIGHTS = st.lists(st.fractions(Fraction(1, 1000), 1000), min_size=1, max_size=6)


def one_after_the_other(weights, count):
    """The same sequence the long way: each time the file whose next prompt is due first."""
    taken = [0] * len(weights)
    results = []
    for _ in range(count):
        turn = min(range(len(weights)), key=lambda index: (Fraction(2 * taken[index] + 1, 2)) / weights[index])
        results.append((turn, taken[turn]))
        taken[turn] += 1
    return results


@settings(deadline=None, max_examples=50)
@given(WEIGHTS, st.integers(1, 60))
def test_a_number_leads_to_its_prompt_without_those_before_it(weights, count):
    assert [place(number, weights) for number in range(count)] == one_after_the_other(weights, count)


@settings(deadline=None, max_examples=50)
@given(WEIGHTS, st.integers(0, 10**12))
def test_a_number_far_away_is_as_near(weights, number):
    index, before = place(number, weights)
    share = weights[index] / sum(weights)
    assert abs(before - number * share) <= len(weights)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("0.7 a b", "^--prompt-data 0.7 a b: expected a positive weight .* 'b'"),
        ("0.7 a 0.3", "positive weight .* '0.3'"),
        ("inf a", "positive weight .* 'inf'"),
        ("1e-999999999 a", "positive weight .* '1e-999999999'"),
        ("a 0.5 b", r"expected a path, got '0\.5': .* \./0\.5"),
        ("0.1 b 0.2 a 0.3 ./b", r"names b twice \(again as \./b\)"),
    ],
)
def test_words_that_are_no_mixture(words, message):
    with pytest.raises(ConfigurationError, match=message):
        parse_mixture("--prompt-data", words.split())
