"""Presets: their numbers, arguments, files and papers."""

import inspect
import math
import re

import pytest

from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.presets import ALIASES, NAMES, PRESETS
from tests.golden.load import cases
from tests.support.paths import ROOT

TOKEN = {"rollout_is": "token", "rollout_is_threshold": 2.0}
SEQUENCE = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
OFF = {"rollout_is": None}
PPO = {"bypass_mode": True}
PG = {"bypass_mode": True, "loss_type": "reinforce"}


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_a_constructor(name):
    """docs/presets.md has the numbers, which test_documents.py compares."""
    constructor = getattr(RolloutCorrectionConfig, name)
    config = RolloutCorrectionConfig.preset(name)
    assert constructor() == config
    assert constructor(**{name: p.default for name, p in inspect.signature(constructor).parameters.items()}) == config
    assert RolloutCorrectionConfig.from_dict(config.to_dict()) == config

    text = " ".join(inspect.getdoc(constructor).split())
    if name in ALIASES:
        assert f"Alias of ``{ALIASES[name]}``" in text
        assert RolloutCorrectionConfig.preset(ALIASES[name]) == config
    if name != "disabled":
        assert re.search(r'[A-Z]\w+( et al\.| Team)? (19|20)\d\d, "[A-Z][^"]{15,}"', text)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_file(name):
    config = RolloutCorrectionConfig.preset(name)
    path = ROOT / "configs" / "rollout_correction" / f"{name}.yaml"
    assert RolloutCorrectionConfig.from_yaml(path) == config
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    default = RolloutCorrectionConfig().to_dict()
    different = {field for field, value in config.to_dict().items() if value != default[field]}
    assert {line.split(":")[0] for line in lines[1:]} == {"rollout_is"} | different


def test_there_is_no_file_without_a_preset_and_no_name_without_a_constructor():
    assert {path.stem for path in (ROOT / "configs" / "rollout_correction").glob("*.yaml")} == set(PRESETS)
    declared = {name for name, kind in RolloutCorrectionConfig.__annotations__.items() if "_PresetConstructor" in kind}
    assert declared == set(NAMES)


def test_numbers_can_be_given():
    make = RolloutCorrectionConfig
    assert make.decoupled_token_is(3.0) == make(rollout_is="token", rollout_is_threshold=3.0)
    assert make.token_tis(threshold=3.0) == make.decoupled_token_is(3.0)
    assert make.decoupled_seq_is_rs(is_threshold=3.0, rs_threshold="0.4_2") == make(
        rollout_is_threshold=3.0, rollout_rs="seq_sum_k1", rollout_rs_threshold="0.4_2"
    )
    assert make.seq_mis(4.0).criteria == make.decoupled_seq_is_rs(4.0, "0.25_4").criteria
    assert make.decoupled_geo_rs(rs_threshold="0.99_1.02").rollout_rs_threshold == "0.99_1.02"
    assert make.decoupled_token_kpop(0.2, 3.0).criteria[0].upper == 0.2
    assert make.decoupled_k3_rs(rs_threshold=0.005).criteria[0].upper == 0.005
    assert [c.upper for c in make.trust_region_masking(0.001, max_threshold=0.5).criteria] == [0.001, 0.5]
    assert make.ppo_is_bypass(threshold=2.0) == make(**TOKEN, bypass_mode=True)
    assert make.bypass_pg_geo_rs_token_tis(is_threshold=1.5, rs_threshold=1.01).weight_bounds.upper == 1.5


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda make: make.bypass_ppo_clip(3.0), ValueError, r"threshold=3.0 .*ppo_is_bypass\(threshold=3.0\)"),
        (lambda make: make.decoupled_token_is(release="2025-11"), TypeError, "decoupled_token_is.*'release'"),
        (lambda make: make.disabled(2.0), TypeError, "disabled"),
        (lambda make: make.preset("decoupled_tokn_is"), ValueError, "preset=.*did you mean 'decoupled_token_is'"),
        (lambda make: make.preset("disabled", threshold=2.0), ValueError, "'threshold' is unknown: use one of rollout"),
    ],
)
def test_arguments_that_a_preset_does_not_have(call, error, message):
    with pytest.raises(error, match=message):
        call(RolloutCorrectionConfig)


