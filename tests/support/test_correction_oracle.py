"""Tests of the oracle by hand: features that no golden case has.

``tests/correction`` compares the library with the oracle, and with the golden numbers.
"""

import math

import pytest

from tests.support import correction_oracle as oracle

LN2 = math.log(2)


def batch(*rows):
    """(train, rollout, mask) of log ρ at each position, None outside the mask; π_rollout = exp(-60)."""
    rollout = [[math.nan if x is None else -60.0 for x in row] for row in rows]
    train = [[math.nan if x is None else x - 60.0 for x in row] for row in rows]
    return train, rollout, [[x is not None for x in row] for row in rows]


def correct(rows, more=None, **settings):
    return oracle.correct(*batch(*rows), settings, **(more or {}))


def test_denominators_and_lengths():
    rows = ([0.0, 2.0, 0.0], [2.0, 2.0, None], [0.0, 0.0, None], [None, None, None])
    more = {"mini_batch_ids": [0, 2, 0, 1], "num_mini_batches": 3}
    accepted = correct(rows, more, criteria=(("token_k1", -1.0, 1.0),))
    assert accepted.denominators == [[5, 2, 4, 2], [0, 0, 0, 0], [2, 1, 0, 0]]
    assert accepted.skip == [False, True, True]
    assert accepted.sequence_lengths == [2, 0, 2, 0]
    assert correct(rows, denominator="original").sequence_lengths == [3, 2, 2, 0]


def test_normalisation_counts_a_sequence_once():
    rows = ([LN2, None, None], [0.0, 0.0, 0.0], [None, None, None], [-1.0, -1.0, None])
    settings = {"level": "sequence", "batch_normalize": True, "criteria": (("seq_sum_k1", -1.0, 1.0),)}
    mean = (2 + 1 + math.exp(-2)) / 3
    assert correct(rows, **settings).weights[0][0] == pytest.approx(2 / mean)
    scoped = correct(rows, scope="accepted", **settings)
    assert scoped.metrics["rollout_is_batch_norm_factor"] == pytest.approx(1.5)
    assert scoped.weights[3][0] == pytest.approx(math.exp(-2) / 1.5), "a rejected token keeps its weight"
    assert scoped.metrics["rollout_is_applied_max"] == pytest.approx(2 / 1.5)
    tiny = correct([[-30.0]], level="token", batch_normalize=True)
    assert tiny.weights == [[math.exp(-20)]]
    assert tiny.metrics["rollout_is_batch_norm_factor"] == 1


def test_opsm_takes_sequences_or_tokens_of_negative_advantage():
    rows, criteria = ([-1.0, -0.5], [-1.0, -0.5], [-0.1, -0.1]), (("opsm", -0.5, math.inf),)
    sequences = correct(rows, {"advantages": [-1.0, 1.0, -1.0]}, criteria=criteria)
    assert sequences.mask == [[False, False], [True, True], [True, True]]
    tokens = correct(rows, {"advantages": [[-1.0, 1.0], [0.0, -1.0], [-1.0, -1.0]]}, criteria=criteria)
    assert tokens.mask == [[False, True], [True, False], [True, True]]
    assert tokens.metrics["rollout_rs_opsm_masked_fraction"] == pytest.approx(1 / 3)


def test_group_mean_weighs_tokens_alike_and_group_any_takes_the_siblings_of_a_lost_response():
    rows, more = ([0.9, None, None], [0.0, 0.0, 0.0], [0.5, None, None]), {"group_ids": [7, 7, 8]}
    result = correct(rows, more, criteria=(("group_mean_k1", -1.0, 0.3),))
    assert result.mask == [[True, False, False], [True] * 3, [False] * 3]
    assert result.metrics["rollout_rs_group_mean_k1_seq_masked_fraction"] == pytest.approx(1 / 3)
    rows = ([0.0, 0.0], [-9.0, 0.0], [0.0, 0.0], [None, None], [2.0, 0.0], [0.0, 0.0])
    more = {"group_ids": [0, 0, 1, 1, 2, 2]}
    result = correct(rows, more, veto=0.01, criteria=(("token_k1", -1.0, 1.0), ("group_any", -math.inf, math.inf)))
    assert result.mask == [[False] * 2, [False] * 2, [True] * 2, [False] * 2, [False, True], [True, True]]
    assert result.metrics["rollout_is_veto_fraction"] == pytest.approx(1 / 5)
    assert result.metrics["rollout_rs_group_any_seq_masked_fraction"] == pytest.approx(2 / 5)


@pytest.mark.parametrize(
    ("policy", "mask", "lengths"),
    [("reject_token", [[False, True], [True, True]], [1, 2]), ("reject_sequence", [[False] * 2, [True] * 2], [2, 2])],
)
@pytest.mark.parametrize("value", [math.nan, 2e-4])
def test_bad_tokens_are_in_no_statistic(policy, mask, lengths, value):
    train, rollout, valid = batch([0.0, 0.5], [0.25, 0.25])
    rollout[0][0] = value
    result = oracle.correct(train, rollout, valid, {"level": "sequence", "bad": policy, "denominator": "original"})
    assert result.mask == mask
    assert result.sequence_lengths == lengths
    assert result.metrics["num_tokens"] == 3
    assert result.metrics["kl"] == pytest.approx(-1 / 3)
    assert result.weights[0] == [0.0, pytest.approx(math.exp(0.5))]


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
