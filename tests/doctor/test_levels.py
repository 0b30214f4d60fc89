"""Metrics of weights of every level: a healthy run is healthy, and a fault is the same fault."""

import pytest
import torch

from megatron_rc.doctor.rules import judge
from megatron_rc.doctor.series import facts_of_series
from megatron_rc.doctor.tables import own_rows
from tests.support.exported_runs import LEVELS, exported, flags

K3, LENGTH = 0.00015, 2048


def found(rows, settings=None):
    return [verdict.rule.name for verdict in judge(facts_of_series(own_rows(rows, "here")[0], settings))]


def long_responses():
    """64 responses of 2,048 tokens, whose log-ratios are normal and have k3 = 0.00015."""
    generator = torch.Generator().manual_seed(0)
    sigma = (2 * K3) ** 0.5
    rollout = torch.full((64, LENGTH), -1.0)
    old = rollout + sigma * torch.randn(64, LENGTH, generator=generator) - K3
    return {"rollout_log_probs": rollout, "old_log_probs": old, "response_mask": rollout < 0}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("known", [True, False])
def test_long_responses_of_a_healthy_engine_are_healthy(level, known):
    row = exported(long_responses(), LEVELS[level])
    assert row["rollout_corr/k3_kl"] == pytest.approx(K3, rel=0.02)
    assert found([row] * 3, flags(LEVELS[level]) if known else None) == []
