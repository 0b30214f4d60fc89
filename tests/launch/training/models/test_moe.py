"""A mixture of experts trains alike wherever its experts lie: as on one process, and as the float64 reference says.

Expert parallelism (EP) spreads the experts over ranks of the same stage that hold different tokens; no group of the
correction changes with it. Megatron sums an expert's gradient over its replicas, but divides it by the number of all
data and context ranks, as it divides every other: the tokens of the ranks without that expert came to it, too.
"""

import functools
import itertools
from dataclasses import dataclass, replace

import pytest
import torch

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.checks.experts import weakens_auxiliary_losses
from megatron_rc.launch.flags.configure import configure
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
BALANCING = 0.5
Z = 0.02
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
        results = super().objective
        if not self.original:
            return results
        arguments = (*results.words, "--rejection-denominator=original")
        return replace(results, words=arguments, settings=replace(results.settings, denominator="original"))

    def words(self, folder):
        experts = [f"--num-experts={EXPERTS}", f"--moe-ffn-hidden-size={training_oracle.EXPERT_INNER}"]
        experts += [f"--moe-token-dispatcher-type={self.dispatcher}"]
        return super().words(folder) + experts + [*AUXILIARY] * self.auxiliary

    def __str__(self):
        return "-".join([super().__str__(), *["allgather"] * (self.dispatcher == "allgather")])


CASES = [
    MoeCase(Layout(dp=2, ep=2), "decoupled", dispatcher="allgather", per_token_loss=True),
    MoeCase(Layout(cp=2, ep=2), "bypass ppo_clip", variant=1, size=8),
    MoeCase(Layout(tp=2, dp=2, ep=2, sp=True), "bypass ppo_clip", variant=1, packed=True, per_token_loss=True),
    MoeCase(Layout(pp=2, dp=2, ep=2), "decoupled"),
]


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    """What every rank of a case brings back; each case runs once."""
    folder = tmp_path_factory.mktemp("moe")
    given = [training_cases.make_data(EXPERTS), *training_cases.weights(EXPERTS)]
    return functools.cache(lambda case: ranks.run(training_cases.run_case, case.layout, case.words(folder), *given))


@pytest.fixture(scope="module")
def gradients(run):
    """Those of the whole model in one mini-batch of a case."""
    return lambda case, index: whole_gradients(run(case), index)


def compared(ranks, folder, case, *of_data):
    """What every rank of a case brings back, which is the reference's; ``of_data``: arguments of ``make_data``."""
    given = [training_cases.make_data(*of_data), *training_cases.weights(of_data[0])]
    everywhere = ranks.run(training_cases.run_case, case.layout, case.words(folder), *given)
    expected = training_cases.expected(case.objective, *of_data)
    for index in range(MINI_BATCHES):
        assert_metrics(everywhere, expected, index)
        assert_gradients(whole_gradients(everywhere, index), expected.gradients[index], TO_REFERENCE)
    return everywhere


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layout_is_the_reference(run, gradients, case):
    everywhere = run(case)
    expected = training_cases.expected(case.objective, EXPERTS)
    alone = MoeCase(Layout(), case.mode, case.variant, size=16)
    for index in range(MINI_BATCHES):
        assert_metrics(everywhere, expected, index)
        assert_gradients(gradients(case, index), expected.gradients[index], TO_REFERENCE)
        assert_gradients(gradients(case, index), gradients(alone, index), TO_SINGLE)
    assert_budget(everywhere, case)


@functools.cache
def with_auxiliary(objective, index):
    """The reference's gradients with those of the router losses, which no weight and no denominator touches."""
    first = index * PER_MINI_BATCH
    size = MoeCase.size
    micro_batches = [[*range(start, start + size)] for start in range(first, first + PER_MINI_BATCH, size)]
    tokens = training_cases.make_data(EXPERTS).tokens
    new = training_cases.weights(EXPERTS)[1]
    auxiliary = training_oracle.auxiliary_gradients(new, tokens, micro_batches, BALANCING, Z)
    gradients = training_cases.expected(objective, EXPERTS).gradients[index]
    router = "decoder.layers.0.mlp.router.weight"
    assert auxiliary[router].norm() > 0.1 * gradients[router].norm(), "too small to be seen"
    return {name: gradient + auxiliary[name] for name, gradient in gradients.items()}


@pytest.mark.parametrize(
    ("layout", "per_token_loss"),
    [(Layout(dp=2, ep=2), True), (Layout(cp=2, ep=2), False), (Layout(tp=2, sp=True), False)],
    ids=str,
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


def test_router_losses_beside_a_known_denominator_in_bypass_mode(gradients):
    """A factor D₀/G other than 1 would be theirs too."""
    case = MoeCase(Layout(dp=2, ep=2), "bypass ppo_clip", variant=1, auxiliary=True, original=True)
    for index in range(MINI_BATCHES):
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
