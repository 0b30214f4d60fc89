"""A mixture of experts trains alike wherever its experts lie: as on one process, and as the float64 reference says.

Expert parallelism (EP) spreads the experts over ranks of the same stage that hold different tokens; no group of the
correction changes with it. Megatron sums an expert's gradient over its replicas, but divides it by the number of all
data and context ranks, as it divides every other: the tokens of the ranks without that expert came to it, too.
"""

import functools
import itertools
from dataclasses import dataclass, fields, replace
from unittest import mock

import pytest
import torch
from torch import distributed

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.checks.experts import weakens_auxiliary_losses
from megatron_rc.launch.flags.configure import configure
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.groups import group_rank, group_size
from megatron_rc.training.rollout_correction import RolloutCorrection
from tests.launch.training.test_matrix import (
    TO_REFERENCE,
    TO_SINGLE,
    assert_budget,
    assert_gradients,
    assert_metrics,
    whole_gradients,
)
from tests.support import training_cases, training_oracle
from tests.support.ranks import Layout
from tests.support.recorded_training import make_trainer
from tests.support.training_cases import MINI_BATCHES, PER_MINI_BATCH, Case

EXPERTS = 4
NARROW = 1e-3
BALANCING, Z = 0.5, 0.02
AUXILIARY = (f"--moe-aux-loss-coeff={BALANCING}", f"--moe-z-loss-coeff={Z}")


@dataclass(frozen=True)
class MoeCase(Case):
    """A run of a model with experts; ``original``: with the denominators under the response mask."""

    size: int = 4
    dispatcher: str = "alltoall"
    auxiliary: bool = False
    original: bool = False

    @property
    def objective(self):
        found = super().objective
        if not self.original:
            return found
        words = (*found.words, "--rejection-denominator=original")
        return replace(found, words=words, settings=replace(found.settings, denominator="original"))

    def words(self, folder):
        experts = [f"--num-experts={EXPERTS}", f"--moe-ffn-hidden-size={training_oracle.EXPERT_INNER}"]
        experts += [f"--moe-token-dispatcher-type={self.dispatcher}"]
        return super().words(folder) + experts + [*AUXILIARY] * self.auxiliary

    def __str__(self):
        return "-".join([super().__str__(), *["allgather"] * (self.dispatcher == "allgather")])


CASES = [
    MoeCase(Layout(), "decoupled"),
    MoeCase(Layout(dp=2, ep=2), "decoupled", dispatcher="allgather", per_token_loss=True, size=2),
    MoeCase(Layout(dp=2, ep=2), "decoupled"),
    MoeCase(Layout(dp=2, ep=2), "bypass reinforce", packed=True),
    MoeCase(Layout(cp=2, ep=2), "bypass ppo_clip", variant=1),
    MoeCase(Layout(cp=2, dp=2, ep=2), "bypass reinforce", packed=True, per_token_loss=True),
    MoeCase(Layout(tp=2, sp=True), "decoupled", packed=True),
    MoeCase(Layout(tp=2, dp=2, ep=2, sp=True), "bypass ppo_clip", variant=1, packed=True, per_token_loss=True),
    MoeCase(Layout(pp=2), "bypass ppo_clip", variant=1),
    MoeCase(Layout(pp=2, dp=2, ep=2), "bypass reinforce"),
]


def run_case(words, data, old, new):
    """As ``training_cases.run_case``; besides, the members of this rank's groups, and every D₀/G."""
    right, factors = RolloutCorrection.finish_step, []

    def finish_step(self, device=None):
        factors.append(right(self, device))
        return factors[-1]

    with mock.patch.object(RolloutCorrection, "finish_step", finish_step):
        found = training_cases.run_case(words, data, old, new)
    groups = ParallelGroups.from_megatron()
    members = {one.name: distributed.get_process_group_ranks(getattr(groups, one.name)) for one in fields(groups)}
    return found, members, [float(factor) for factor in factors]


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    """What every rank of a case brings back; each case runs once."""
    folder = tmp_path_factory.mktemp("moe")
    given = [training_cases.make_data(EXPERTS), *training_cases.weights(EXPERTS)]
    return functools.cache(lambda case: ranks.run(run_case, case.layout, case.words(folder), *given))


