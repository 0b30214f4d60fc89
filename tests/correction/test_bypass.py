"""Bypass mode: the correction inside the loss, the factor that mends its denominator, and what it may cost."""

import math

import pytest
import torch

from megatron_rc import PlanInputs, RolloutCorrection, RolloutCorrectionConfig
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.groups import group_rank
from tests.correction.test_shards import ROWS, WIDTH, my_layout, my_part, my_places
from tests.support.correction_cases import CASES, MORE_SIZES, clear_batch
from tests.support.correction_comparison import assert_metrics
from tests.support.on_rank import outcome, recorded
from tests.support.ranks import Layout

AGGREGATIONS = {
    "token-mean": None,
    "token-sum": 7.0,
    "seq-mean-token-sum": None,
    "seq-mean-token-mean": None,
    "seq-mean-token-sum-norm": 5.0,
}
NAMES = [name for name, case in CASES.items() if "group_ids" not in case.sides]
ALONE = ParallelGroups()


def bypass(name, **more):
    fields = CASES[name].fields | {"bypass_mode": True, "loss_type": "reinforce"} | more
    return RolloutCorrectionConfig.from_dict(fields, "megatron_rc")


def wanted_factor(batch, expected, config, aggregation="token-mean"):
    """D₀/G by the formulas; D₀ counts the response mask, whatever is wrong with its tokens."""
    tokens, sequences, *kept = torch.tensor(expected.denominators).sum(0).tolist()
    if not kept[0]:
        return 0.0
    known = int(batch.mask.sum()), int(batch.mask.any(1).sum())
    if config.rejection_denominator == "original":
        kept = tokens, sequences
    ratio = 1.0
    if aggregation != "token-sum":
        level = 0 if aggregation == "token-mean" else 1
        ratio = known[level] / kept[level]
    return ratio / expected.metrics.get("rollout_is_batch_norm_factor", 1.0)


def plan_arguments(batch, form="padded", **more):
    """What ``plan`` is given of a batch, versions included where it has them."""
    layout, (_, _, mask), sides = my_part(batch, form)
    versions = {"policy_versions": sides["policy_versions"]} if "policy_versions" in sides else {}
    inputs = PlanInputs(None, mask.float(), mask, layout, **versions, **more)
    return {"inputs": inputs, **(MORE_SIZES["policy_versions"] if versions else {})}


def run_step(correction, batch, split, form="padded"):
    """One step over micro-batches of this rank's rows: what in_loss gave for each, and the factor."""
    rows = torch.arange(ROWS).split(split)[group_rank(correction.groups.dp)]
    pieces = [piece for piece in rows.split(4)]
    plan = correction.plan(**plan_arguments(batch.rows(rows), form))
    found = []
    for piece in pieces:
        layout, (train, rollout, mask), sides = my_part(batch.rows(piece), form)
        given = {name: sides[name] for name in ("advantages", "policy_versions", "turn_ids") if name in sides}
        weights, kept, lengths = correction.in_loss(train.requires_grad_(), rollout, mask, layout=layout, **given)
        assert weights is None or not weights.requires_grad
        place = my_places(piece, layout)
        found.append((place, weights, kept, lengths, piece))
    return found, correction.finish_step(), plan


@pytest.fixture(autouse=True)
def no_megatron(monkeypatch, request):
    """In this process there are no groups."""
    if "ranks" not in request.fixturenames:
        monkeypatch.setattr(ParallelGroups, "from_megatron", classmethod(lambda cls: ALONE))


@pytest.mark.parametrize(
    ("name", "aggregation"),
    [*((name, "token-mean") for name in NAMES), *(("token", other) for other in list(AGGREGATIONS)[1:])],
)
def test_micro_batches_and_factor_match_the_oracle(name, aggregation):
    batch, expected = clear_batch(name)
    scale, config = AGGREGATIONS[aggregation], bypass(name)
    loss = PolicyLossConfig(aggregation=aggregation, loss_scale_factor=scale)
    correction = RolloutCorrection(config, ALONE, loss=loss)
    found, factor, _ = run_step(correction, batch, [ROWS])
    for place, weights, kept, lengths, rows in found:
        assert (weights is not None) == config.applies_weights
        if weights is not None:
            want = torch.tensor(expected.weights_unnormalized, dtype=torch.float64)[place]
            torch.testing.assert_close(weights.view(-1), want, rtol=1e-9, atol=1e-12)
        assert torch.equal(kept.view(-1), torch.tensor(expected.mask)[place])
        assert lengths.tolist() == torch.tensor(expected.sequence_lengths)[rows].tolist()
    assert float(factor) == pytest.approx(wanted_factor(batch, expected, config, aggregation), rel=1e-12)
    step = correction.step
    step.check()
    assert step.denominators.sum(0).tolist() == torch.tensor(expected.denominators).sum(0).tolist()
    got = step.metrics()
    for key, value in expected.metrics.items():
        assert got[f"rollout_corr/{key}"] == pytest.approx(value, rel=1e-9, abs=1e-9), key


