"""The critic on real Megatron-Core, in every layout, equals a float64 reference built without it.

Compared are values, losses, metrics, and the gradient of every parameter before clipping and Adam.
"""

from unittest import mock

import pytest
import torch

from tests.launch.training.test_matrix import TO_REFERENCE, assert_gradients, whole_gradients
from tests.support import critic_cases, critic_oracle, training_cases
from tests.support.critic_cases import OBJECTIVES, Case
from tests.support.ranks import Layout
from tests.support.training_cases import MINI_BATCHES

CASES = [*critic_cases.make_cases(), Case(Layout(dp=2, ep=2), 1, packed=False, per_token_loss=False, size=4, experts=4)]


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    """What every rank of a case brings back."""
    folder = tmp_path_factory.mktemp("critic")

    def run(case, function=critic_cases.run_case):
        given = critic_cases.targets(case.experts)
        weights = critic_cases.weights(case.experts)
        return ranks.run(function, case.layout, case.words(folder), training_cases.make_data(), given, *weights)

    return run


def assert_values(everywhere, experts):
    """Of every token that trains, once on each tensor-parallel rank."""
    data = training_cases.make_data()
    old = critic_cases.weights(experts)[0]
    want = critic_oracle.values({name: one.double() for name, one in old.items()}, data.tokens)
    seen = torch.zeros(data.mask.shape, dtype=torch.int64)
    for rank in everywhere:
        if rank.places is None:
            continue
        assert rank.values.dtype == torch.float32
        real = rank.places[:, 0] >= 0
        row, position = rank.places[real].unbind(1)
        torch.testing.assert_close(rank.values[real].double(), want[row, position], rtol=1e-5, atol=1e-5)
        if rank.where[0] == 0:
            seen[row, position] += 1
    assert (seen[data.mask] == 1).all()


def assert_case(everywhere, case):
    expected = critic_cases.expected(case.variant, case.experts)
    assert_values(everywhere, case.experts)
    for index in range(MINI_BATCHES):
        got = everywhere[0].metrics[index]
        assert all(rank.metrics[index] == got for rank in everywhere), "ranks disagree on a metric"
        assert abs(got.pop("loss/critic") - expected.loss[index]) <= TO_REFERENCE * expected.size[index]
        assert got == pytest.approx(expected.metrics[index], rel=1e-4, abs=1e-5)
        gradients = whole_gradients(everywhere, index, is_tied=False)
        assert_gradients(gradients, expected.gradients[index], TO_REFERENCE)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layout_is_the_reference(run, case):
    everywhere = run(case)
    assert_case(everywhere, case)
    layout = case.layout
    for rank in everywhere:
        sums = [("SUM", layout.dp * layout.cp, 8)] * (layout.dp * layout.cp > 1 and rank.places is not None)
        assert rank.step_calls == [sums + [("BROADCAST", layout.pp, 8)] * (layout.pp > 1)] * MINI_BATCHES


def test_the_cases_meet_what_they_are_for():
    assert {case.variant for case in CASES} == set(range(len(OBJECTIVES)))
    for name in ("packed", "per_token_loss", "size"):
        assert len({getattr(case, name) for case in CASES}) > 1
    data = training_cases.make_data()
    given = critic_cases.targets()
    assert 0.1 < (given.accepted.sum() / data.mask.sum()) < 0.9
    for variant, (_, objective) in enumerate(OBJECTIVES):
        if objective.clip:
            assert min(one["critic/clip_fraction"] for one in critic_cases.expected(variant).metrics) > 0.03


def run_unmarked(words, *given):
    """As ``run_case``, with a head whose gradient Megatron takes for whole."""
    from megatron_rc.launch.training.models import value_head

    right = value_head.ValueHead.__init__

    def wrong(self, config, seed):
        right(self, config, seed)
        del self.weight.sequence_parallel

    with mock.patch.object(value_head.ValueHead, "__init__", wrong):
        return critic_cases.run_case(words, *given)


def test_a_head_that_nobody_adds_up_fails(run):
    case = Case(Layout(tp=2, sp=True), 0, packed=False, per_token_loss=False, size=8)
    everywhere = run(case, run_unmarked)
    with pytest.raises(AssertionError, match=r"output_layer\.weight differs over TP"):
        assert_case(everywhere, case)
