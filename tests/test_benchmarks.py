"""The benchmarks' own arithmetic."""

import math
import types

import pytest
import torch

from benchmarks import correction, peers, step


def test_contenders_of_which_one_gives_nan_differ():
    def result(mean):
        return {"rollout_corr/rollout_is_mean": mean}, torch.ones(2), torch.ones(2, dtype=torch.bool)

    correction.check_alike({"eager": result(1.0), "other": result(1.0)})
    for eager, other in ((1.0, math.nan), (math.nan, 1.0), (1.0, 1.1)):
        with pytest.raises(AssertionError, match="rollout_is_mean is"):
            correction.check_alike({"eager": result(eager), "other": result(other)})


def test_a_step_in_which_nothing_was_timed_has_no_share():
    def method():
        """A method that is timed."""

    owner = types.SimpleNamespace(plan=method, corrected=method, finish_step=method)
    owner.steps = types.SimpleNamespace(count=method, record=method)
    with pytest.raises(RuntimeError, match="no call of the correction was timed"), step.timed_correction(owner):
        pass


def test_a_step_beside_trl_is_the_sum_of_its_phases():
    ours = [{"sync": 1.0, "rollout": 2.0, "plan": 3.0, "update": part} for part in (4.0, 6.0, 14.0)]
    rows = peers.table({peers.TRL: [{"step": 24.0}, {"step": 8.0}, {"step": 40.0}], "ours": ours}).splitlines()[2:]
    assert rows == ["| TRL | 24.0 | 1.00 | | | | |", "| ours | 12.0 | 0.50 | 1.0 | 2.0 | 3.0 | 6.0 |"]
