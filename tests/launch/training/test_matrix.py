"""One optimizer step on real Megatron-Core, in every layout, equals a float64 reference built without it.

Every layout meets decoupled and bypass mode; the latter's kind, packing, ``calculate_per_token_loss`` and micro-batch
sizes are dealt out so that each pair of values occurs. All start from the same weights. Compared are weights, mask,
n_i, losses, metrics, and the gradient of every parameter before clipping and Adam; and, ten times closer, with the same
on a single process.
"""

import itertools
from unittest import mock

import pytest
import torch

from tests.support import training_cases, training_oracle
from tests.support.ranks import Layout
from tests.support.training_cases import LAYOUTS, MINI_BATCHES, MODES, OBJECTIVES, SEQUENCES, Case

CASES = training_cases.make_cases()
# A sequence ratio over CP in the loss, of one sequence at a time, and packed beside it.
MORE = [
    Case(Layout(cp=2, dp=2), "decoupled", variant=1, size=1),
    Case(Layout(tp=2, cp=2), "bypass gspo", packed=True, size=4),
    Case(Layout(pp=2, cp=2), "bypass gspo", size=1, per_token_loss=True),
]
# Layouts round float32 gradients by up to 8e-6 of their length, on processors without AVX.
TO_REFERENCE = 1e-4
TO_SINGLE = 2e-5
FACTORS = ("layout", "mode", "packed", "per_token_loss", "size")


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    """What every rank of a case brings back."""
    folder = tmp_path_factory.mktemp("matrix")
    old, new = training_cases.weights()

    def run(case, function=training_cases.run_case, *more):
        arguments = case.words(folder)
        return ranks.run(function, case.layout, arguments, training_cases.make_data(), old, new, *more)

    return run


@pytest.fixture(scope="module")
def single(run):
    """The gradients of one process for each objective."""
    cases = [Case(Layout(), mode, variant) for mode, several in OBJECTIVES.items() for variant in range(len(several))]
    known = {case.objective: run(case)[0] for case in cases}
    return lambda case: known[case.objective]


def whole_gradients(everywhere, index, *, is_tied=True):
    """The gradients of the whole model, from the shards of all ranks; replicas agree to the last bit."""
    parts = {}
    for rank in everywhere:
        tp, cp, dp, _ = rank.where
        for name, gradient in rank.gradients[index].items():
            parts.setdefault(name, {}).setdefault((cp, dp), {})[tp] = (gradient, rank.sharded.get(name))
    whole = {}
    for name, replicas in parts.items():
        joined = []
        for shards in replicas.values():
            dimension = shards[0][1]
            ordered = [shards[tp][0] for tp in sorted(shards)]
            if dimension is None:
                assert all(torch.equal(ordered[0], other) for other in ordered), f"{name} differs over TP"
                joined.append(ordered[0])
            else:
                joined.append(training_cases.join_weight(name, ordered, dimension))
        assert all(torch.equal(joined[0], other) for other in joined), f"{name} differs over DP and CP"
        whole[name] = joined[0].double()
    copy = whole.pop("output_layer.weight", None) if is_tied else None
    if copy is not None:
        assert torch.equal(copy, whole["embedding.word_embeddings.weight"]), "the tied embedding's copy differs"
    return whole


def assert_gradients(got, want, tolerance):
    """‖g - g_ref‖ ≤ tolerance ‖g_ref‖, and a thousandth of that of the largest, for each parameter."""
    assert got.keys() == want.keys()
    largest = max(float(gradient.norm()) for gradient in want.values())
    for name, gradient in want.items():
        distance = float((got[name] - gradient).norm())
        assert distance <= tolerance * float(gradient.norm()) + 1e-3 * tolerance * largest, f"gradient of {name}"


def assert_tokens(everywhere, expected):
    """Weights, mask and n_i of every token, wherever it lies; each valid token lies on one rank of DP×CP."""
    data = training_cases.make_data()
    seen = torch.zeros(data.mask.shape, dtype=torch.int64)
    for rank in everywhere:
        if rank.places is None:
            continue
        real = rank.places[:, 0] >= 0
        row, position = rank.places[real].unbind(1)
        assert torch.equal(rank.mask[real], torch.tensor(expected.mask)[row, position])
        assert not rank.mask[~real].any(), "padding was accepted"
        lengths = torch.tensor(expected.lengths, dtype=torch.float64)[row]
        assert torch.equal(rank.lengths[real], lengths)
        assert (rank.weights is None) == (expected.weights is None)
        if rank.weights is not None:
            want = torch.tensor(expected.weights, dtype=torch.float64)[row, position]
            torch.testing.assert_close(rank.weights[real].double(), want, rtol=3e-5, atol=1e-6)
        if rank.where[0] == 0:
            seen[row, position] += 1
    assert (seen[data.mask] == 1).all()
    assert (seen <= 1).all()


