"""Presets: the numbers of each name in each release, and their papers."""

import inspect
import math
import re

import pytest
import torch

from megatron_rc import correct_rollouts
from megatron_rc.settings.config import RolloutCorrectionConfig, preset
from megatron_rc.settings.presets import NEWEST, PRESETS
from tests.golden.load import cases
from tests.support.paths import ROOT

TOKEN = {"rollout_is": "token", "rollout_is_threshold": 2.0}
SEQUENCE = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
OFF = {"rollout_is": None}
GEO = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
GEO_THEN = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.001, "rollout_token_veto_threshold": 1e-4}
PPO, PG = {"bypass_mode": True}, {"bypass_mode": True, "loss_type": "reinforce"}
# The presets of 2025-11 that have other numbers now; docs/presets.md has the numbers of now.
THEN = {
    "seq_mis": SEQUENCE | {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "1e-300_2.0"},
    **dict.fromkeys(("decoupled_geo_rs", "geo_rs"), OFF | GEO_THEN),
    "geo_mis": OFF | GEO | {"rollout_token_veto_threshold": 1e-4},
    **dict.fromkeys(("decoupled_geo_rs_seq_tis", "geo_rs_seq_tis"), SEQUENCE | GEO_THEN),
    **dict.fromkeys(("bypass_ppo_clip", "ppo_is_bypass"), TOKEN | PPO),
    "bypass_ppo_clip_geo_rs": OFF | GEO_THEN | PPO,
    **dict.fromkeys(("bypass_pg_geo_rs", "pg_rs", "pure_rs", "bypass_pg_rs"), OFF | GEO_THEN | PG),
    **dict.fromkeys(("bypass_pg_geo_rs_seq_tis", "pg_geo_rs_seq_tis"), SEQUENCE | GEO_THEN | PG),
}
ALIASES = [name for name in PRESETS if "Alias of" in inspect.getdoc(getattr(RolloutCorrectionConfig, name))]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset(name):
    """Its constructor, its releases, its round trip, its file, and its docstring."""
    made, now, then = getattr(RolloutCorrectionConfig, name), preset(name), preset(name, "2025-11")
    assert (made.__name__, made.__qualname__) == (name, f"Presets.{name}")
    assert made() == now == preset(name, NEWEST)
    assert then == (RolloutCorrectionConfig(**THEN[name]) if name in THEN else now)
    assert (then != now) == (name in THEN)
    assert "release" in inspect.signature(made).parameters
    assert made(release=NEWEST) == now
    assert made(release="2025-11") == then
    with pytest.raises(ValueError, match="release='then' is unknown"):
        made(release="then")
    for config in (now, then):
        assert RolloutCorrectionConfig.from_dict(config.to_dict()) == config
    path = ROOT / "configs" / "rollout_correction" / f"{name}.yaml"
    assert RolloutCorrectionConfig.from_yaml(path) == now
    lines, default = path.read_text(encoding="utf-8").splitlines(), RolloutCorrectionConfig().to_dict()
    assert lines[0].startswith("# ")
    different = {field for field, value in now.to_dict().items() if value != default[field]}
    assert {line.split(":")[0] for line in lines[1:]} == {"rollout_is"} | different
    text = " ".join(inspect.getdoc(made).split())
    if name in ALIASES:
        (other,) = set(re.findall(r"Alias of ``(\w+)``", text))
        assert preset(other) == now
        assert other not in ALIASES
    elif name != "disabled":
        assert re.search(r'[A-Z]\w+( et al\.| Team)? (19|20)\d\d, "[A-Z][^"]{15,}"', text)


def test_there_is_no_file_without_a_preset():
    assert {path.stem for path in (ROOT / "configs" / "rollout_correction").glob("*.yaml")} == set(PRESETS)
    assert len(ALIASES) == 15


def test_numbers_can_be_given():
    make = RolloutCorrectionConfig
    assert make.decoupled_token_is(3.0) == make(rollout_is="token", rollout_is_threshold=3.0)
    assert make.token_tis(threshold=3.0) == make.decoupled_token_is(3.0)
    assert make.decoupled_seq_is_rs(is_threshold=3.0, rs_threshold="0.4_2") == make(
        rollout_is_threshold=3.0, rollout_rs="seq_sum_k1", rollout_rs_threshold="0.4_2"
    )
    assert make.seq_mis(4.0).criteria == make.decoupled_seq_is_rs(4.0, "0.25_4").criteria
    assert make.decoupled_geo_rs(rs_threshold="0.99_1.02").rollout_rs_threshold == "0.99_1.02"
    then = make.decoupled_geo_rs_seq_tis(3.0, 1.002, release="2025-11")
    assert (then.rollout_is_threshold, then.rollout_rs_threshold, then.rollout_token_veto_threshold) == (
        3.0,
        1.002,
        1e-4,
    )
    assert make.decoupled_k3_rs(rs_threshold=0.005).criteria[0].upper == 0.005
    assert [c.upper for c in make.trust_region_masking(0.001, max_threshold=0.5).criteria] == [0.001, 0.5]
    assert make.ppo_is_bypass(3.0, release="2025-11").rollout_is_threshold == 3.0
    assert make.ppo_is_bypass(threshold=2.0) == make(**TOKEN, bypass_mode=True)
    assert make.bypass_pg_geo_rs_token_tis(is_threshold=1.5, rs_threshold=1.01).is_bounds[1] == 1.5
    with pytest.raises(ValueError, match=r"threshold=3.0 does nothing: release '2026-08'"):
        make.bypass_ppo_clip(3.0)


