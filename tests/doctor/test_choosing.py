"""docs/choosing.md: its tree is the doctor's, and its numbers are those of the doctor, the study and the benchmarks."""

import math
import re

import pytest
import torch

from megatron_rc import RolloutCorrectionConfig, correct_rollouts
from megatron_rc.doctor.advice import UPPER_BOUNDS, choose
from megatron_rc.doctor.facts import Facts
from megatron_rc.doctor.measure import facts_of_batch
from megatron_rc.doctor.rules import BY_NAME, Verdict, judge
from megatron_rc.doctor.sampled import Sampled
from megatron_rc.doctor.series import K3
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
TREE = re.search(r"```text\n(the doctor says.*?)```", PAGE, flags=re.DOTALL)[1]
LEAVES = re.findall(r"─ (?:yes|no): (\w+)(?:,.*)?$", TREE, flags=re.MULTILINE)
NEAR = {"k3_kl": 0.0019, "log_ratio_p99": 0.1}
FAR = {"k3_kl": 0.0021, "log_ratio_p99": 0.1}


def found(rule):
    return [Verdict(BY_NAME[rule], "", {})]


def batch():
    generator = torch.Generator().manual_seed(0)
    rollout = -1 - torch.rand(16, 64, generator=generator)
    old = rollout + 0.1 * torch.randn(16, 64, generator=generator)
    return Sampled(rollout_log_probs=rollout, old_log_probs=old, response_mask=torch.ones(16, 64, dtype=torch.bool))


@pytest.mark.parametrize(
    ("leaf", "facts", "verdicts"),
    [
        (0, FAR, found("shift")),
        (0, {**FAR, "k3_kl": 0.11, "sequence_eff_sample_size": 0.9}, []),
        (1, FAR, found("tails")),
        (2, NEAR, []),
        (3, {**FAR, "sequence_eff_sample_size": 0.5}, []),
        (4, {**FAR, "sequence_eff_sample_size": 0.49}, []),
        (4, NEAR, found("long_products")),
    ],
)
def test_a_leaf_of_the_tree_is_the_doctors_choice(leaf, facts, verdicts):
    assert len(LEAVES) == 5
    assert choose(Facts(facts), verdicts, batch()).preset == LEAVES[leaf]
    assert f"→ `{LEAVES[leaf]}`" in PAGE


def test_no_sequence_weights_for_responses_of_which_one_would_count():
    """k3 of 0.005 a token: weights of e⁻²⁰ and less, all different."""
    length = 8192
    sigma = 0.1
    generator = torch.Generator().manual_seed(0)
    log_ratio = sigma * torch.randn(64, length, generator=generator) - sigma**2 / 2
    rollout = torch.full_like(log_ratio, -3.0)
    mask = torch.ones_like(log_ratio, dtype=torch.bool)
    sampled = Sampled(rollout_log_probs=rollout, old_log_probs=rollout + log_ratio, response_mask=mask)
    facts = facts_of_batch(sampled)
    log_weights = (sampled.old_log_probs.double() - rollout.double()).sum(1)
    weights = (log_weights - log_weights.max()).exp()
    exact = float(weights.sum() ** 2 / (64 * weights.square().sum()))
    assert facts["sequence_eff_sample_size"] == pytest.approx(exact, rel=1e-6)
    assert exact < 0.1
    assert choose(facts, judge(facts), sampled).preset == "decoupled_geo_rs_token_tis"


def test_the_tree_has_the_doctors_numbers():
    assert f"own, {RolloutCorrectionConfig.decoupled_geo_rs_token_tis().rollout_rs_threshold}," in PAGE
    assert f"k3 up to {K3:g}" in TREE
    assert f"first of {UPPER_BOUNDS[0]:g}, {UPPER_BOUNDS[1]:g}, {UPPER_BOUNDS[2]:g} and {UPPER_BOUNDS[3]:g}" in PAGE


def test_presets_of_the_page_exist():
    names = set(re.findall(r"\b(?:decoupled|bypass)_[a-z]\w+", PAGE)) - {"bypass_mode"}
    assert len(names) > 6
    for name in names:
        getattr(RolloutCorrectionConfig, name)()


def test_how_long_is_long():
    """The formula holds for normal log-ratios; ``n`` of the text follows from it."""
    k3 = 0.01
    length = 35
    assert f"n = {math.log(2) / 2:.2f} / k3 tokens: 350 tokens at k3 = 0.001, {length} at {k3}" in PAGE
    generator = torch.Generator().manual_seed(0)
    sigma = math.sqrt(2 * k3)
    log_ratio = sigma * torch.randn(40_000, length, generator=generator, dtype=torch.float64) - k3
    rollout = torch.full_like(log_ratio, -2.0)
    config = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold=2.0, rollout_is_apply=False)
    mask = torch.ones_like(rollout, dtype=torch.bool)
    metrics = correct_rollouts(rollout + log_ratio, rollout, mask, config).metrics()
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(k3, rel=0.02)
    assert metrics["rollout_corr/rollout_is_raw_eff_sample_size"] == pytest.approx(math.exp(-2 * length * k3), rel=0.02)


def test_costs_are_the_measured_ones():
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| ([a-z, ]+) \| [\d.]+ \| [\d.]+ \| ([\d.]+) % \| ([\d.]+) \|$", text, flags=re.MULTILINE)
    shares = {name: (share, ratio) for name, share, ratio in table}
    in_loss = ("bypass", "the same in one pass")
    decoupled = [share for name, (share, _) in shares.items() if name not in in_loss]
    assert f"{min(decoupled)} % to {max(decoupled)} %" in PAGE
    for name in in_loss:
        assert f"{shares[name][1]} of the time" in PAGE
