"""Other projects' numbers, read through their own configuration: weights, masks and the metrics defined alike.

Left out, each counted by its reason: ``k3_kl`` where some log ρ > 20 (ours is clamped); what gen3's clamp of each
token's log-ratio to ±20 changed; slime's weights at tokens that it rejects; gen1's and gen2's metrics of weights before
truncation or clamped from below, where ours are after it (their raw mean and extremes are compared with ours); gen2's
``rollout_rs_*`` of the rejection's weights; bounds that only a metric used; slime's metrics, which are means over
sequences of its own names.
"""

import functools
import math
from collections import Counter

import pytest
import torch

from megatron_rc import RolloutCorrectionConfig, correct_rollouts
from tests.golden.load import cases

RTOL, ATOL = 1e-6, 3e-9
DIALECT = {"gen1": "verl-2025-10", "gen2": "verl-2025-11", "gen3": "verl", "slime": "slime"}
# Number of cases, of metrics compared, and of metrics left out by reason.
NUMBERS = {"gen1": 30, "gen2": 29, "gen3": 75, "slime": 10}
COMPARED = {"gen1": 610, "gen2": 641, "gen3": 2191, "slime": 0}
LEFT_OUT = {
    "gen1": {"before truncation": 210, "a bound that only a metric used": 14, "k3_kl above the clamp": 4},
    "gen2": {"before truncation": 140, "of gen2's rejection weights": 180, "k3_kl above the clamp": 3},
    "gen3": {"gen3 clamps the log-ratio of each token": 150, "k3_kl above the clamp": 12},
    "slime": {"slime's own": 199},
}
RAW = {
    "rollout_is_mean": "rollout_is_raw_mean",
    "rollout_is_max": "rollout_is_raw_max",
    "rollout_is_min": "rollout_is_raw_min",
}
BEFORE = ("std", "eff_sample_size", "seq_mean", "seq_std", "seq_max", "seq_min", "seq_max_deviation")
DECISIONS = ("masked_fraction", "fraction_high", "fraction_low")


def config_of(case):
    more = {"gen1": {"rollout_is": True}, "gen3": {"rollout_is": None}}.get(case["generation"], {})
    return RolloutCorrectionConfig.from_dict(more | case["config"], dialect=DIALECT[case["generation"]])


@functools.cache
def golden(generation):
    """[(case, config, result)] of one generation."""
    found = []
    for case in cases("rollout_correction", generation=generation):
        arrays = {name: torch.from_numpy(value) for name, value in case["arrays"].items()}
        config = config_of(case)
        inputs = (arrays[name] for name in ("old_log_prob", "rollout_log_prob", "response_mask"))
        found.append((case, config, correct_rollouts(*inputs, config)))
    return found


@pytest.mark.parametrize("generation", NUMBERS)
def test_weights_and_masks(generation):
    assert len(golden(generation)) == NUMBERS[generation]
    for case, config, result in golden(generation):
        arrays = {name: torch.from_numpy(value) for name, value in case["arrays"].items()}
        valid = arrays["response_mask"]
        mask = arrays.get("modified_mask_unclamped", arrays.get("modified_mask"))
        if mask is not None:
            assert torch.equal(result.mask, mask & valid), case["id"]
        weights = arrays.get("weights_by_definition", arrays.get("weights"))
        if weights is None:
            assert not config.applies_weights, case["id"]
            continue
        compared = valid & mask if generation == "slime" else valid
        got = torch.where(result.mask, result.weights, 0) if generation == "gen1" else result.weights
        torch.testing.assert_close(got[compared], weights[compared], rtol=RTOL, atol=ATOL, msg=case["id"])


def left_out(case, name, log_ratio):
    """Why a metric is not compared, or None."""
    generation = case["generation"]
    if generation == "slime":
        return "slime's own"
    if name.endswith("k3_kl") and float(log_ratio.max()) > 20:
        return "k3_kl above the clamp"
    if generation == "gen3":
        outside = float(log_ratio.abs().max()) > 20
        if name.startswith("rollout_rs_") and (
            case.get("clamp_sensitive") or (outside and not name.endswith(DECISIONS))
        ):
            return "gen3 clamps the log-ratio of each token"
        return None
    if name.startswith("rollout_rs_") and "masked" not in name and "_rs_ratio_fraction" not in name:
        return "of gen2's rejection weights"
    if name.startswith("rollout_is_") and name.removeprefix("rollout_is_") in BEFORE:
        return "before truncation"
    lower = case["config"].get("rollout_is_threshold_lower")
    if lower is not None and case["config"]["rollout_is_mode"] == "truncate" and name.endswith("fraction_low"):
        return "a bound that only a metric used"
    return None


def ours(case, config, metrics, name):
    """Our value of their metric."""
    generation = case["generation"]
    if generation in ("gen1", "gen2") and name in RAW:
        return metrics[config.metric_prefix + RAW[name]]
    if "veto" in name or "catastrophic" in name:
        return metrics.get(config.metric_prefix + name, 0.0)
    if generation == "gen2" and name.startswith("rollout_rs_") and "ratio_fraction" not in name:
        (criterion,) = config.criteria
        return metrics[f"{config.metric_prefix}rollout_rs_{criterion.name}_{name.removeprefix('rollout_rs_')}"]
    return metrics[config.metric_prefix + name]


@pytest.mark.parametrize("generation", NUMBERS)
def test_metrics(generation):
    compared, reasons, wrong = 0, Counter(), []
    for case, config, result in golden(generation):
        arrays = case["arrays"]
        log_ratio = torch.from_numpy((arrays["old_log_prob"] - arrays["rollout_log_prob"])[arrays["response_mask"]])
        metrics = result.metrics()
        for key, want in (case["metrics"] | case.get("metrics_by_definition", {})).items():
            name = key.split("/")[-1]
            reason = left_out(case, name, log_ratio)
            reasons[reason] += 1
            if reason is not None:
                continue
            compared += 1
            got = ours(case, config, metrics, name)
            if not math.isclose(got, want, rel_tol=RTOL, abs_tol=ATOL):
                wrong.append((case["id"], name, got, want))
    assert not wrong, f"{len(wrong)} differ: {wrong[:6]}"
    assert reasons.pop(None, 0) == compared == COMPARED[generation]
    assert reasons == LEFT_OUT[generation]


def test_october_2025_measures_what_it_does_not_apply():
    """With ``rollout_is`` off, verl computed the same weights, reported the same metrics, and used none of them."""
    for case, config, applied in golden("gen1"):
        measured = RolloutCorrectionConfig.from_dict({**case["config"], "rollout_is": False}, dialect="verl-2025-10")
        arrays = {name: torch.from_numpy(value) for name, value in case["arrays"].items()}
        inputs = (arrays[name] for name in ("old_log_prob", "rollout_log_prob", "response_mask"))
        result = correct_rollouts(*inputs, measured)
        assert result.weights is None
        assert torch.equal(result.mask, arrays["response_mask"])
        got, want = result.metrics(), applied.metrics()
        # The veto is the one rejection of that release.
        names = [name for name in want if "rollout_rs" not in name and "veto" not in name and "catastroph" not in name]
        assert len(names) > 40
        assert {name: got[name] for name in names} == pytest.approx({name: want[name] for name in names}, rel=1e-12)
        assert config.rollout_is == measured.rollout_is
