"""Small programs that show gaps of Megatron: its result, and this project's."""

import runpy
import sys

import pytest

from tests.support.paths import ROOT
from tests.support.ranks import Layout

UPSTREAM = ROOT / "examples" / "upstream"


def test_a_token_without_recorded_experts_is_routed_by_the_router(capsys):
    runpy.run_path(str(UPSTREAM / "router_replay.py"), run_name="__main__")
    printed = {line[:28].strip(): line[28:].strip() for line in capsys.readouterr().out.splitlines()}
    assert printed["the router alone"] == "[0, 3, 1]"
    assert printed["RouterReplay, unknown as -1"].startswith("RuntimeError")
    assert printed["RouterReplay, unknown as 0"] == "[2, 3, 0]"
    assert printed["this project"] == "[2, 3, 1]"


def compare(tp, pp, cp):
    if str(UPSTREAM) not in sys.path:
        sys.path.insert(0, str(UPSTREAM))
    import selected_log_probs

    return selected_log_probs.compare(tp, pp, cp)


@pytest.mark.parametrize("layout", [Layout(tp=2, cp=2), Layout(tp=2, pp=2)], ids=str)
def test_log_probs_of_sharded_logits_with_context_and_pipeline_parallelism(ranks, layout):
    differences = [of_rank for of_rank in ranks.run(compare, layout, layout.tp, layout.pp, layout.cp) if of_rank]
    assert len(differences) == layout.world // layout.pp
    for numbers in differences:
        assert numbers["gathered"] == 8 * 16 // layout.cp * 4096
        assert numbers["sharded"] < numbers["gathered"] / 2
        assert numbers["difference"] < 1e-5
