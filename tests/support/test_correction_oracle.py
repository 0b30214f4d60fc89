"""Tests of the oracle: against every golden case, and by hand for features that no other project has.

The golden comparison leaves out, counted and with a reason in ``left_out``: the k3 KL if some |log ρ| > 20 is above our
clamp; gen3's statistics that its clamp of each token's log ρ to ±20 changed; gen2's fractions of geometric means, which
count sequences; slime's weights at tokens that it rejects. Everything else of every case is compared. gen1 and gen2
describe weights before truncation, and with std and ESS clamped ones, so that these are compared with variants of the
settings.
"""

import copy
import dataclasses
import functools
import math
from collections import Counter

import pytest

from tests.golden.load import cases
from tests.support import correction_oracle as oracle
from tests.support.golden_oracle import LEVEL_CRITERIA, golden_settings

# exp(-20) = 2.1e-9: we clamp the smallest sequence weight, the sources do not. Nothing else needs ATOL.
RTOL, ATOL = 1e-6, 3e-9
NUMBERS = {"gen1": 30, "gen2": 29, "gen3": 75, "slime": 10}
MINIMUM = {"gen1": (834, 7_112), "gen2": (953, 9_461), "gen3": (2_191, 22_045), "slime": (198, 3_851)}
CLAMPED = "gen3 clamps the log-ratio of each token"
LEFT_OUT = {"k3_kl above the clamp": 20, CLAMPED: 150, "counts sequences": 8, "rejected by slime": 283}
BEFORE_BOUNDS = ("mean", "max", "min", "seq_mean", "seq_std", "seq_max", "seq_min", "seq_max_deviation")
BOUNDED_BELOW = ("std", "eff_sample_size")
DECISIONS = ("masked_fraction", "fraction_high", "fraction_low")


class Case:
    """A golden case, and the oracle's results under its settings and variants of them."""

    def __init__(self, case):
        self.generation, self.id, self.config = case["generation"], case["id"], case["config"]
        arrays = {name: array.tolist() for name, array in case["arrays"].items()}
        self.inputs = [arrays[name] for name in ("old_log_prob", "rollout_log_prob", "response_mask")]
        self.weights = arrays.get("weights_by_definition", arrays.get("weights"))
        self.mask = arrays.get("modified_mask_unclamped", arrays.get("modified_mask"))
        self.metrics = case["metrics"] | case.get("metrics_by_definition", {})
        self.settings = golden_settings(self.generation, self.config)
        self.clamp_sensitive = case.get("clamp_sensitive", False)
        train, rollout, mask = self.inputs
        self.valid = [(i, t) for i, row in enumerate(mask) for t, valid in enumerate(row) if valid]
        log_ratios = [train[i][t] - rollout[i][t] for i, t in self.valid]
        self.largest, self.smallest = max(log_ratios), min(log_ratios)
        self.results = {}

    def run(self, settings=None, **changes):
        settings = dataclasses.replace(settings or self.settings, **changes)
        if settings not in self.results:
            self.results[settings] = oracle.correct(*self.inputs, settings)
        return self.results[settings]

    def of_sequences(self, name, settings=None):
        """The mean of one metric over sequences, each as a batch of its own, as in slime."""
        settings = dataclasses.replace(settings or self.settings, batch_normalize=False)
        rows = [[[part[i]] for part in self.inputs] for i in range(len(self.inputs[2])) if any(self.inputs[2][i])]
        return oracle.mean(oracle.correct(*row, settings).metrics[name] for row in rows)


def weight_metric(case, key, settings):
    """The metric ``key`` of gen1 and gen2 for the weights of these settings."""
    if key in BEFORE_BOUNDS:
        settings = dataclasses.replace(settings, mode="truncate", lower=0.0, upper=math.inf)
    elif key in BOUNDED_BELOW:
        settings = dataclasses.replace(settings, mode="clamp")
    return case.run(settings).metrics[f"rollout_is_{key}"]