POLICY = {
    "policy/approx_kl": ("log_ratio", -1),
    "policy/clip_fraction_low": ("low", 1),
    "policy/clip_fraction_high": ("high", 1),
    "policy/dual_clip_fraction": ("dual", 1),
    "policy/entropy": ("entropy", 1),
    "policy/reference_kl": ("kl", 1),
    "policy/log_ratio_max": ("highest", 1),
    "policy/log_ratio_min": ("lowest", 1),
}


def assert_metrics(everywhere, expected, index):
    """Loss and metrics of one step: equal on every rank, and the reference's."""
    got = everywhere[0].metrics[index]
    assert all(rank.metrics[index] == got for rank in everywhere), "ranks disagree on a metric"
    assert abs(got["loss/total"] - expected.loss[index]) <= TO_REFERENCE * expected.size[index]
    for name, (key, sign) in POLICY.items():
        if name in got:
            assert got[name] == pytest.approx(sign * expected.policy[index][key], rel=1e-4, abs=1e-5), name
    compared = 0
    for name, value in expected.metrics[index].items():
        if f"rollout_corr/{name}" in got:
            assert got[f"rollout_corr/{name}"] == pytest.approx(value, rel=1e-4, abs=2e-5), name
            compared += 1
    assert compared > 20


def assert_case(everywhere, case, alone=None):
    expected = training_cases.expected(case.objective)
    assert_tokens(everywhere, unnormalized(case, expected))
    for index in range(MINI_BATCHES):
        assert_metrics(everywhere, expected, index)
        gradients = whole_gradients(everywhere, index)
        assert_gradients(gradients, expected.gradients[index], TO_REFERENCE)
        if alone is not None:
            assert_gradients(gradients, whole_gradients([alone], index), TO_SINGLE)
            difference = abs(everywhere[0].metrics[index]["loss/total"] - alone.metrics[index]["loss/total"])
            assert difference <= TO_SINGLE * expected.size[index]


def unnormalized(case, expected):
    """Bypass mode's loss sees weights before normalisation; their mean is in the factor of the gradients."""
    if not (case.objective.bypass and case.objective.settings.batch_normalize):
        return expected
    factors = [metrics["rollout_is_batch_norm_factor"] for metrics in expected.metrics]
    ids = training_cases.make_data().mini_batch_ids.tolist()
    scaled = [[w * factors[ids[row]] for w in weights] for row, weights in enumerate(expected.weights)]
    return training_oracle.Expected(scaled, expected.mask, expected.lengths, expected.metrics)


def wanted_calls(rank, case):
    """(name, kind, ranks, sequences that its size is proportional to, or 1): before the schedule, and in each step."""
    layout = case.layout
    objective = case.objective
    dp_cp = layout.dp * layout.cp
    last = rank.places is not None

    def over_cp(name, sequences):
        return [(name, "SUM", layout.cp, sequences)] * (layout.cp > 1 and last)

    def over_batch(name, *kinds):
        return [(f"{name} {kind}", kind, dp_cp, 1) for kind in kinds] * (dp_cp > 1 and last)

    def over_pp(name):
        return [(name, "BROADCAST", layout.pp, 1)] * (layout.pp > 1)

    rows = [("rows", "SUM", layout.dp, layout.dp)] * (case.packed and layout.dp > 1)
    plan = rows + over_cp("plan cp", sum(map(sum, rank.sequences)))
    plan += over_batch("plan", "SUM") if objective.bypass else over_batch("plan", "SUM", "MAX") + over_pp("plan pp")
    steps = []
    for sequences in rank.sequences:
        in_loss = objective.bypass or objective.algorithm == "gspo"
        calls = [call for number in sequences for call in over_cp("loss cp", number) if in_loss]
        steps.append(calls + over_batch("step", "SUM", "MAX") + over_pp("step pp"))
    return plan, steps


SIZES = {}


def assert_budget(everywhere, case):
    """The collectives outside the model: how many, over which ranks, and how large.

    Sizes are a constant of the objective, over CP times the number of sequences: nothing else is in them.
    """
    for rank in everywhere:
        plan, steps = wanted_calls(rank, case)
        for expected, calls in ((plan, rank.plan_calls), *zip(steps, rank.step_calls, strict=True)):
            assert [call[:2] for call in calls] == [call[1:3] for call in expected]
            for (name, _, _, unit), (_, _, numbers) in zip(expected, calls, strict=True):
                known = SIZES.setdefault((name, case.objective), numbers / unit)
                assert numbers == known * unit, f"{name} has {numbers} numbers"