def on_ranks(name, split, form):
    """One step on the ranks of CP×DP, with what it sent."""
    batch, _ = clear_batch(name)
    correction = RolloutCorrection(bypass(name), ParallelGroups.from_megatron(), loss=PolicyLossConfig())
    with recorded() as seen:
        found, factor, plan = run_step(correction, batch, split, form)
        correction.step.check()
    return found, float(factor), seen, correction.step.metrics(), plan.counted.tolist()


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("name", ["token clamp", "sequence", "maxima and veto", "token accepted scope"])
def test_shards_match_the_oracle_within_the_budget(ranks, name, form):
    batch, expected = clear_batch(name)
    config = bypass(name)
    everywhere = ranks.run(on_ranks, Layout(cp=2, dp=2), name, [6, 6], form)
    want = wanted_factor(batch, expected, config)
    maximum = [("MAX", 2)] if "seq_max" in (config.rollout_rs or "") else []
    for found, factor, seen, metrics, counted in everywhere:
        for place, weights, kept, lengths, rows in found:
            assert torch.equal(kept.view(-1), torch.tensor(expected.mask)[place])
            assert lengths.tolist() == torch.tensor(expected.sequence_lengths)[rows].tolist()
            if weights is not None:
                wanted = torch.tensor(expected.weights_unnormalized, dtype=torch.float64)[place]
                torch.testing.assert_close(weights.view(-1), wanted, rtol=1e-9, atol=1e-12)
        assert factor == pytest.approx(want, rel=1e-12)
        assert metrics == everywhere[0][3]
        for bucket, row in expected.breakdowns.get("staleness", {}).items():
            assert metrics[f"rollout_corr/staleness_{bucket}_kl"] == pytest.approx(row["kl"], rel=1e-9)
        assert counted[0][0] == sum(row[0] for row in expected.denominators)
        calls = [("SUM", 2), ("SUM", 4), *[("SUM", 2), *maximum] * 2, ("SUM", 4), ("MAX", 4)]
        assert [call[:2] for call in seen] == calls
        assert [call[1:] for call in seen] == [call[1:] for call in everywhere[0][2]]


def pipeline_step(reject_all):
    """A step on two stages: (factor, skip, metrics, calls, the plan knows counts)."""
    groups = ParallelGroups.from_megatron()
    bounds = "5_6" if reject_all else "0.1_9"
    config = RolloutCorrectionConfig(
        rollout_is=None, rollout_rs="token_k1", rollout_rs_threshold=bounds, bypass_mode=True, loss_type="reinforce"
    )
    correction = RolloutCorrection(config, groups, loss=PolicyLossConfig())
    train, mask = torch.full((2, 4), -1.0), torch.ones(2, 4, dtype=torch.bool)
    inputs = PlanInputs(None, train, mask) if groups.is_last_stage else None
    with recorded() as seen:
        plan = correction.plan(inputs, num_mini_batches=1)
        if groups.is_last_stage:
            correction.in_loss(train, train - 0.5, mask)
        factor = correction.finish_step(torch.device("cpu"))
    correction.step.check()
    return (
        float(factor),
        correction.step.skip.tolist(),
        correction.step.metrics(),
        seen,
        bool(plan.counted.isfinite().all()),
    )


@pytest.mark.parametrize("reject_all", [False, True])
def test_every_stage_gets_the_factor(ranks, reject_all):
    first, last = ranks.run(pipeline_step, Layout(pp=2), reject_all)
    assert first[:3] == last[:3]
    assert first[:2] == ((0.0, [True]) if reject_all else (1.0, [False]))
    assert [call[:2] for call in first[3]] == [call[:2] for call in last[3]] == [("BROADCAST", 2)]
    assert (first[4], last[4]) == (False, True)


def bad_token_in_one_micro_batch():
    groups = ParallelGroups.from_megatron()
    config = bypass("token")
    correction = RolloutCorrection(config, groups, loss=PolicyLossConfig())
    layout = my_layout([WIDTH] * 2, "padded")
    train, mask = torch.full(layout.shape, -1.0), torch.ones(layout.shape, dtype=torch.bool)
    correction.plan(PlanInputs(None, [train] * 2, [mask] * 2, [layout] * 2))
    for index in range(2):
        theta = train.clone()
        if index and group_rank(groups.dp_cp) == 3:
            theta[1, 2] = math.nan
        correction.in_loss(theta, train, mask, layout=layout)
    correction.finish_step()
    return outcome(correction.step.check)


def test_a_bad_token_is_the_same_error_on_all_ranks(ranks):
    messages = ranks.run(bad_token_in_one_micro_batch, Layout(cp=2, dp=2))
    assert set(messages) == {messages[0]}
    assert "training log-prob of sample 3 of data-parallel rank 1" in messages[0]


def step_that_one_rank_has_not_counted():
    groups = ParallelGroups.from_megatron()
    correction = RolloutCorrection(bypass("token"), groups, loss=PolicyLossConfig())
    train = torch.full((2, WIDTH), -1.0)
    correction.plan(PlanInputs(None, train, train < 0))
    if group_rank(groups.dp_cp) == 0:
        correction.in_loss(train, train - 0.1, train < 0)
    return outcome(correction.finish_step)


