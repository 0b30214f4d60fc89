"""Routing replay on real Megatron-Core equals the float64 reference with forced experts, in every layout."""

from dataclasses import dataclass

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from megatron_rc.launch.training.models.routing_replay import ReplayedRouter
from tests.launch.training.models.test_moe import BALANCING, EXPERTS, MoeCase, Z, compared
from tests.launch.training.test_matrix import TO_REFERENCE, assert_gradients, whole_gradients
from tests.support import training_cases, training_oracle
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, train_recorded
from tests.support.training_cases import MINI_BATCHES, PER_MINI_BATCH

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
    Replayed(Layout(tp=2, sp=True), "decoupled", replayed="old", packed=True, more=MOE, size=8),
    Replayed(Layout(pp=2, vpp=True), "decoupled", more=FULL, size=4),
    Replayed(Layout(cp=2, dp=2, ep=2), "bypass reinforce", packed=True),
    Replayed(Layout(dp=2, ep=2), "decoupled", replayed="all", dispatcher="allgather"),
    Replayed(Layout(dp=2, ep=2), "decoupled", replayed="old"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layout_is_the_reference(ranks, tmp_path, case):
    everywhere = compared(ranks, tmp_path, case, EXPERTS, case.replayed)
    routers = [name for name in whole_gradients(everywhere, 0) if "router" in name]
    assert len(routers) == training_oracle.LAYERS
    assert all(whole_gradients(everywhere, 0)[name].norm() > 0 for name in routers)
    for index in range(MINI_BATCHES) if case.replayed != "old" else ():
        expected = wanted_shares(case, index)
        for rank in everywhere:
            assert {name: rank.metrics[index][name] for name in expected} == pytest.approx(expected)


def test_auxiliary_losses_count_the_routers_own_choice(ranks, tmp_path):
    """Not the replayed experts: as the page says, and as Megatron computes them."""
    case = Replayed(Layout(), "decoupled", replayed="all", auxiliary=True, size=16)
    data, (old, new) = training_cases.make_data(EXPERTS, "all"), training_cases.weights(EXPERTS)
    everywhere = ranks.run(training_cases.run_case, case.layout, case.words(tmp_path), data, old, new)
    objective = training_cases.expected(case.objective, EXPERTS, "all")
    is_needed = data.mask.flip(1).cumsum(1).flip(1) > 0  # no experts are replayed behind the last trained label
    routes = torch.where(is_needed[..., None, None], data.routes, -1)
    for index in range(MINI_BATCHES):
        rows = [*range(index * PER_MINI_BATCH, (index + 1) * PER_MINI_BATCH)]
        auxiliary = training_oracle.auxiliary_gradients(new, data.tokens, [rows], BALANCING, Z, routes)
        expected = {name: gradient + auxiliary[name] for name, gradient in objective.gradients[index].items()}
        assert_gradients(whole_gradients(everywhere, index), expected, TO_REFERENCE)


@pytest.mark.parametrize("pattern", ["[0,0,1,1]", "[1,0,1,0]"])
def test_stages_without_experts_and_dense_layers_between(ranks, tmp_path, pattern):
    """The metrics name the layers with experts; the second step on a batch differs from the pass that it replays."""
    layout = Layout(pp=2)
    replay = ["--moe-enable-routing-replay", "--moe-routing-replay-source=old"]
    arguments = ["--num-experts=4", "--moe-ffn-hidden-size=24", f"--moe-layer-freq={pattern}", *replay]
    everywhere = ranks.run(train_recorded, layout, flags(tmp_path, *arguments, *layout.flags()), 1)
    layers = [layer for layer, kind in enumerate(pattern[1:-1].split(",")) if kind == "1"]
    for first, second in everywhere:
        names = {f"routing/differing_layer_{layer}" for layer in layers}
        assert {name for name in first if "_layer_" in name} == names
        assert first["routing/differing"] == 0
        assert second["routing/differing"] > 0


def wanted_shares(case, mini_batch):
    """The metrics of the routers' choices, over all layers and ranks, in a step at the new weights."""
    data = training_cases.make_data(EXPERTS, case.replayed)
    weights = training_cases.weights(EXPERTS)[1]
    exact = {name: weight.double() for name, weight in weights.items()}
    rows = (data.mini_batch_ids == mini_batch).nonzero().flatten()
    routes = data.routes[rows]
    shape = data.routes[rows].shape
    is_needed = data.mask[rows].flip(1).cumsum(1).flip(1) > 0  # up to the last trained label
    known = differing = unknown = 0
    shares = {}
    narrowest = 1.0
    for layer, router in enumerate(training_oracle.routers_of(exact, data.tokens[rows], routes)):
        highest, chosen = router.view(*shape[:2], EXPERTS).sort(dim=-1, descending=True)
        given = routes[:, :, layer]
        live = chosen[..., :2]
        replayed = is_needed & (given >= 0).all(-1)
        free = is_needed & (given < 0).any(-1)
        narrowest = min(narrowest, (highest[..., 1] - highest[..., 2])[is_needed].min().item())
        is_live = (given.unsqueeze(-1) == live.unsqueeze(-2)).any(-1)
        others = int((~is_live[replayed]).sum())
        choices = 2 * int(replayed.sum())
        shares[f"routing/differing_layer_{layer}"] = others / choices
        known = known + choices
        differing = differing + others
        unknown = unknown + 2 * int(free.sum())
    assert narrowest > 1e-5, "rounding could flip a choice"
    assert 0.2 < differing / known < 0.8
    assert (unknown > 0.1 * (known + unknown)) == (case.replayed == "some")
    return shares | {"routing/differing": differing / known, "routing/unknown": unknown / (known + unknown)}


ROUTERS = {
    "softmax": {},
    "pre-softmax": {"use_pre_softmax": True, "scaling_factor": 2.5},
    "sigmoid": {"score_function": "sigmoid", "expert_bias": torch.linspace(-1, 1, 8)},
    "groups": {"score_function": "sigmoid", "num_groups": 4, "group_topk": 2},
}


def routed(replay, logits, settings):
    """(weights, chosen experts, gradient of a sum of weighted weights) of Megatron's own function."""
    given = logits.clone().requires_grad_()
    weights, chosen = topk_routing_with_score_function(given, 3, router_replay=replay, **settings)
    (weights * torch.arange(weights.numel()).view_as(weights)).sum().backward()
    return weights, chosen, given.grad


@pytest.mark.parametrize("settings", ROUTERS.values(), ids=ROUTERS)
def test_known_experts_are_replayed_as_by_megatron(settings):
    """Bit for bit; for unknown ones as by the router alone, token by token."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 8, generator=generator)
    experts = torch.rand(40, 8, generator=generator).topk(3).indices
    theirs = RouterReplay()
    ours = ReplayedRouter(0, torch.device("cpu"))
    RouterReplay.global_router_replay_instances.remove(theirs)
    theirs.set_target_indices(experts)
    theirs.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    ours.experts = experts.short()
    ours.is_running = True
    replayed = routed(ours, logits, settings)
    for got, expected in zip(replayed, routed(theirs, logits, settings), strict=True):
        assert torch.equal(got, expected)
    unknown = torch.arange(40) % 3 == 0
    partly = torch.where(torch.arange(3) == 1, -1, experts)
    ours.experts = torch.where(unknown.unsqueeze(1), partly, experts).short()
    own = routed(None, logits, settings)
    for got, known, free in zip(routed(ours, logits, settings), replayed, own, strict=True):
        assert torch.equal(got, torch.where(unknown.unsqueeze(1), free, known))
    assert RouterReplay.global_router_replay_instances == []
