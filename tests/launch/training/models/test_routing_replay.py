"""Routing replay on real Megatron-Core equals the float64 reference with forced experts, in every layout."""

import dataclasses
from dataclasses import dataclass

import pytest

from tests.launch.training.models.test_moe import EXPERTS, MoeCase
from tests.launch.training.test_matrix import (
    TO_REFERENCE,
    assert_gradients,
    assert_metrics,
    whole_gradients,
)
from tests.support import training_cases, training_oracle
from tests.support.ranks import Layout
from tests.support.training_cases import MINI_BATCHES

NARROW = 1e-3
FULL = ("--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1")
MOE = ("--recompute-granularity=selective", "--recompute-modules", "moe")


@dataclass(frozen=True)
class Replayed(MoeCase):
    """A run with routing replay; ``replayed``: see ``training_cases.make_routes``."""

    replayed: str = "some"
    more: tuple[str, ...] = ()

    def words(self, folder):
        source = "old" if self.replayed == "old" else "rollout"
        return [
            *super().words(folder),
            "--moe-enable-routing-replay",
            f"--moe-routing-replay-source={source}",
            *self.more,
        ]

    def __str__(self):
        return "-".join([super().__str__(), self.replayed, *(word.partition("=")[2] for word in self.more[:1])])


CASES = [
    Replayed(Layout(), "decoupled"),
    Replayed(Layout(), "decoupled", replayed="all", more=FULL, size=2),
    Replayed(Layout(), "decoupled", replayed="old", more=MOE),
    Replayed(Layout(tp=2, sp=True), "decoupled", more=FULL),
    Replayed(Layout(tp=2, sp=True), "bypass reinforce", packed=True),
    Replayed(Layout(tp=2, sp=True), "decoupled", replayed="old", packed=True, more=MOE),
    Replayed(Layout(pp=2, vpp=True), "decoupled", more=FULL, size=2),
    Replayed(Layout(pp=2, vpp=True), "decoupled", replayed="old", size=2, more=FULL),
    Replayed(Layout(pp=2), "bypass ppo_clip", variant=1, size=1),
    Replayed(Layout(cp=2), "decoupled", more=MOE),
    Replayed(Layout(cp=2, dp=2, ep=2), "bypass reinforce", packed=True),
    Replayed(Layout(cp=2, dp=2), "decoupled", replayed="old", packed=True, size=2),
    Replayed(Layout(dp=2, ep=2), "decoupled", replayed="all", dispatcher="allgather", size=1),
    Replayed(Layout(pp=2, dp=2, ep=2), "decoupled", replayed="old"),
]


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    """What every rank of a case brings back."""
    folder = tmp_path_factory.mktemp("replay")

    def run(case, change=lambda routes: routes):
        data = training_cases.make_data(EXPERTS, case.replayed)
        data = dataclasses.replace(data, routes=change(data.routes))
        return ranks.run(
            training_cases.run_case, case.layout, case.words(folder), data, *training_cases.weights(EXPERTS)
        )

    return run


def assert_case(everywhere, case):
    expected = training_cases.expected(case.objective, EXPERTS, case.replayed)
    for index in range(MINI_BATCHES):
        assert_metrics(everywhere, expected, index)
        assert_gradients(whole_gradients(everywhere, index), expected.gradients[index], TO_REFERENCE)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layout_is_the_reference(run, case):
    everywhere = run(case)
    assert_case(everywhere, case)
    routers = [name for name in whole_gradients(everywhere, 0) if "router" in name]
    assert len(routers) == training_oracle.LAYERS
    assert all(whole_gradients(everywhere, 0)[name].norm() > 0 for name in routers)