def test_a_step_that_one_rank_has_not_counted_is_the_same_error_on_all(ranks):
    messages = ranks.run(step_that_one_rank_has_not_counted, Layout(dp=2))
    assert set(messages) == {messages[0]}
    assert "micro-batch" in messages[0]


def test_steps_do_not_mix_and_their_metrics_merge():
    batch, expected = clear_batch("token")
    correction = RolloutCorrection(bypass("token"), ALONE, loss=PolicyLossConfig())
    mask = batch.mask
    halves = torch.arange(ROWS).split(6)
    ids = torch.arange(ROWS) // 6
    correction.plan(**plan_arguments(batch, mini_batch_ids=ids), num_mini_batches=2)
    factors = []
    for index, half in enumerate(halves):
        part = batch.rows(half)
        versions = part.sides["policy_versions"]
        correction.in_loss(part.train, part.rollout, part.mask, policy_versions=versions, mini_batch=index)
        factors.append(float(correction.finish_step()))
        assert correction.step.metrics()["rollout_corr/num_tokens"] == int(part.mask.sum())
    kept = [sum(map(sum, (expected.mask[i] for i in half))) for half in halves]
    tokens = [int(mask[half].sum()) for half in halves]
    assert factors == pytest.approx([tokens[0] / kept[0], tokens[1] / kept[1]], rel=1e-12)
    merged = correction.metrics()
    assert merged.pop("rollout_corr/mixed_policies") == 2
    merged = {key: value for key, value in merged.items() if "reward" not in key}
    breakdowns = {name: expected.breakdowns[name] for name in ("length", "staleness")}
    found = type(expected)(**{**vars(expected), "breakdowns": breakdowns})
    assert_metrics(merged, found, 1e-9)
    correction.plan(PlanInputs(None, batch.train, mask))
    assert correction.metrics() == {}


def test_ids_out_of_range_are_reported_by_the_first_step():
    """Not by the plan, which the other pipeline stages do not see."""
    correction = RolloutCorrection(bypass("token"), ALONE, loss=PolicyLossConfig())
    mask = torch.ones(2, 2, dtype=torch.bool)
    train = torch.full((2, 2), -1.0)
    correction.plan(PlanInputs(None, train, mask, mini_batch_ids=torch.tensor([1, 2])), num_mini_batches=2)
    correction.in_loss(train, train, mask, mini_batch=1)
    with pytest.raises(ValueError, match="mini_batch=0 in the open step of mini-batch 1"):
        correction.in_loss(train, train, mask, mini_batch=0)
    correction.finish_step()
    with pytest.raises(ValueError, match="mini_batch_ids: 1 values"):
        correction.step.check()


def test_versions_come_with_the_plan():
    correction = RolloutCorrection(bypass("token"), ALONE, loss=PolicyLossConfig())
    part = clear_batch("token")[0]
    correction.plan(**plan_arguments(part))
    with pytest.raises(ValueError, match=r"policy_versions.*current_version"):
        correction.in_loss(part.train, part.rollout, part.mask)
    newer = torch.full((ROWS,), 8)
    correction.in_loss(part.train, part.rollout, part.mask, policy_versions=newer)
    correction.finish_step()
    with pytest.raises(ValueError, match=r"policy_versions.*current_version"):
        correction.step.check()
    # Without the current version there is nothing to compare them with.
    correction.plan(PlanInputs(None, part.train, part.mask))
    correction.in_loss(part.train, part.rollout, part.mask, policy_versions=newer)
    correction.finish_step()
    correction.step.check()
    assert not [name for name in correction.step.metrics() if "staleness" in name]


@pytest.mark.parametrize(
    ("fields", "loss", "auxiliary", "message"),
    [
        (
            {"rollout_is_batch_normalize": True},
            {"entropy_coef": 0.1},
            False,
            "rollout_is_batch_normalize=True .*entropy_coef=0.1",
        ),
        ({"rollout_is_batch_normalize": True}, {"kl_coef": 0.1}, False, "kl_coef=0.1"),
        ({"rollout_is_batch_normalize": True}, {}, True, "rejection_denominator"),
        ({"rollout_token_veto_threshold": 0.1}, {}, True, "rejection_denominator"),
        ({}, {"algorithm": "ppo_clip"}, False, "algorithm='ppo_clip'.*loss_type='reinforce'"),
        ({}, {"dual_clip": 3.0}, False, "dual_clip=3.0"),
    ],
)
def test_combinations_that_cannot_be_exact_are_errors(fields, loss, auxiliary, message):
    config = RolloutCorrectionConfig(**fields, bypass_mode=True, loss_type="reinforce")
    with pytest.raises(ValueError, match=message):
        RolloutCorrection(config, ALONE, loss=PolicyLossConfig(**loss), has_auxiliary_losses=auxiliary)
