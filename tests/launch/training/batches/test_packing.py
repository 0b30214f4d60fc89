"""Sequences in bins: each once, balanced, none too full."""

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rc.launch.training.batches.packing import balance


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 12))
def test_bins_hold_everything_once(lengths, number):
    bins = balance(lengths, number)
    assert len(bins) == number
    assert sorted(index for one in bins for index in one) == [i for i, length in enumerate(lengths) if length]
    fullest = max(sum(lengths[index] for index in one) for one in bins)
    # No bin is fuller than the emptiest was before its last item came.
    assert fullest <= sum(lengths) / number + max(lengths)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(40, 90), st.integers(0, 5))
def test_no_bin_is_fuller_than_allowed(lengths, capacity, more):
    """Ranks with fewer tokens fill as many bins as the fullest rank."""
    fewest = next(n for n in range(1, 99) if max(_sums(balance(lengths, n), lengths)) <= capacity)
    bins = balance(lengths, fewest + more)
    assert max(_sums(bins, lengths)) <= capacity


def _sums(bins, lengths):
    return [sum(lengths[index] for index in one) for one in bins]