def metric_gen1(case, name):
    if name in ("rollout_is_veto_fraction", "rollout_is_catastrophic_token_fraction"):
        return case.run().metrics.get(name, 0.0 if case.settings.veto is None else None)
    if name.startswith("rollout_is_") and name != "rollout_is_batch_norm_factor":
        return weight_metric(case, name.removeprefix("rollout_is_"), case.settings)
    return case.run().metrics[name.removeprefix("mismatch_")]


def metric_gen2(case, name):
    if not name.startswith("rollout_rs_"):
        return metric_gen1(case, name)
    key, ((criterion, lower, upper),) = name.removeprefix("rollout_rs_"), case.settings.criteria
    if "masked" in key:
        return case.run().metrics[f"rollout_rs_{criterion}_{key}"]
    level = {name: level for level, name in LEVEL_CRITERIA.items()}[criterion]
    return weight_metric(case, key, oracle.Settings(level=level, lower=math.exp(lower), upper=math.exp(upper)))


def metric_gen3(case, name):
    return case.run().metrics[name]


def metric_slime(case, name):
    side = "above" if name.endswith("high") else "below"
    if name == "batch_norm_factor":
        return case.run().metrics["rollout_is_batch_norm_factor"]
    if name.startswith(("rs_mask_fraction", "tis_mask_fraction")):
        return case.of_sequences(f"rollout_rs_{case.settings.criteria[-1][0]}_rho_fraction_{side}")
    if name.startswith("is_ratio_") and name.endswith("_final"):
        choose = {"mean": oracle.mean, "min": min, "max": max}[name.split("_")[2]]
        weights, mask = case.run().weights, case.inputs[2]
        kept = ([w for w, valid in zip(*rows, strict=True) if valid] for rows in zip(weights, mask, strict=True))
        return oracle.mean(choose(row) for row in kept if row)
    ours = {
        "tis_weight_before_bound": "rollout_is_raw_mean",
        "tis_weight_after_bound": "rollout_is_mean",
        "is_ratio_mean_after_tis_rs": "rollout_is_mean",
        "tis_truncate_fraction": "rollout_is_ratio_fraction_high",
        "tis_clip_fraction_high": "rollout_is_ratio_fraction_high",
        "tis_clip_fraction_low": "rollout_is_ratio_fraction_low",
        "rs_catastrophic_token_fraction": "rollout_is_catastrophic_token_fraction",
        "rs_catastrophic_seq_fraction": "rollout_is_veto_fraction",
    }
    return case.of_sequences(ours.get(name, name))


METRIC = {"gen1": metric_gen1, "gen2": metric_gen2, "gen3": metric_gen3, "slime": metric_slime}


def left_out(case, name):
    """The reason not to compare a metric, or None."""
    if name.endswith("k3_kl") and case.largest > oracle.EXP_LIMIT:
        return "k3_kl above the clamp"
    if case.generation == "gen2" and case.config["rollout_rs"] == "geometric" and "rs_ratio_fraction" in name:
        return "counts sequences"
    if case.generation == "gen3" and name.startswith("rollout_rs_"):
        outside = max(case.largest, -case.smallest) > oracle.EXP_LIMIT
        if case.clamp_sensitive or (outside and not name.endswith(DECISIONS)):
            return CLAMPED
    return None


def compare_metrics(case):
    """([(name, ours, theirs)], number of metrics left out for each reason)."""
    found, reasons = [], Counter()
    for name, want in case.metrics.items():
        short = name.split("/")[-1]
        reason = left_out(case, short)
        if reason:
            reasons[reason] += 1
        else:
            found.append((name, METRIC[case.generation](case, short), want))
    return found, reasons


def compare_entries(case):
    """([(place, ours, theirs)] of weights and masks at valid tokens, number left out for each reason)."""
    found, reasons, result = [], Counter(), case.run()
    for i, t in case.valid:
        if case.mask is not None:
            found.append((f"mask[{i}][{t}]", result.mask[i][t], case.mask[i][t]))
        if case.weights is None:
            continue
        if case.generation == "slime" and not case.mask[i][t]:
            reasons["rejected by slime"] += 1
            continue
        vetoed = case.generation == "gen1" and not result.mask[i][t]
        found.append((f"weights[{i}][{t}]", 0.0 if vetoed else result.weights[i][t], case.weights[i][t]))
    return found, reasons


