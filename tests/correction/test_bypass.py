"""Bypass mode: the correction inside the loss, the factor that mends its denominator, and its collectives."""

import dataclasses
from typing import NamedTuple

import pytest
import torch

from megatron_rc import PlanInputs, RolloutCorrection, RolloutCorrectionConfig
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.groups import group_rank
from tests.correction.test_shards import ROWS, my_part, my_places
from tests.support.correction_cases import CASES, MORE_SIZES, clear_batch
from tests.support.correction_comparison import assert_metrics
from tests.support.on_rank import recorded
from tests.support.ranks import Layout

AGGREGATIONS = {
    "token-mean": None,
    "token-sum": 7.0,
    "seq-mean-token-sum": None,
    "seq-mean-token-mean": None,
    "seq-mean-token-sum-norm": 5.0,
}
# Ways in which a micro-batch makes its weights and its mask; the others differ in numbers alone.
NAMES = ["token clamp", "token accepted scope", "sequence by staleness", "turns of the vetoed", "bad sequences"]
NAMES_AND_AGGREGATIONS = [
    *((name, "token-mean") for name in NAMES),
    *(("token", aggregation) for aggregation in AGGREGATIONS if aggregation != "token-mean"),
]
ALONE = ParallelGroups()


class Corrected(NamedTuple):
    """The correction of one micro-batch on a rank, as ``in_loss`` returned it."""

    rows: torch.Tensor  # [n], rows of the whole batch
    places: tuple[torch.Tensor, torch.Tensor]  # row and position of each local token in the whole batch
    weights: torch.Tensor | None
    accepted: torch.Tensor
    lengths: torch.Tensor


def bypass(name, **more):
    fields = CASES[name].fields | {"bypass_mode": True, "loss_type": "reinforce"} | more
    return RolloutCorrectionConfig.from_dict(fields, "megatron_rc")


def expected_factor(batch, expected, config, aggregation="token-mean"):
    """D₀/G by the formulas; D₀ counts the response mask, whatever is wrong with its tokens."""
    totals = torch.tensor(expected.denominators).sum(0).tolist()
    tokens, sequences, accepted_tokens, accepted_sequences = totals
    if not accepted_tokens:
        return 0.0

    final_tokens = accepted_tokens
    final_sequences = accepted_sequences
    if config.rejection_denominator == "original":
        final_tokens = tokens
        final_sequences = sequences

    ratio = 1.0  # token-sum divides by a constant
    if aggregation == "token-mean":
        ratio = int(batch.mask.sum()) / final_tokens
    elif aggregation != "token-sum":
        ratio = int(batch.mask.any(1).sum()) / final_sequences
    return ratio / expected.metrics.get("rollout_is_batch_norm_factor", 1.0)


def plan_arguments(batch, form="padded", **more):
    """Arguments of ``plan`` for a batch, with its versions if it has any; ``more``: fields of PlanInputs."""
    layout, (_, _, mask), sides = my_part(batch, form)
    versions = {}
    counts = {}
    if "policy_versions" in sides:
        versions = {"policy_versions": sides["policy_versions"]}
        counts = MORE_SIZES["policy_versions"]
    # The plan of bypass mode only counts the mask: mask.float() stands in for the log-probs.
    inputs = PlanInputs(None, mask.float(), mask, layout, **versions, **more)
    return {"inputs": inputs, **counts}


def run_step(correction, batch, split, form="padded"):
    """Run one step on this rank's rows, in micro-batches of four.

    Returns the correction of each micro-batch, the factor of the gradients, and the plan.
    """
    rows = torch.arange(ROWS).split(split)[group_rank(correction.groups.dp)]
    plan = correction.plan(**plan_arguments(batch.rows(rows), form))
    corrected = []
    for rows_of_micro_batch in rows.split(4):
        layout, (train, rollout, mask), sides = my_part(batch.rows(rows_of_micro_batch), form)
        side_inputs = {name: sides[name] for name in ("advantages", "policy_versions", "turn_ids") if name in sides}
        weights, accepted, lengths = correction.in_loss(
            train.requires_grad_(), rollout, mask, layout=layout, **side_inputs
        )
        assert weights is None or not weights.requires_grad
        corrected.append(
            Corrected(
                rows=rows_of_micro_batch,
                places=my_places(rows_of_micro_batch, layout),
                weights=weights,
                accepted=accepted,
                lengths=lengths,
            )
        )
    return corrected, correction.finish_step(), plan


