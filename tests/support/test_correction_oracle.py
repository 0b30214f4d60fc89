"""Tests of the oracle by hand: features that no golden case has.

``tests/correction`` compares the library with the oracle, and with the golden numbers.
"""

import math

import pytest

from tests.support import correction_oracle as oracle


def correct(rows, sides, **settings):
    """The correction of rows of log ρ, None outside the mask; π_rollout = exp(-60)."""
    rollout = [[-60.0] * len(row) for row in rows]
    train = [[(x or 0.0) - 60.0 for x in row] for row in rows]
    return oracle.correct(train, rollout, [[x is not None for x in row] for row in rows], settings, **sides)


def test_opsm_takes_sequences_or_tokens_of_negative_advantage():
    rows = ([-1.0, -0.5], [-1.0, -0.5], [-0.1, -0.1])
    criteria = (("opsm", -0.5, math.inf),)
    sequences = correct(rows, {"advantages": [-1.0, 1.0, -1.0]}, criteria=criteria)
    assert sequences.mask == [[False, False], [True, True], [True, True]]
    tokens = correct(rows, {"advantages": [[-1.0, 1.0], [0.0, -1.0], [-1.0, -1.0]]}, criteria=criteria)
    assert tokens.mask == [[False, True], [True, False], [True, True]]
    assert tokens.metrics["rollout_rs_opsm_masked_fraction"] == pytest.approx(1 / 3)


def test_group_mean_weighs_tokens_alike_and_group_any_takes_the_siblings_of_a_lost_response():
    rows = ([0.9, None, None], [0.0, 0.0, 0.0], [0.5, None, None])
    more = {"group_ids": [7, 7, 8]}
    result = correct(rows, more, criteria=(("group_mean_k1", -1.0, 0.3),))
    assert result.mask == [[True, False, False], [True] * 3, [False] * 3]
    assert result.metrics["rollout_rs_group_mean_k1_seq_masked_fraction"] == pytest.approx(1 / 3)
    rows = ([0.0, 0.0], [-9.0, 0.0], [0.0, 0.0], [None, None], [2.0, 0.0], [0.0, 0.0])
    more = {"group_ids": [0, 0, 1, 1, 2, 2]}
    result = correct(rows, more, veto=0.01, criteria=(("token_k1", -1.0, 1.0), ("group_any", -math.inf, math.inf)))
    assert result.mask == [[False] * 2, [False] * 2, [True] * 2, [False] * 2, [False, True], [True, True]]
    assert result.metrics["rollout_is_veto_fraction"] == pytest.approx(1 / 5)
    assert result.metrics["rollout_rs_group_any_seq_masked_fraction"] == pytest.approx(2 / 5)


def test_breakdowns():
    rows = ([0.0, 1.0, 2.0, 3.0], [4.0, None, None, None], [-1.0, -1.0, None, None])
    more = {"rewards": [1.0, 0.0, -1.0], "versions": [[5, 4, 0, 9], 5, 3], "current_version": 5, "max_staleness": 2}
    result = correct(rows, more, criteria=(("token_k1", -2.0, 2.5),))
    masked = {
        name: {key: row["masked_fraction"] for key, row in rows.items()} for name, rows in result.breakdowns.items()
    }
    assert masked["reward"] == {"negative": 0, "positive": 0.25, "zero": 1}
    assert masked["length"] == {0: 1, 1: 0, 2: 0.25}
    assert masked["staleness"] == {0: pytest.approx(2 / 3), 1: 0, 2: 0}
    assert result.breakdowns["staleness"][2]["kl"] == 0
    assert result.breakdowns["staleness"][0]["token_fraction"] == pytest.approx(3 / 7)