def test_arguments_of_earlier_releases():
    make = RolloutCorrectionConfig
    then = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.01, "rollout_rs_threshold_lower": 0.98}
    veto = {"rollout_token_veto_threshold": 1e-5}
    for name, more in (
        ("geo_rs", OFF),
        ("pg_rs", OFF | PG),
        ("pure_rs", OFF | PG),
        ("bypass_ppo_clip_geo_rs", OFF | PPO),
        ("geo_rs_seq_tis", SEQUENCE),
        ("pg_geo_rs_seq_tis", SEQUENCE | PG),
    ):
        numbers = {"rs_threshold": 1.01, "rs_threshold_lower": 0.98, "veto_threshold": 1e-5}
        assert getattr(make, name)(**numbers) == make(**more, **then, **veto)
    both = make.seq_is_rs(is_threshold=2.0, rs_threshold=3.0, rs_threshold_lower=0.25)
    assert both.criteria == make.seq_is_rs(rs_threshold="0.25_3").criteria
    (criterion,) = make.geo_mis(rs_threshold=1.01).criteria
    assert (criterion.lower, criterion.upper) == (math.log(0.999), math.log(1.01))
    with pytest.raises(ValueError, match="has a lower bound for seq_mean_k1 already"):
        make.geo_rs("0.9_1.1", rs_threshold_lower=0.8)


def test_icepop_stays_icepop_whatever_bounds_it_gets():
    make = RolloutCorrectionConfig
    assert (make.decoupled_token_icepop().is_mode, make.decoupled_token_icepop().is_bounds) == ("mask", (0.5, 5.0))
    for config in (make.decoupled_token_icepop(3.0), make.decoupled_token_icepop("3"), make.bypass_pg_token_icepop(3)):
        assert (config.is_mode, config.is_bounds) == ("mask", (0.5, 3.0))
    assert make.bypass_pg_token_icepop(3.0, threshold_lower=0.1).is_bounds == (0.1, 3.0)
    with pytest.raises(ValueError, match="has a lower bound already"):
        make.decoupled_token_icepop("0.5_5", threshold_lower=0.1)


def test_the_presets_of_verl_are_ours():
    """verl's recorded configs, translated by their dialect, are the presets of the same names."""
    found = set()
    for generation, dialect, release in (("gen2", "verl-2025-11", "2025-11"), ("gen3", "verl", NEWEST)):
        for case in cases("rollout_correction", generation=generation):
            name = case["preset"]
            if name not in (None, "default_constructor") and not case["config"]["rollout_is_batch_normalize"]:
                theirs, ours = RolloutCorrectionConfig.from_dict(case["config"], dialect), preset(name, release)
                # verl has no weights that are only measured.
                level = ours.rollout_is if ours.rollout_is_apply else None
                assert (theirs.rollout_is, theirs.is_mode, theirs.is_bounds) == (level, ours.is_mode, ours.is_bounds)
                assert [c.name for c in theirs.criteria] == [c.name for c in ours.criteria]
                assert theirs.rollout_token_veto_threshold == ours.rollout_token_veto_threshold
                for their, our in zip(theirs.criteria, ours.criteria, strict=True):
                    # verl's bounds 0.999_1.001 are on 1/ρ, ours on ρ.
                    assert (their.lower, their.upper) == pytest.approx((our.lower, our.upper), rel=2e-3)
                found.add((release, name))
    assert len(found) >= 18


def healthy_batch(k3=0.006, sequences=256):
    """Responses of 200 to 2,000 tokens, with log-ratios around -k3 and a standard deviation of √(2·k3)."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(2000) < torch.randint(200, 2001, (sequences, 1), generator=generator)
    rollout = -1 - torch.rand(mask.shape, generator=generator)
    return rollout - k3 + (2 * k3) ** 0.5 * torch.randn(mask.shape, generator=generator), rollout, mask


def rejected(bounds, batch):
    """The share of rejected tokens."""
    config = RolloutCorrectionConfig.decoupled_geo_rs_token_tis(rs_threshold=bounds)
    return correct_rollouts(*batch, config).metrics()["rollout_corr/rollout_rs_masked_fraction"]


def test_bounds_in_examples_keep_a_healthy_batch_and_reject_a_broken_one():
    """The geometric bounds in the launch file, and the same in verl's code block."""
    launch_file = (ROOT / "configs" / "launch" / "llama3_70b_64gpus.yaml").read_text()
    assert "rollout-correction-preset: decoupled_geo_rs_token_tis\n" in launch_file
    (bounds,) = re.findall(r"^rollout-rs-threshold: (\S+)$", launch_file, re.MULTILINE)
    (block,) = re.findall(r"decoupled_geo_rs_token_tis\((.*?)\)", (ROOT / "docs" / "adaptors.md").read_text())
    assert re.findall(r'"(.*)"', block) == [bounds]
    healthy, broken = healthy_batch(), healthy_batch(k3=0.06)
    assert rejected(bounds, healthy) < 0.01
    assert rejected(bounds, broken) > 0.9
    assert rejected("0.999_1.001", healthy) > 0.95
