"""Other projects' numbers, read through their own configuration: weights, masks and all metrics.

Some metrics are defined differently; ours are then compared under other settings:

- gen1 and gen2 describe weights before truncation, and their standard deviation and ESS clamped from both sides.
- gen2's ``rollout_rs_*`` describe weights of the rejection's level, with its bounds.
- slime's are means over sequences, each a batch of its own.

Left out, each counted by its reason: ``k3_kl`` if some log ρ > 20 (ours is clamped), and gen3's statistics that its
clamp of each token's log-ratio to ±20 changed. Weights of slime are compared at the tokens that it accepts.
"""

import functools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from megatron_rc import RolloutCorrectionConfig, correct_rollouts
from tests.golden.load import cases

# exp(-20) = 2.1e-9: we clamp the smallest sequence weight, the sources do not. Nothing else needs ATOL.
RTOL = 1e-6
ATOL = 3e-9
DIALECT = {"gen1": "verl-2025-10", "gen2": "verl-2025-11", "gen3": "verl", "slime": "slime"}
# Number of cases, of metrics compared, and of metrics left out by reason.
NUMBERS = {"gen1": 30, "gen2": 29, "gen3": 75, "slime": 10}
COMPARED = {"gen1": 834, "gen2": 961, "gen3": 2191, "slime": 198}
CLAMPED = "gen3 clamps the log-ratio of each token"
LEFT_OUT = {
    "gen1": {"k3_kl above the clamp": 4},
    "gen2": {"k3_kl above the clamp": 3},
    "gen3": {CLAMPED: 150, "k3_kl above the clamp": 12},
    "slime": {"k3_kl above the clamp": 1},
}
LEVELS = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}
BEFORE_BOUNDS = ("mean", "max", "min", "seq_mean", "seq_std", "seq_max", "seq_min", "seq_max_deviation")
BOUNDED = ("std", "eff_sample_size", "fraction_high", "fraction_low")
DECISIONS = ("masked_fraction", "fraction_high", "fraction_low")
NORMALIZE = "rollout_is_batch_normalize"
UNTRUNCATED = {"rollout_is_mode": "truncate", "rollout_is_threshold": 1e9, "rollout_is_threshold_lower": None}


def config_of(case):
    more = {"gen1": {"rollout_is": True}, "gen3": {"rollout_is": None}}.get(case["generation"], {})
    return RolloutCorrectionConfig.from_dict(more | case["config"], dialect=DIALECT[case["generation"]])


def inputs_of(case):
    """(log π_train, log π_rollout, mask)."""
    return [torch.from_numpy(case["arrays"][name]) for name in ("old_log_prob", "rollout_log_prob", "response_mask")]


@functools.cache
def golden(generation):
    """[(case, config, a function from a config to its result)] of one generation."""
    golden_cases = []
    for case in cases("rollout_correction", generation=generation):
        run = functools.cache(functools.partial(correct_rollouts, *inputs_of(case)))
        golden_cases.append((case, config_of(case), run))
    return golden_cases


def assert_weights_and_mask(case, config, result):
    arrays = {name: torch.from_numpy(value) for name, value in case["arrays"].items()}
    valid = arrays["response_mask"]
    mask = arrays.get("modified_mask_unclamped", arrays.get("modified_mask"))
    if mask is not None:
        assert torch.equal(result.mask, mask & valid), case["id"]
    weights = arrays.get("weights_by_definition", arrays.get("weights"))
    if weights is None:
        assert not config.applies_weights, case["id"]
        return
    compared = valid & mask if case["generation"] == "slime" else valid
    # gen1's weights of vetoed sequences are 0.
    got = torch.where(result.mask, result.weights, 0) if case["generation"] == "gen1" else result.weights
    torch.testing.assert_close(got[compared], weights[compared], rtol=RTOL, atol=ATOL, msg=case["id"])