def assert_matches_oracle(corrected, expected):
    """Assert that the weights, accepted tokens and lengths of a micro-batch are the oracle's."""
    if corrected.weights is not None:
        expected_weights = torch.tensor(expected.weights_unnormalized, dtype=torch.float64)[corrected.places]
        torch.testing.assert_close(corrected.weights.view(-1), expected_weights, rtol=1e-9, atol=1e-12)
    assert torch.equal(corrected.accepted.view(-1), torch.tensor(expected.mask)[corrected.places])
    assert corrected.lengths.tolist() == torch.tensor(expected.sequence_lengths)[corrected.rows].tolist()


@pytest.fixture(autouse=True)
def no_megatron(monkeypatch, request):
    """In this process there are no groups."""
    if "ranks" not in request.fixturenames:
        monkeypatch.setattr(ParallelGroups, "from_megatron", classmethod(lambda cls: ALONE))


@pytest.mark.parametrize(("name", "aggregation"), NAMES_AND_AGGREGATIONS)
def test_micro_batches_and_factor_match_the_oracle(name, aggregation):
    batch, expected = clear_batch(name)
    config = bypass(name)
    loss = PolicyLossConfig(aggregation=aggregation, loss_scale_factor=AGGREGATIONS[aggregation])
    correction = RolloutCorrection(config, ALONE, loss=loss)
    micro_batches, factor, _ = run_step(correction, batch, [ROWS])

    for corrected in micro_batches:
        assert (corrected.weights is not None) == config.applies_weights
        assert_matches_oracle(corrected, expected)
    assert float(factor) == pytest.approx(expected_factor(batch, expected, config, aggregation), rel=1e-12)

    step = correction.step
    step.check()
    assert step.denominators.sum(0).tolist() == torch.tensor(expected.denominators).sum(0).tolist()
    metrics = step.metrics()
    for key, expected_value in expected.metrics.items():
        assert metrics[f"rollout_corr/{key}"] == pytest.approx(expected_value, rel=1e-9, abs=1e-9), key


def on_ranks(name, split, form):
    """Run one step on the ranks of CP×DP: its micro-batches, factor, collectives, metrics and the plan's counts."""
    batch, _ = clear_batch(name)
    correction = RolloutCorrection(bypass(name), ParallelGroups.from_megatron(), loss=PolicyLossConfig())
    with recorded() as calls:
        micro_batches, factor, plan = run_step(correction, batch, split, form)
        correction.step.check()
    return micro_batches, float(factor), calls, correction.step.metrics(), plan.counted.tolist()


@pytest.mark.parametrize(("name", "form"), [("token clamp", "packed"), ("maxima and veto", "padded")])
def test_shards_match_the_oracle_within_the_budget(ranks, name, form):
    batch, expected = clear_batch(name)
    config = bypass(name)
    results = ranks.run(on_ranks, Layout(cp=2, dp=2), name, [6, 6], form)

    factor_of_batch = expected_factor(batch, expected, config)
    num_tokens = sum(row[0] for row in expected.denominators)
    # (kind, ranks) of the collectives: two for the plan, those of two micro-batches, two for the end of the step.
    sequence_maximum = [("MAX", 2)] if "seq_max" in (config.rollout_rs or "") else []
    plan_calls = [("SUM", 2), ("SUM", 4)]
    micro_batch_calls = [("SUM", 2), *sequence_maximum]
    step_calls = [("SUM", 4), ("MAX", 4)]
    expected_calls = [*plan_calls, *micro_batch_calls, *micro_batch_calls, *step_calls]

    _, _, first_calls, first_metrics, _ = results[0]
    for micro_batches, factor, calls, metrics, counted in results:
        for corrected in micro_batches:
            assert_matches_oracle(corrected, expected)
        assert factor == pytest.approx(factor_of_batch, rel=1e-12)
        assert metrics == first_metrics
        for bucket, breakdown in expected.breakdowns.get("staleness", {}).items():
            assert metrics[f"rollout_corr/staleness_{bucket}_kl"] == pytest.approx(breakdown["kl"], rel=1e-9)
        assert counted[0][0] == num_tokens
        assert [call[:2] for call in calls] == expected_calls
        # As many ranks and numbers on every rank.
        assert [call[1:] for call in calls] == [call[1:] for call in first_calls]