def agree(got, want):
    return got == want or math.isclose(got, want, rel_tol=RTOL, abs_tol=ATOL)


@functools.cache
def golden(generation):
    return [Case(case) for case in cases("rollout_correction", generation=generation)]


@pytest.mark.parametrize("compare", [compare_metrics, compare_entries])
@pytest.mark.parametrize("generation", NUMBERS)
def test_golden_numbers(generation, compare):
    assert len(golden(generation)) == NUMBERS[generation]
    found = [(case.id, *row) for case in golden(generation) for row in compare(case)[0]]
    wrong = [row for row in found if not agree(*row[2:])]
    assert not wrong, f"{len(wrong)} differ, the first: {wrong[:5]}"
    assert len(found) >= MINIMUM[generation][compare is compare_entries]


def test_little_is_left_out():
    every = [case for generation in NUMBERS for case in golden(generation)]
    total = sum((compare_metrics(case)[1] + compare_entries(case)[1] for case in every), Counter())
    assert total == LEFT_OUT


WRONG = {
    "k1 bounds on 1/ρ": ("gen3", 10, lambda s: {"criteria": tuple(upside_down(*c) for c in s.criteria)}),
    "weights not truncated": ("gen3", 10, lambda s: {"mode": "truncate", "upper": math.inf}),
    "IcePop as truncation": ("gen3", 5, lambda s: {"mode": "truncate"}),
    "no veto": ("gen2", 3, lambda s: {"veto": None}),
    "w̄ over accepted tokens": ("gen2", 2, lambda s: {"scope": "accepted"}),
    "no normalisation": ("gen3", 5, lambda s: {"batch_normalize": False}),
    "lower bound 1/u where one is given": ("gen1", 5, lambda s: {"lower": None}),
}


def upside_down(name, lower, upper):
    return (name, -upper, -lower) if name.endswith("k1") else (name, lower, upper)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_variant_is_noticed(name):
    generation, least, change = WRONG[name]
    noticed = 0
    for case in golden(generation):
        twin = copy.copy(case)
        twin.settings, twin.results = dataclasses.replace(case.settings, **change(case.settings)), {}
        noticed += not all(agree(*row[1:]) for row in compare_entries(twin)[0])
    assert noticed >= least, noticed


# By hand: features that no golden case has. A row holds log ρ at each position, None outside the mask.

LN2 = math.log(2)


def batch(*rows, filler=math.nan):
    """(train, rollout, mask): π_rollout = exp(-60) at every token."""
    rollout = [[filler if x is None else -60.0 for x in row] for row in rows]
    train = [[filler if x is None else x - 60.0 for x in row] for row in rows]
    return train, rollout, [[x is not None for x in row] for row in rows]


def correct(rows, more=None, **settings):
    return oracle.correct(*batch(*rows), settings, **(more or {}))


def test_masked_positions_and_empty_sequences_change_nothing():
    rows = ([0.5, None, -0.5], [None, None, None])
    first, second = (
        oracle.correct(*batch(*rows, filler=value), {"level": "token", "veto": 0.1}) for value in (math.nan, math.inf)
    )
    assert first == second
    assert first.weights == [[pytest.approx(math.exp(0.5)), 0.0, pytest.approx(math.exp(-0.5))], [0.0] * 3]
    assert first.metrics["num_sequences"] == 1
    assert first.bad == {"train": 0, "rollout": 0, "either": 0}
    nothing = correct([[None, None]], level="sequence", criteria=(("seq_mean_k1", -1.0, 1.0),), batch_normalize=True)
    assert nothing.skip == [True]
    assert {value for name, value in nothing.metrics.items() if name != "rollout_is_batch_norm_factor"} == {0.0}


