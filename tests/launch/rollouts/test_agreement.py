"""How far engine and trainer may lie apart, and what explains it where they do."""

import pytest
import torch

from megatron_rc.launch.engines.rounding import DTYPES
from megatron_rc.launch.rollouts.agreement import ROUNDING, judge, lag_distances, tolerance
from tests.support.recorded_training import flags, run_config


def test_distances_by_hand():
    """Pairs across a hole or a seam between two chunks do not count."""
    train = torch.tensor([[1.0, 2.0, 4.0, 7.0, 11.0]])
    rollout = torch.tensor([[2.0, 4.0, 7.0, 11.0, 20.0]])
    mask = torch.tensor([[True, True, True, False, True]])
    positions = torch.tensor([[0, 1, 2, 6, 7]])
    # Pairs (0, 1) and (1, 2): lag 0 has |1-2| + |2-4|, lag +1 |1-4| + |2-7|, lag -1 |2-2| + |4-4|.
    assert lag_distances(train, rollout, mask, positions).tolist() == [3, 8, 0, 2]
    positions[0, 1] = 5
    assert lag_distances(train, rollout, mask, positions).tolist()[-1] == 0


def test_responses_without_two_neighbouring_tokens_tell_nothing():
    (finding,) = judge({1.0: [0, 0, 0, 0]}, 1.0, 0.1)
    assert (finding.about, finding.agrees) == ("log-probs", False)


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        (["--rollout-dtype=fp32"], 1e-3),
        (["--rollout-dtype=fp32", "--bf16"], 0.1),
        (["--rollout-dtype=int8", "--bf16"], 0.25),
    ],
)
def test_rounding_on_either_side_is_allowed_for(tmp_path, words, limit):
    assert tolerance(run_config(flags(tmp_path, *words))) == limit
    assert set(ROUNDING) == set(DTYPES), "every dtype has a limit"
