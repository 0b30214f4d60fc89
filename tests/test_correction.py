"""Weights, masks and metrics: against float64 loops, against other projects' numbers, and from shards."""

import math

import pytest
import torch
import torch.distributed as dist

from megatron_rc import PlanInputs, RolloutCorrection, RolloutCorrectionConfig, correct_rollouts
from megatron_rc.parallel import ParallelGroups, SequenceLayout
from megatron_rc.parallel.groups import group_rank, group_size
from tests import reference
from tests.golden.load import cases
from tests.ranks import Layout

LENGTHS = (9, 16, 0, 1, 12, 16, 3, 7)
CRITERIA = "token_k1,seq_mean_k3,seq_sum_k1"
BOUNDS = "0.5_1.9,0.2,0.08_6.0"
PARSED = (
    ("token", "k1", math.log(0.5), math.log(1.9)),
    ("seq_mean", "k3", -math.inf, 0.2),
    ("seq_sum", "k1", math.log(0.08), math.log(6.0)),
)
CONFIG = RolloutCorrectionConfig(
    rollout_is="token", rollout_is_threshold=1.5, rollout_rs=CRITERIA, rollout_rs_threshold=BOUNDS
)


def make_batch(seed=1, filler=math.nan):
    """(train, rollout, mask), [8, 16] float32: ragged, with holes, an empty sequence and one of a single token."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -2 * torch.rand(8, 16, generator=generator) - 0.8
    train = rollout + 0.55 * torch.randn(8, 16, generator=generator).clamp(-1.4, 1.4)
    mask = torch.arange(16).expand(8, 16) < torch.tensor(LENGTHS).unsqueeze(1)
    mask = mask & ((torch.rand(8, 16, generator=generator) > 0.2) | (torch.arange(16) == 0))
    return torch.where(mask, train, filler), torch.where(mask, rollout, filler), mask


def as_lists(*tensors):
    return [tensor.double().tolist() if tensor.is_floating_point() else tensor.tolist() for tensor in tensors]


def expected(config=CONFIG, batch=None):
    train, rollout, mask = as_lists(*(batch or make_batch()))
    weights, accepted = reference.correct(
        train, rollout, mask, level=config.rollout_is, threshold=config.is_threshold, criteria=PARSED
    )
    return weights, accepted, reference.metrics(train, rollout, mask, weights, accepted)


def assert_metrics(got, want, rel=1e-5):
    for name, value in want.items():
        assert got[f"rollout_corr/{name}"] == pytest.approx(value, rel=rel, abs=1e-7), name


def test_the_batch_decides_clearly_and_not_vacuously():
    train, rollout, mask = make_batch()
    assert reference.distance_to_bounds(*as_lists(train, rollout, mask), PARSED) > 1e-3
    metrics = correct_rollouts(train, rollout, mask, CONFIG).metrics()
    for name in CRITERIA.split(","):
        assert 0.1 < metrics[f"rollout_corr/rollout_rs_{name}_masked_fraction"] < 0.7, name
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] > 0.1


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_one_process_matches_the_reference(level):
    config = RolloutCorrectionConfig(
        rollout_is=level, rollout_is_threshold=1.5, rollout_rs=CRITERIA, rollout_rs_threshold=BOUNDS
    )
    batch = make_batch()
    weights, accepted, metrics = expected(config)
    result = correct_rollouts(*batch, config)
    result.check()
    torch.testing.assert_close(result.weights, torch.tensor(weights))
    assert result.mask.tolist() == accepted
    assert_metrics(result.metrics(), metrics)
    kept = [sum(row) for row in accepted]
    counts = [batch[2].sum(), (batch[2].sum(1) > 0).sum(), sum(kept), sum(n > 0 for n in kept)]
    assert result.denominators.tolist() == [[float(count) for count in counts]]
    assert result.sequence_lengths.tolist() == kept


@pytest.mark.parametrize("filler", [0.0, math.inf, -math.inf, -1e10, 5.0])
def test_what_stands_at_masked_positions_changes_no_bit(filler):
    result, other = (correct_rollouts(*make_batch(filler=value), CONFIG) for value in (math.nan, filler))
    assert torch.equal(result.weights, other.weights)
    assert torch.equal(result.mask, other.mask)
    assert torch.equal(result.header, other.header)


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_absurd_ratios_stay_finite(shift):
    train = torch.full((2, 3), -1e4 if shift < 0 else -1e-3)
    rollout = torch.full((2, 3), -1e4 if shift > 0 else -1e-3)
    result = correct_rollouts(train, rollout, torch.ones(2, 3, dtype=torch.bool), CONFIG)
    assert result.weights.isfinite().all()
    assert all(math.isfinite(value) for value in result.metrics().values())


def test_sums_over_long_sequences_are_exact():
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(1, 32768, generator=generator)
    train = (rollout + 1e-4 * torch.randn(1, 32768, generator=generator)).clamp(max=0)
    config = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold=1e6)
    got = correct_rollouts(train.double(), rollout.double(), torch.ones(1, 32768, dtype=torch.bool), config)
    want = math.exp(math.fsum(train.double()[0].tolist()) - math.fsum(rollout.double()[0].tolist()))
    assert float(got.weights[0, 0]) == pytest.approx(want, rel=1e-9)


def test_mini_batches_have_their_own_denominators_and_skip_flags():
    train, rollout, mask = make_batch()
    mask[4:6] = False
    ids = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    result = correct_rollouts(train, rollout, mask, CONFIG, mini_batch_ids=ids, num_mini_batches=4)
    for index in range(4):
        part = correct_rollouts(train[ids == index], rollout[ids == index], mask[ids == index], CONFIG)
        assert torch.equal(result.denominators[index], part.denominators[0])
        assert bool(result.skip[index]) == bool(part.skip[0])
    assert bool(result.skip[2])


def test_a_batch_without_tokens_is_skipped_without_nan():
    result = correct_rollouts(*make_batch()[:2], torch.zeros(8, 16, dtype=torch.bool), CONFIG)
    assert result.skip.tolist() == [True]
    assert all(value == 0 for value in result.metrics().values())


def test_original_denominators_count_rejected_tokens():
    config = RolloutCorrectionConfig.from_dict(CONFIG.to_dict() | {"rejection_denominator": "original"})
    batch = make_batch()
    assert correct_rollouts(*batch, config).sequence_lengths.tolist() == batch[2].sum(1).tolist()


GOLDEN = [
    case
    for case in cases("rollout_correction", generation="gen3")
    if not case["config"].get("rollout_is_batch_normalize")
    and isinstance(case["config"].get("rollout_is_threshold", 2.0), float)
    and "max" not in (case["config"].get("rollout_rs") or "")
]
# verl's bounds on k1 act on 1/ρ, and it clamps each token's log-ratio to ±20 before it sums.
SAME_METRICS = (
    *("kl", "training_ppl", "rollout_ppl", "log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_max", "log_ppl_diff_min"),
    *("ppl_ratio", "chi2_token", "chi2_seq", "training_log_ppl", "rollout_log_ppl"),
    *("rollout_is_mean", "rollout_is_std", "rollout_is_eff_sample_size", "rollout_rs_masked_fraction"),
)


def golden_config(case):
    fields = {name: case["config"].get(name) for name in ("rollout_is", "rollout_is_threshold")}
    if fields["rollout_is"] is None:
        fields["rollout_is_threshold"] = None
    names = case["config"].get("rollout_rs")
    if not names:
        return RolloutCorrectionConfig(**fields)
    thresholds = str(case["config"]["rollout_rs_threshold"]).split(",")
    names = [name.strip() for name in names.split(",")]
    thresholds = thresholds if len(thresholds) == len(names) else thresholds * len(names)
    bounds = case.get("rho_bounds") or {}
    texts = ["{}_{}".format(*bounds[n]) if n in bounds else b.strip() for n, b in zip(names, thresholds, strict=True)]
    return RolloutCorrectionConfig(**fields, rollout_rs=",".join(names), rollout_rs_threshold=",".join(texts))


def test_enough_golden_cases_are_read():
    assert len(GOLDEN) >= 40
    assert sum("rollout_rs" in case["config"] and bool(case["config"]["rollout_rs"]) for case in GOLDEN) >= 15


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["id"])
def test_golden_numbers(case):
    arrays = {name: torch.from_numpy(value) for name, value in case["arrays"].items()}
    mask = arrays["response_mask"]
    result = correct_rollouts(arrays["old_log_prob"], arrays["rollout_log_prob"], mask, golden_config(case))
    if "weights" in arrays:
        want = torch.where(mask, arrays["weights"], 0)
        torch.testing.assert_close(result.weights, want, rtol=1e-6, atol=1e-8)
    else:
        assert result.weights is None
    modified = arrays.get("modified_mask_unclamped", arrays["modified_mask"])
    assert torch.equal(result.mask, modified & mask)
    right = case["metrics"] | case.get("metrics_by_definition", {})
    got = result.metrics()
    for name in SAME_METRICS:
        if name == "rollout_rs_masked_fraction" and case.get("clamp_sensitive"):
            continue
        key = f"rollout_corr/{name}"
        if key in right:
            assert got[key] == pytest.approx(right[key], rel=1e-6, abs=1e-8), name


def shard(layout_of_ranks, empty_rank, config, batch):
    """On one rank: the correction of its own rows and CP slice, and what it should have found there."""
    groups = ParallelGroups.from_megatron()
    dp_rank, dp_size = group_rank(groups.dp), group_size(groups.dp)
    rows = torch.arange(8)[dp_rank * 8 // dp_size : (dp_rank + 1) * 8 // dp_size]
    cp = {"cp_rank": group_rank(groups.cp), "cp_size": group_size(groups.cp)}
    layout = SequenceLayout.padded(len(rows), 16 // cp["cp_size"], **cp)
    local = [layout.cut(tensor[rows]) for tensor in batch]
    if dist.get_rank() == empty_rank:
        layout = SequenceLayout.padded(0, layout.shape[1], **cp)
        local, rows = [tensor[:0] for tensor in local], rows[:0]
    result = correct_rollouts(*local, config, layout, groups, sequence_ids=rows)
    return rows, layout.positions(), result.weights, result.mask, result.metrics(), result.denominators


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    "layout", [Layout(cp=2), Layout(cp=4), Layout(dp=2), Layout(dp=4), Layout(cp=2, dp=2)], ids=str
)
def test_shards_match_the_reference(ranks, layout, level):
    config = RolloutCorrectionConfig.from_dict(CONFIG.to_dict() | {"rollout_is": level})
    weights, accepted, metrics = expected(config)
    for rows, positions, got_weights, got_mask, got_metrics, denominators in ranks.run(
        shard, layout, layout, None, config, make_batch()
    ):
        want = torch.tensor(weights)[rows.unsqueeze(1), positions]
        torch.testing.assert_close(got_weights, want)
        assert torch.equal(got_mask, torch.tensor(accepted)[rows.unsqueeze(1), positions])
        assert_metrics(got_metrics, metrics)
        assert denominators[0, 2] == sum(map(sum, accepted))


def test_an_empty_rank_takes_part(ranks):
    batch = tuple(tensor[:4] for tensor in make_batch())
    whole = correct_rollouts(*batch, CONFIG)
    padded = tuple(torch.cat([tensor, tensor]) for tensor in batch)
    for *_, metrics, denominators in ranks.run(shard, Layout(dp=2), None, 1, CONFIG, padded):
        assert torch.equal(denominators, whole.denominators)
        assert_metrics(metrics, {name.split("/")[1]: value for name, value in whole.metrics().items()}, rel=1e-9)


def shard_wrongly(layout, variant, batch):
    """As ``shard``, with one deliberate mistake in the groups."""
    groups = ParallelGroups.from_megatron()
    wrong = {
        "no cp": ParallelGroups(cp=None, dp_cp=groups.dp_cp),
        "no dp_cp": ParallelGroups(cp=groups.cp, dp_cp=groups.cp),
        "cp over dp too": ParallelGroups(cp=groups.dp_cp, dp_cp=groups.dp_cp),
    }[variant]
    dp_rank = group_rank(groups.dp)
    rows = torch.arange(8)[dp_rank * 4 : (dp_rank + 1) * 4]
    cut = SequenceLayout.padded(4, 8, cp_rank=group_rank(groups.cp), cp_size=2)
    local = [cut.cut(tensor[rows]) for tensor in batch]
    config = RolloutCorrectionConfig.from_dict(CONFIG.to_dict() | {"rollout_is": "sequence"})
    result = correct_rollouts(*local, config, cut, wrong)
    return rows, cut.positions(), result.weights, result.denominators


@pytest.mark.parametrize("variant", ["no cp", "no dp_cp", "cp over dp too"])
def test_wrong_groups_are_seen(ranks, variant):
    config = RolloutCorrectionConfig.from_dict(CONFIG.to_dict() | {"rollout_is": "sequence"})
    weights, accepted, _ = expected(config)
    right = [
        torch.allclose(got, torch.tensor(weights)[rows.unsqueeze(1), positions])
        and float(denominators[0, 2]) == sum(map(sum, accepted))
        for rows, positions, got, denominators in ranks.run(
            shard_wrongly, Layout(cp=2, dp=2), None, variant, make_batch()
        )
    ]
    assert not all(right)


def count_collectives(config):
    """Kinds, groups and sizes of the collectives of one correction, on one rank."""
    groups = ParallelGroups.from_megatron()
    layout = SequenceLayout.padded(4, 8, cp_rank=group_rank(groups.cp), cp_size=group_size(groups.cp))
    seen = []
    original = dist.all_reduce

    def record(tensor, op, group):
        seen.append((str(op).split(".")[-1], group_size(group), tuple(tensor.shape)))
        return original(tensor, op=op, group=group)

    dist.all_reduce = record
    try:
        tensor = torch.full(layout.shape, -1.0)
        # No two ranks hold the same number of counted tokens, one holds none.
        mask = torch.rand(layout.shape) < dist.get_rank() / 4
        correct_rollouts(tensor, tensor - 0.1, mask, config, layout, groups).metrics()
    finally:
        dist.all_reduce = original
    return seen


@pytest.mark.parametrize("config", [CONFIG, RolloutCorrectionConfig.disabled()], ids=["everything", "nothing"])
def test_the_collectives_are_three_and_small(ranks, config):
    seen = ranks.run(count_collectives, Layout(cp=2, dp=2), config)
    assert all(calls == seen[0] for calls in seen)
    assert [(kind, size) for kind, size, _ in seen[0]] == [("SUM", 2), ("SUM", 4), ("MAX", 4)]
    assert all(math.prod(shape) < 64 for _, _, shape in seen[0])
    assert ranks.run(count_collectives, Layout(), config) == [[]]
    assert [kind for kind, _, _ in ranks.run(count_collectives, Layout(dp=2), config)[0]] == ["SUM", "MAX"]


def check_bad_token(policy, value):
    """Data that one rank alone sees as bad; the error of each rank."""
    groups = ParallelGroups.from_megatron()
    layout = SequenceLayout.padded(4, 8, cp_rank=group_rank(groups.cp), cp_size=2)
    train, rollout = torch.full((4, 8), -1.0), torch.full((4, 8), -1.1)
    if dist.get_rank() == dist.get_world_size() - 1:
        {"training": train, "rollout": rollout}[policy][2, 5] = value
    ids = torch.arange(4) + 4 * group_rank(groups.dp)
    mask = torch.ones(4, 8, dtype=torch.bool)
    result = correct_rollouts(train, rollout, mask, CONFIG, layout, groups, sequence_ids=ids)
    result.metrics()
    try:
        result.check()
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("policy", ["training", "rollout"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.5])
def test_a_bad_token_on_one_rank_is_the_same_error_on_all(ranks, policy, value):
    messages = ranks.run(check_bad_token, Layout(cp=2, dp=2), policy, value)
    # Rank 3 is CP rank 1 of replica 1: its sixth local token is position 9 of sample 6.
    assert set(messages) == {messages[0]}
    assert messages[0].startswith(f"the {policy} log-prob of sample 6, position 9 is NaN, infinite or positive (1 such")


def plan_on_all_stages(batch):
    groups = ParallelGroups.from_megatron()
    correction = RolloutCorrection(CONFIG, groups)
    inputs = PlanInputs(*batch) if groups.is_last_stage else None
    result = correction.plan(inputs)
    return result.metrics(), result.skip.tolist(), result.denominators.tolist(), result.weights is None


def test_every_pipeline_stage_knows_the_plan(ranks):
    whole = correct_rollouts(*make_batch(), CONFIG)
    first, last = ranks.run(plan_on_all_stages, Layout(pp=2), make_batch())
    assert first[:3] == last[:3] == (whole.metrics(), [False], whole.denominators.tolist())
    assert (first[3], last[3]) == (True, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout_log_probs": torch.zeros(8, 15)}, r"rollout_log_probs has shape \(8, 15\)"),
        ({"response_mask": torch.ones(8, 16)}, "response_mask is torch.float32: expected bool"),
        ({"train_log_probs": torch.zeros(8, 16, dtype=torch.int64)}, "train_log_probs is torch.int64"),
        ({"mini_batch_ids": torch.zeros(7, dtype=torch.int64)}, "mini_batch_ids is torch.int64"),
        ({"sequence_ids": torch.zeros(8)}, "sequence_ids is torch.float32"),
        ({"num_mini_batches": 0}, "num_mini_batches=0"),
    ],
)
def test_wrong_shapes_and_dtypes_are_errors_at_once(change, message):
    arguments = dict(zip(("train_log_probs", "rollout_log_probs", "response_mask"), make_batch(), strict=True))
    with pytest.raises(ValueError, match=message):
        correct_rollouts(**(arguments | change), config=CONFIG)