@pytest.mark.parametrize("generation", NUMBERS)
def test_weights_and_masks(generation):
    assert len(golden(generation)) == NUMBERS[generation]
    for case, config, run in golden(generation):
        assert_weights_and_mask(case, config, run(config))


def upside_down(config):
    """The fields whose k1 bounds are on 1/ρ."""
    bounds = [
        f"{math.exp(-criterion.upper)}_{math.exp(-criterion.lower)}"
        if criterion.name.endswith("k1")
        else str(criterion.upper)
        for criterion in config.criteria
    ]
    return {"rollout_rs_threshold": ",".join(bounds), "rollout_rs_threshold_lower": None}


def of_upper_bound(config, mode=None):
    """The fields of weights whose upper bound alone is given."""
    return UNTRUNCATED | {"rollout_is_threshold": config.is_bounds[1], "rollout_is_mode": mode or config.is_mode}


# The generation, the least number of its cases that notice, a field that a case needs, and the changed fields.
WRONG = {
    "k1 bounds on 1/ρ": ("gen3", 10, "criteria", upside_down),
    "weights not truncated": ("gen3", 10, "rollout_is", lambda config: UNTRUNCATED),
    "IcePop as truncation": ("gen3", 5, "rollout_is", lambda config: of_upper_bound(config, "truncate")),
    "no veto": ("gen2", 3, "rollout_token_veto_threshold", lambda config: {"rollout_token_veto_threshold": None}),
    "w̄ over accepted tokens": ("gen2", 2, NORMALIZE, lambda config: {f"{NORMALIZE}_scope": "accepted"}),
    "no normalisation": ("gen3", 5, NORMALIZE, lambda config: {NORMALIZE: False}),
    "lower bound 1/u where one is given": ("gen1", 5, "rollout_is", lambda config: of_upper_bound(config)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_variant_is_noticed(name):
    generation, least, needed, change = WRONG[name]
    noticed = 0
    for case, config, run in golden(generation):
        if getattr(config, needed):
            try:
                assert_weights_and_mask(case, config, run(replace(config, **change(config))))
            except AssertionError:
                noticed += 1
    assert noticed >= least


def left_out(case, name, log_ratio):
    """Why a metric is not compared, or None."""
    if name.endswith("k3_kl") and float(log_ratio.max()) > 20:
        return "k3_kl above the clamp"
    if case["generation"] == "gen3" and name.startswith("rollout_rs_"):
        outside = float(log_ratio.abs().max()) > 20
        if case.get("clamp_sensitive") or (outside and not name.endswith(DECISIONS)):
            return CLAMPED
    return None


def ours(case, config, metrics_of, name):
    """Our value of their metric; ``metrics_of`` gives the metrics under a config."""
    prefix = config.metric_prefix
    if case["generation"] == "slime":
        return of_slime(case, config, metrics_of, name)
    if "veto" in name or "catastrophic" in name:
        return metrics_of(config).get(prefix + name, 0.0)
    if case["generation"] == "gen3":
        return metrics_of(config)[prefix + name]
    bounds = [case["config"].get(f"rollout_is_threshold{end}") for end in ("_lower", "")]
    if name.startswith("rollout_rs_") and "rs_ratio_fraction" not in name:
        ((criterion,), key) = config.criteria, name.removeprefix("rollout_rs_")
        if "masked" in key:
            return metrics_of(config)[f"{prefix}rollout_rs_{criterion.name}_{key}"]
        config = replace(config, rollout_is=LEVELS[criterion.name])
        name = f"rollout_is_{key}"
        bounds = [math.exp(criterion.lower), math.exp(criterion.upper)]
    if name.removeprefix("rollout_is_") in BEFORE_BOUNDS:
        config = replace(config, **UNTRUNCATED)
    elif name.startswith("rollout_is_") and name.endswith(BOUNDED):
        fields = {"rollout_is_threshold_lower": bounds[0], "rollout_is_threshold": bounds[1]}
        config = replace(config, rollout_is_mode="clamp", **fields)
    return metrics_of(config)[prefix + name]


OF_SLIME = {
    "tis_weight_before_bound": "rollout_is_raw_mean",
    "tis_weight_after_bound": "rollout_is_mean",
    "is_ratio_mean_after_tis_rs": "rollout_is_mean",
    "tis_truncate_fraction": "rollout_is_ratio_fraction_high",
    "tis_clip_fraction_high": "rollout_is_ratio_fraction_high",
    "tis_clip_fraction_low": "rollout_is_ratio_fraction_low",
    "rs_catastrophic_token_fraction": "rollout_is_catastrophic_token_fraction",
    "rs_catastrophic_seq_fraction": "rollout_is_veto_fraction",
}


def of_slime(case, config, metrics_of, name):
    inputs = inputs_of(case)
    prefix = config.metric_prefix
    if name == "batch_norm_factor":
        return metrics_of(config)[f"{prefix}rollout_is_batch_norm_factor"]
    if name.startswith("is_ratio_") and name.endswith("_final"):
        choose = {"mean": torch.mean, "min": torch.min, "max": torch.max}[name.split("_")[2]]
        rows = zip(correct_rollouts(*inputs, config).weights, inputs[2], strict=True)
        return float(torch.stack([choose(weights[valid]) for weights, valid in rows if valid.any()]).mean())
    key = OF_SLIME.get(name, name)
    alone = replace(config, rollout_is_batch_normalize=False)
    if name.startswith(("rs_mask_fraction", "tis_mask_fraction")):
        side = "above" if name.endswith("high") else "below"
        key = f"rollout_rs_{config.criteria[-1].name}_rho_fraction_{side}"
    rows = metrics_of_rows(case["id"], alone)
    return sum(metrics[prefix + key] for metrics in rows) / len(rows)


@functools.cache
def metrics_of_rows(identity, config):
    """The metrics of each sequence of a case of slime, as a batch of its own."""
    (inputs,) = [inputs_of(case) for case, *_ in golden("slime") if case["id"] == identity]
    rows = [[tensor[row : row + 1] for tensor in inputs] for row, valid in enumerate(inputs[2]) if valid.any()]
    return [correct_rollouts(*row, config).metrics() for row in rows]


@pytest.mark.parametrize("generation", NUMBERS)
def test_metrics(generation):
    compared = 0
    reasons = Counter()
    wrong = []
    for case, config, run in golden(generation):
        train, rollout, mask = inputs_of(case)
        for key, want in (case["metrics"] | case.get("metrics_by_definition", {})).items():
            name = key.split("/")[-1]
            reason = left_out(case, name, (train - rollout)[mask])
            if reason is not None:
                reasons[reason] += 1
                continue
            compared += 1
            got = ours(case, config, lambda config, run=run: run(config).metrics(), name)
            if not math.isclose(got, want, rel_tol=RTOL, abs_tol=ATOL):
                wrong.append((case["id"], name, got, want))
    assert not wrong, f"{len(wrong)} differ: {wrong[:6]}"
    assert (compared, reasons) == (COMPARED[generation], LEFT_OUT[generation])


def test_october_2025_measures_what_it_does_not_apply():
    """With ``rollout_is`` off, verl computed the same weights, reported the same metrics, and used none of them."""
    for case, config, run in golden("gen1"):
        measured = RolloutCorrectionConfig.from_dict({**case["config"], "rollout_is": False}, dialect="verl-2025-10")
        result = run(measured)
        assert result.weights is None
        assert torch.equal(result.mask, inputs_of(case)[2])
        got = result.metrics()
        want = run(config).metrics()
        # The veto is the one rejection of that release.
        names = [name for name in want if "rollout_rs" not in name and "veto" not in name and "catastroph" not in name]
        assert len(names) > 40
        assert {name: got[name] for name in names} == pytest.approx({name: want[name] for name in names}, rel=1e-12)
        assert config.rollout_is == measured.rollout_is