def pipeline_step(reject_all):
    """Run a step on two pipeline stages; its results by name."""
    groups = ParallelGroups.from_megatron()
    bounds = "5_6" if reject_all else "0.1_9"
    config = RolloutCorrectionConfig(
        rollout_is=None, rollout_rs="token_k1", rollout_rs_threshold=bounds, bypass_mode=True, loss_type="reinforce"
    )
    correction = RolloutCorrection(config, groups, loss=PolicyLossConfig())
    train = torch.full((2, 4), -1.0)
    mask = torch.ones(2, 4, dtype=torch.bool)
    inputs = PlanInputs(None, train, mask) if groups.is_last_stage else None
    with recorded() as calls:
        plan = correction.plan(inputs, num_mini_batches=1)
        if groups.is_last_stage:
            correction.in_loss(train, train - 0.5, mask)
        factor = correction.finish_step(torch.device("cpu"))
    correction.step.check()
    return {
        "factor": float(factor),
        "skip": correction.step.skip.tolist(),
        "metrics": correction.step.metrics(),
        "calls": calls,
        "plan knows counts": bool(plan.counted.isfinite().all()),
    }


@pytest.mark.parametrize("reject_all", [False, True])
def test_every_stage_gets_the_factor(ranks, reject_all):
    first, last = ranks.run(pipeline_step, Layout(pp=2), reject_all)
    for name in ("factor", "skip", "metrics"):
        assert first[name] == last[name]
    assert first["factor"] == (0.0 if reject_all else 1.0)
    assert first["skip"] == [reject_all]
    for stage in (first, last):
        assert [call[:2] for call in stage["calls"]] == [("BROADCAST", 2)]
    assert first["plan knows counts"] is False
    assert last["plan knows counts"] is True


def test_steps_do_not_mix_and_their_metrics_merge():
    batch, expected = clear_batch("token")
    correction = RolloutCorrection(bypass("token"), ALONE, loss=PolicyLossConfig())
    halves = torch.arange(ROWS).split(6)
    mini_batch_ids = torch.arange(ROWS) // 6
    correction.plan(**plan_arguments(batch, mini_batch_ids=mini_batch_ids), num_mini_batches=2)
    factors = []
    for mini_batch, rows in enumerate(halves):
        half = batch.rows(rows)
        versions = half.sides["policy_versions"]
        correction.in_loss(half.train, half.rollout, half.mask, policy_versions=versions, mini_batch=mini_batch)
        factors.append(float(correction.finish_step()))
        assert correction.step.metrics()["rollout_corr/num_tokens"] == int(half.mask.sum())

    num_tokens = [int(batch.mask[rows].sum()) for rows in halves]
    num_accepted = [int(torch.tensor(expected.mask)[rows].sum()) for rows in halves]
    expected_factors = [num_tokens[0] / num_accepted[0], num_tokens[1] / num_accepted[1]]
    assert factors == pytest.approx(expected_factors, rel=1e-12)

    # The merged metrics are the oracle's for the whole batch; the loss was given no rewards.
    merged = correction.metrics()
    assert merged.pop("rollout_corr/mixed_policies") == 2
    merged = {name: value for name, value in merged.items() if "reward" not in name}
    breakdowns = {name: expected.breakdowns[name] for name in ("length", "staleness")}
    assert_metrics(merged, dataclasses.replace(expected, breakdowns=breakdowns), rel=1e-9)

    # A new plan begins with no metrics.
    correction.plan(PlanInputs(None, batch.train, batch.mask))
    assert correction.metrics() == {}


def test_ids_out_of_range_are_reported_by_the_first_step():
    """The plan does not raise, because the other pipeline stages do not see the ids."""
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
    batch, _ = clear_batch("token")
    correction.plan(**plan_arguments(batch))
    with pytest.raises(ValueError, match=r"policy_versions.*current_version"):
        correction.in_loss(batch.train, batch.rollout, batch.mask)

    # The current version is 7.
    newer = torch.full((ROWS,), 8)
    correction.in_loss(batch.train, batch.rollout, batch.mask, policy_versions=newer)
    correction.finish_step()
    with pytest.raises(ValueError, match=r"policy_versions.*current_version"):
        correction.step.check()

    # Without the current version there is nothing to compare the versions with.
    correction.plan(PlanInputs(None, batch.train, batch.mask))
    correction.in_loss(batch.train, batch.rollout, batch.mask, policy_versions=newer)
    correction.finish_step()
    correction.step.check()
    assert not [name for name in correction.step.metrics() if "staleness" in name]
