"""The benchmarks' own arithmetic."""

from benchmarks import peers


def test_a_step_beside_trl_is_the_sum_of_its_phases():
    ours = [{"sync": 1.0, "rollout": 2.0, "plan": 3.0, "update": part} for part in (4.0, 6.0, 14.0)]
    rows = peers.table({peers.TRL: [{"step": 24.0}, {"step": 8.0}, {"step": 40.0}], "ours": ours}).splitlines()[2:]
    assert rows == ["| TRL | 24.0 | 1.00 | | | | |", "| ours | 12.0 | 0.50 | 1.0 | 2.0 | 3.0 | 6.0 |"]