def test_only_the_argument_of_exp_is_clamped():
    rows = ([50.0, -23.0], [-50.0, 0.0])
    result = correct(rows, level="sequence", upper=1e30, criteria=(("seq_sum_k1", -10.0, 28.0),))
    assert result.mask == [[True, True], [False, False]]
    assert [row[0] for row in result.weights] == [math.exp(20), math.exp(-20)]
    assert correct(rows, criteria=(("token_k2", -math.inf, 1249.0),)).mask == [[False, True], [False, True]]
    k3 = correct(rows, criteria=(("token_k3", -math.inf, 48.0),)).metrics
    assert k3["rollout_rs_token_k3_max"] == pytest.approx(math.exp(20) - 51)
    assert correct([[-50.0]]).metrics["k3_kl"] == pytest.approx(49)


def test_denominators_and_lengths():
    rows = ([0.0, 2.0, 0.0], [2.0, 2.0, None], [0.0, 0.0, None], [None, None, None])
    more = {"mini_batch_ids": [0, 2, 0, 1], "num_mini_batches": 3}
    accepted = correct(rows, more, criteria=(("token_k1", -1.0, 1.0),))
    assert accepted.denominators == [[5, 2, 4, 2], [0, 0, 0, 0], [2, 1, 0, 0]]
    assert accepted.skip == [False, True, True]
    assert accepted.sequence_lengths == [2, 0, 2, 0]
    assert correct(rows, denominator="original").sequence_lengths == [3, 2, 2, 0]


def test_normalisation_counts_a_sequence_once():
    rows = ([LN2, None, None], [0.0, 0.0, 0.0], [None, None, None], [-1.0, -1.0, None])
    settings = {"level": "sequence", "batch_normalize": True, "criteria": (("seq_sum_k1", -1.0, 1.0),)}
    mean = (2 + 1 + math.exp(-2)) / 3
    assert correct(rows, **settings).weights[0][0] == pytest.approx(2 / mean)
    scoped = correct(rows, scope="accepted", **settings)
    assert scoped.metrics["rollout_is_batch_norm_factor"] == pytest.approx(1.5)
    assert scoped.weights[3][0] == pytest.approx(math.exp(-2) / 1.5), "a rejected token keeps its weight"
    assert scoped.metrics["rollout_is_applied_max"] == pytest.approx(2 / 1.5)
    tiny = correct([[-30.0]], level="token", batch_normalize=True)
    assert tiny.weights == [[math.exp(-20)]]
    assert tiny.metrics["rollout_is_batch_norm_factor"] == 1


def test_opsm_takes_sequences_or_tokens_of_negative_advantage():
    rows, criteria = ([-1.0, -0.5], [-1.0, -0.5], [-0.1, -0.1]), (("opsm", -0.5, math.inf),)
    sequences = correct(rows, {"advantages": [-1.0, 1.0, -1.0]}, criteria=criteria)
    assert sequences.mask == [[False, False], [True, True], [True, True]]
    tokens = correct(rows, {"advantages": [[-1.0, 1.0], [0.0, -1.0], [-1.0, -1.0]]}, criteria=criteria)
    assert tokens.mask == [[False, True], [True, False], [True, True]]
    assert tokens.metrics["rollout_rs_opsm_masked_fraction"] == pytest.approx(1 / 3)


def test_group_mean_weighs_tokens_alike_and_group_any_takes_the_siblings_of_a_lost_response():
    rows, more = ([0.9, None, None], [0.0, 0.0, 0.0], [0.5, None, None]), {"group_ids": [7, 7, 8]}
    result = correct(rows, more, criteria=(("group_mean_k1", -1.0, 0.3),))
    assert result.mask == [[True, False, False], [True] * 3, [False] * 3]
    assert result.metrics["rollout_rs_group_mean_k1_seq_masked_fraction"] == pytest.approx(1 / 3)
    rows = ([0.0, 0.0], [-9.0, 0.0], [0.0, 0.0], [None, None], [2.0, 0.0], [0.0, 0.0])
    more = {"group_ids": [0, 0, 1, 1, 2, 2]}
    result = correct(rows, more, veto=0.01, criteria=(("token_k1", -1.0, 1.0), ("group_any", -math.inf, math.inf)))
    assert result.mask == [[False] * 2, [False] * 2, [True] * 2, [False] * 2, [False, True], [True, True]]
    assert result.metrics["rollout_is_veto_fraction"] == pytest.approx(1 / 5)
    assert result.metrics["rollout_rs_group_any_seq_masked_fraction"] == pytest.approx(2 / 5)