def test_changes_of_a_preset_are_those_of_flags():
    preset = RolloutCorrectionConfig.preset
    assert preset("token_is", rollout_is_threshold=3.0) == RolloutCorrectionConfig.decoupled_token_is(3.0)
    assert preset("decoupled_token_is", rollout_is=None) == RolloutCorrectionConfig(rollout_is=None)
    assert preset("decoupled_token_icepop", rollout_is_threshold=4).is_mode == "mask"
    with pytest.raises(ValueError, match=r"rollout_rs_threshold=2\.0 does nothing"):
        preset("decoupled_token_is", rollout_rs_threshold=2.0)


def test_arguments_of_earlier_releases():
    make = RolloutCorrectionConfig
    criterion = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.01, "rollout_rs_threshold_lower": 0.98}
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
        assert getattr(make, name)(**numbers) == make(**more, **criterion, **veto)
    both = make.seq_is_rs(is_threshold=2.0, rs_threshold=3.0, rs_threshold_lower=0.25)
    assert both.criteria == make.seq_is_rs(rs_threshold="0.25_3").criteria
    (criterion,) = make.geo_mis(rs_threshold=1.01).criteria
    assert (criterion.lower, criterion.upper) == (math.log(0.999), math.log(1.01))
    with pytest.raises(ValueError, match=r"rollout_rs_threshold='0.9_1.1' .*rollout_rs_threshold_lower=0.8"):
        make.geo_rs("0.9_1.1", rs_threshold_lower=0.8)


def test_icepop_stays_icepop_whatever_bounds_it_gets():
    make = RolloutCorrectionConfig
    for config, lower, upper in (
        (make.decoupled_token_icepop(), 0.5, 5.0),
        (make.decoupled_token_icepop(3.0), 0.5, 3.0),
        (make.decoupled_token_icepop("3"), 0.5, 3.0),
        (make.bypass_pg_token_icepop(3), 0.5, 3.0),
        (make.bypass_pg_token_icepop(3.0, threshold_lower=0.1), 0.1, 3.0),
    ):
        bounds = config.weight_bounds
        assert (bounds.mode, bounds.lower, bounds.upper) == ("mask", lower, upper)
    with pytest.raises(ValueError, match=r"rollout_is_threshold_lower=0.1"):
        make.decoupled_token_icepop("0.5_5", threshold_lower=0.1)


def test_the_presets_of_verl_are_ours():
    """verl's recorded configs, translated by their dialect, are the presets of the same names."""
    compared = set()
    for generation, dialect in (("gen2", "verl-2025-11"), ("gen3", "verl")):
        for case in cases("rollout_correction", generation=generation):
            name = case["preset"]
            if name in (None, "default_constructor") or case["config"]["rollout_is_batch_normalize"]:
                continue
            theirs = RolloutCorrectionConfig.from_dict(case["config"], dialect)
            if dialect == "verl-2025-11":
                ours = RolloutCorrectionConfig.from_dict({"preset": name}, dialect)
            else:
                ours = RolloutCorrectionConfig.preset(name)
            # verl has no weights that are only measured.
            level = ours.rollout_is if ours.rollout_is_apply else None
            assert (theirs.rollout_is, theirs.weight_bounds) == (level, ours.weight_bounds)
            assert [c.name for c in theirs.criteria] == [c.name for c in ours.criteria]
            assert theirs.rollout_token_veto_threshold == ours.rollout_token_veto_threshold
            for their, our in zip(theirs.criteria, ours.criteria, strict=True):
                # verl's bounds 0.999_1.001 are on 1/ρ, ours on ρ.
                assert (their.lower, their.upper) == pytest.approx((our.lower, our.upper), rel=2e-3)
            compared.add((dialect, name))
    assert len(compared) >= 18