@pytest.fixture(scope="module")
def gradients(run):
    """Those of the whole model in one mini-batch of a case."""
    return lambda case, index: whole_gradients([found for found, _, _ in run(case)], index)


def compared(ranks, folder, case, *of_data):
    """What every rank of a case brings back, which is the reference's; ``of_data``: arguments of ``make_data``."""
    given = [training_cases.make_data(*of_data), *training_cases.weights(of_data[0])]
    everywhere = ranks.run(training_cases.run_case, case.layout, case.words(folder), *given)
    expected = training_cases.expected(case.objective, *of_data)
    for index in range(MINI_BATCHES):
        assert_metrics(everywhere, expected, index)
        assert_gradients(whole_gradients(everywhere, index), expected.gradients[index], TO_REFERENCE)
    return everywhere


def wanted_members(layout, rank):
    """The groups of a rank: they follow from the layout without its experts."""
    grid = torch.arange(layout.world).view(layout.pp, layout.dp, layout.cp, layout.tp)
    pp, dp, cp, tp = (grid == rank).nonzero()[0].tolist()
    own = {"tp": grid[pp, dp, cp], "cp": grid[pp, dp, :, tp], "dp_cp": grid[pp, :, :, tp]}
    own |= {"dp": grid[pp, :, cp, tp], "pp": grid[:, dp, cp, tp]}
    return {name: ranks.flatten().tolist() for name, ranks in own.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layout_is_the_reference(run, gradients, case):
    everywhere = [found for found, _, _ in run(case)]
    expected = training_cases.expected(case.objective, EXPERTS)
    alone = MoeCase(Layout(), case.mode, case.variant)
    for index in range(MINI_BATCHES):
        assert_metrics(everywhere, expected, index)
        assert_gradients(gradients(case, index), expected.gradients[index], TO_REFERENCE)
        assert_gradients(gradients(case, index), gradients(alone, index), TO_SINGLE)
    assert_budget(everywhere, case)
    for rank, (_, members, _) in enumerate(run(case)):
        assert members == wanted_members(case.layout, rank)


def test_gradients_averaged_over_the_experts_replicas_alone_fail(gradients):
    """Twice as large: with EP 2 over two ranks, every expert is alone."""
    case = MoeCase(Layout(dp=2, ep=2), "decoupled")
    wrong = {name: g * (2 if "local_experts" in name else 1) for name, g in gradients(case, 0).items()}
    with pytest.raises(AssertionError, match=r"gradient of .*local_experts"):
        assert_gradients(wrong, training_cases.expected(case.objective, EXPERTS).gradients[0], TO_REFERENCE)


@functools.cache
def with_auxiliary(objective, index):
    """The reference's gradients with those of the router losses, which no weight and no denominator touches."""
    first, size = index * PER_MINI_BATCH, MoeCase.size
    micro_batches = [[*range(start, start + size)] for start in range(first, first + PER_MINI_BATCH, size)]
    tokens, new = training_cases.make_data(EXPERTS).tokens, training_cases.weights(EXPERTS)[1]
    auxiliary = training_oracle.auxiliary_gradients(new, tokens, micro_batches, BALANCING, Z)
    gradients = training_cases.expected(objective, EXPERTS).gradients[index]
    router = "decoder.layers.0.mlp.router.weight"
    assert auxiliary[router].norm() > 0.1 * gradients[router].norm(), "too small to be seen"
    return {name: gradient + auxiliary[name] for name, gradient in gradients.items()}


SPLITS = [Layout(dp=2, ep=2), Layout(cp=2, ep=2), Layout(tp=2, sp=True)]


@pytest.mark.parametrize(
    ("layout", "per_token_loss"), [(Layout(dp=2), False), *itertools.product(SPLITS, [False, True])], ids=str
)
def test_router_losses_are_the_reference(gradients, tmp_path, layout, per_token_loss):
    """With ``calculate_per_token_loss`` and without, spread and together.

    Megatron-Core before 0.19 divides the router losses once too often under TP or CP: there it must be refused.
    """
    base = MoeCase(Layout(dp=2), "decoupled", auxiliary=True)
    case = replace(base, layout=layout, per_token_loss=per_token_loss)
    if per_token_loss and layout.tp * layout.cp > 1 and weakens_auxiliary_losses():
        with pytest.raises(ConfigurationError, match="--calculate-per-token-loss"):
            configure(case.words(tmp_path), layout.world, engine=False)
        return
    for index in range(MINI_BATCHES):
        assert_gradients(gradients(case, index), with_auxiliary(case.objective, index), TO_REFERENCE)
        assert_gradients(gradients(case, index), gradients(base, index), TO_SINGLE)


def test_router_losses_beside_a_known_denominator_in_bypass_mode(run, gradients):
    case = MoeCase(Layout(dp=2, ep=2), "bypass ppo_clip", variant=1, auxiliary=True, original=True)
    for _, _, factors in run(case):
        assert factors == [1.0] * MINI_BATCHES
    for index in range(MINI_BATCHES):
        assert all(torch.isfinite(gradient).all() for gradient in gradients(case, index).values())
        assert_gradients(gradients(case, index), with_auxiliary(case.objective, index), TO_REFERENCE)


@pytest.mark.parametrize("coefficient", AUXILIARY)
def test_router_losses_beside_an_unknown_denominator_are_refused(tmp_path, coefficient):
    case = MoeCase(Layout(), "bypass ppo_clip", variant=1)
    with pytest.raises(ConfigurationError, match="use rejection_denominator=original"):
        configure([*case.words(tmp_path), coefficient], 1, engine=False)


def test_no_router_decides_narrowly():
    for weights in training_cases.weights(EXPERTS):
        whole = {name: weight.double() for name, weight in weights.items()}
        for router in training_oracle.routers_of(whole, training_cases.make_data(EXPERTS).tokens):
            ordered = router.sort(dim=-1, descending=True).values
            last, next_one = (ordered[:, training_oracle.EXPERTS_OF_A_TOKEN - 1 + more] for more in (0, 1))
            assert float((last - next_one).min()) > NARROW
            chosen = (
                router.topk(training_oracle.EXPERTS_OF_A_TOKEN, dim=-1).indices.flatten().bincount(minlength=EXPERTS)
            )
            assert int(chosen.min()) > 0.05 * len(router), "an expert is idle"


def take_steps(words, data, old):
    """Metrics of the optimizer steps of all mini-batches."""
    trainer = make_trainer(words)
    training_cases.load(trainer.chunks, old)
    with trainer.reference.in_place_of(trainer.chunks):
        training_cases.load(trainer.chunks, old)
    dp = trainer.groups.dp
    prepared = trainer.prepare(training_cases.batch_of(data, group_rank(dp), group_size(dp))[0])
    return [trainer.update(prepared, index) for index in range(MINI_BATCHES)]


def test_optimizer_steps_are_those_of_experts_together(ranks, tmp_path):
    """The gradient norm too, of which each rank holds another part; with the distributed optimizer as well."""
    found = []
    for ep, more in ((1, []), (2, []), (2, ["--use-distributed-optimizer"])):
        case = MoeCase(Layout(dp=2, ep=ep), "decoupled")
        words = [*case.words(tmp_path), *more]
        everywhere = ranks.run(
            take_steps, case.layout, words, training_cases.make_data(EXPERTS), training_cases.weights(EXPERTS)[0]
        )
        assert everywhere[0] == everywhere[1]
        found.append(everywhere[0])
    for name in ("loss/total", "grad_norm"):
        steps = [[step[name] for step in one] for one in found]
        assert steps[1] == pytest.approx(steps[0], rel=1e-4)
        assert steps[2] == pytest.approx(steps[0], rel=1e-4)


def initial_weights(words):
    return dict(training_cases.named(make_trainer(words).chunks))


def test_experts_start_unlike_each_other(ranks, tmp_path):
    """Also those of different ranks; what they share is equal."""
    case = MoeCase(Layout(dp=2, ep=2), "bypass ppo_clip", variant=1)
    one, other = ranks.run(initial_weights, case.layout, case.words(tmp_path))
    shared = set(one) & set(other)
    assert {"decoder.layers.0.mlp.router.weight", "embedding.word_embeddings.weight"} <= shared
    assert all(torch.equal(one[name], other[name]) for name in shared)
    experts = [f"decoder.layers.0.mlp.experts.local_experts.{expert}.linear_fc1.weight" for expert in range(EXPERTS)]
    for name, second in itertools.combinations(experts, 2):
        assert not torch.equal((one | other)[name], (one | other)[second])