@pytest.mark.parametrize("case", [*CASES, *MORE], ids=str)
def test_every_layout_is_the_reference(run, single, case):
    everywhere = run(case)
    assert_case(everywhere, case, single(case))
    assert_budget(everywhere, case)


def test_every_pair_of_values_occurs():
    pairs = [*itertools.combinations(FACTORS, 2)]
    # Of the kinds of bypass mode, which differ in the loss alone, a layout meets one.
    pairs.remove(("layout", "mode"))
    for one, other in pairs:
        values = {name: {getattr(case, name) for case in CASES} for name in (one, other)}
        met = {(getattr(case, one), getattr(case, other)) for case in CASES}
        assert met == set(itertools.product(values[one], values[other])), (one, other)
    met = {(case.layout, case.objective.bypass) for case in CASES}
    assert met == set(itertools.product(LAYOUTS, [False, True]))
    assert {case.mode for case in CASES} == set(MODES)
    assert {case.size for case in CASES} == {4, 8}
    for mode in MODES:
        assert {case.variant for case in CASES if case.mode == mode} == set(range(len(OBJECTIVES[mode])))


@pytest.mark.parametrize("objective", [*itertools.chain(*OBJECTIVES.values())])
def test_the_data_are_not_vacuous(objective):
    expected = training_cases.expected(objective)
    data = training_cases.make_data()
    policy = expected.policy[0]
    if objective.algorithm != "reinforce":
        assert min(policy["low"], policy["high"]) >= 0.1
    if objective.dual:
        assert policy["dual"] >= 0.1
    for metrics in expected.metrics:
        for name, _, _ in objective.settings.criteria:
            assert 0.1 <= metrics[f"rollout_rs_{name}_masked_fraction"] <= 0.9
    mask = torch.tensor(expected.mask)
    assert not mask[list(training_cases.REJECTED_ROWS)].any()
    assert data.mask[list(training_cases.REJECTED_ROWS)].any(dim=1).all()
    assert not data.mask[list(training_cases.EMPTY_ROWS)].any()
    accepted = [int(part.sum()) for part in mask.split(SEQUENCES // MINI_BATCHES)]
    assert min(accepted) > 10
    if objective.settings.level and expected.weights is not None:
        applied = torch.tensor(expected.weights)[mask]
        assert applied.std() > 0.05


def test_parts_of_the_work_differ():
    """Tokens of micro-batches, of CP shards and of replicas, so that exchanging them would show."""
    data = training_cases.make_data()
    for size in (4, 8):
        counts = [int(part.sum()) for part in data.mask.split(size)][: 24 // size]
        assert len(set(counts)) == len(counts)
    chunks = data.mask.view(SEQUENCES, 4, -1).sum((0, 2)).tolist()
    assert chunks[0] + chunks[3] != chunks[1] + chunks[2]
    replicas = data.mask.view(MINI_BATCHES, 2, -1).sum((0, 2)).tolist()
    assert replicas[0] != replicas[1]


def run_wrongly(words, data, old, new, variant):
    """As ``run_case``, with one wrong factor in what the loss function returns."""
    from megatron_rc.training import schedule

    right = schedule.schedule_return
    factor = {
        "times cp": lambda scale: 2.0,
        "divided by the micro-batches": lambda scale: 1 / scale.num_microbatches,
        "world for dp_cp": lambda scale: torch.distributed.get_world_size() / scale.dp_cp_size,
    }[variant]

    def wrong(loss_sum, log, scale, num_tokens):
        loss, tokens, log = right(loss_sum, log, scale, num_tokens)
        return loss * factor(scale), tokens, log

    with mock.patch.object(schedule, "schedule_return", wrong):
        return training_cases.run_case(words, data, old, new)


@pytest.mark.parametrize(
    ("variant", "layout", "per_token_loss"),
    [
        ("times cp", Layout(cp=2), False),
        ("divided by the micro-batches", Layout(cp=2), True),
        ("world for dp_cp", Layout(tp=2, sp=True), False),
    ],
)
def test_a_wrong_factor_fails(run, single, variant, layout, per_token_loss):
    case = Case(layout, "decoupled", per_token_loss=per_token_loss)
    everywhere = run(case, run_wrongly, variant)
    alone = single(case)
    with pytest.raises(AssertionError, match="gradient of"):
        assert_case(everywhere, case, alone)