@pytest.mark.parametrize(
    ("policy", "mask", "lengths"),
    [("reject_token", [[False, True], [True, True]], [1, 2]), ("reject_sequence", [[False] * 2, [True] * 2], [2, 2])],
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2e-4])
def test_bad_tokens_are_in_no_statistic(policy, mask, lengths, value):
    train, rollout, valid = batch([0.0, 0.5], [0.25, 0.25])
    rollout[0][0] = value
    result = oracle.correct(train, rollout, valid, {"level": "sequence", "bad": policy, "denominator": "original"})
    assert result.mask == mask
    assert result.sequence_lengths == lengths
    assert result.bad == {"train": 0, "rollout": 1, "either": 1}
    assert result.first_bad == {"train": None, "rollout": (0, 0)}
    assert result.metrics["num_tokens"] == 3
    assert result.metrics["kl"] == pytest.approx(-1 / 3)
    assert result.weights[0] == [0.0, pytest.approx(math.exp(0.5))]


def test_k1_metrics_describe_the_inverse_ratio():
    rows = ([LN2, 0.0, 0.0, -2.0], [0.0, 0.0, -2.0, -2.0])
    metrics = correct(rows, criteria=(("token_k1", -1.0, 0.5),)).metrics
    assert metrics["rollout_rs_token_k1_fraction_high"] == metrics["rollout_rs_token_k1_rho_fraction_below"] == 3 / 8
    assert metrics["rollout_rs_token_k1_fraction_low"] == metrics["rollout_rs_token_k1_rho_fraction_above"] == 1 / 8
    assert metrics["rollout_rs_token_k1_max"] == 2
    assert metrics["rollout_rs_token_k1_seq_max"] == 1
    assert metrics["rollout_rs_masked_fraction"] == 0.5


def test_quantiles_and_breakdowns():
    rows = ([0.0, 1.0, 2.0, 3.0], [4.0, None, None, None], [-1.0, -1.0, None, None])
    more = {"rewards": [1.0, 0.0, -1.0], "versions": [[5, 4, 0, 9], 5, 3], "current_version": 5, "max_staleness": 2}
    result = correct(rows, more, criteria=(("token_k1", -2.0, 2.5),))
    assert result.metrics["log_ratio_p50"] == 1
    assert result.metrics["log_ratio_p95"] == pytest.approx(3.7)
    masked = {
        name: {key: row["masked_fraction"] for key, row in rows.items()} for name, rows in result.breakdowns.items()
    }
    assert masked["reward"] == {"negative": 0, "positive": 0.25, "zero": 1}
    assert masked["length"] == {0: 1, 1: 0, 2: 0.25}
    assert masked["staleness"] == {0: pytest.approx(2 / 3), 1: 0, 2: 0}
    assert result.breakdowns["staleness"][2]["kl"] == 0
    assert result.breakdowns["staleness"][0]["token_fraction"] == pytest.approx(3 / 7)


def test_the_distance_to_the_nearest_bound():
    rows = ([0.0, 0.9], [0.45, None])
    settings = {"criteria": (("token_k1", -1.0, 1.0), ("seq_sum_k2", -math.inf, 0.5)), "veto": math.exp(-3)}
    found = oracle.distances(*batch(*rows), settings)
    assert found == {
        "token_k1": pytest.approx(0.1),
        "token_k1 of sequences": pytest.approx(0.55),
        "seq_sum_k2": pytest.approx(0.095),
        "veto": pytest.approx(3.0),
    }
    assert oracle.distance_to_bounds(*batch(*rows), settings) == pytest.approx(0.095)
    assert oracle.distance_to_bounds(*batch(*rows), {"level": "token", "upper": math.exp(0.5)}) == pytest.approx(0.05)
