"""verl's settings of three generations: their translation, and those that are dropped with a note."""

import pytest
import yaml

from megatron_rc.settings.config import RolloutCorrectionConfig
from tests.support.tables import table
from tests.support.translated import reads

OCTOBER = {"metric_prefix": "mismatch/", "rejection_denominator": "original"}


VERL = """
bypass_mode: false | rollout_is_threshold: 2.0 | rollout_is is absent: 'sequence'
rollout_is: token, rollout_is_threshold: null, rollout_is_batch_normalize: true | rollout_is: null
    | rollout_is='token' dropped | rollout_is_batch_normalize=True dropped
rollout_is: null, rollout_rs: 'token_k2, token_k2,seq_max_k3', rollout_rs_threshold: 0.3
    | rollout_is: null, rollout_rs: 'token_k2,seq_max_k3', rollout_rs_threshold: '0.3,0.3'
rollout_is: null, rollout_rs: 'binary_kl,seq_mean_k1', rollout_rs_threshold: '0.1, 0.5_4'
    | rollout_is: null, rollout_rs: 'token_kpop,seq_mean_k1', rollout_rs_threshold: '0.1,0.25_2.0'
    | seq_mean_k1: verl's bounds 0.5_4 apply to 1/ρ, so they are 0.25_2.0 on ρ
rollout_is: null, loss_type: reinforce | rollout_is: null | policy-gradient loss dropped
rollout_is: token, bypass_mode: true, loss_type: reinforce, rollout_is_batch_normalize: true
    | rollout_is: token, rollout_is_threshold: 2.0, rollout_is_batch_normalize: true, bypass_mode: true, loss_type:
    reinforce
rollout_is: token, bypass_mode: true, rollout_is_batch_normalize: true
    | rollout_is: token, rollout_is_threshold: 2.0, bypass_mode: true
    | rollout_is_batch_normalize=True dropped: PPO in bypass mode applies no weights
rollout_is: null, bypass_mode: true, rollout_rs: seq_mean_k3, rollout_rs_threshold: 0.1
    | rollout_is: null, bypass_mode: true, rollout_rs: seq_mean_k3, rollout_rs_threshold: 0.1, rejection_denominator:
    original
"""


@table("{given} {expected} *notes", VERL)
def test_verl(given, expected, notes):
    reads("verl", given, expected, *notes)
    reads("verl", {"rollout_correction": given}, expected, *notes)
    nested = {"algorithm": {"rollout_correction": given, "gamma": 1.0}, "trainer": {}}
    reads("verl", nested, expected, *notes, "not read, no part of the correction: trainer, gamma")


@pytest.mark.parametrize("dialect", ["verl", "verl-2025-11"])
@pytest.mark.parametrize("given", [{"rollout_correction": None}, {"algorithm": {"rollout_correction": None}}])
def test_a_section_that_is_switched_off(dialect, given):
    reads(dialect, given, {"rollout_is": None})


@pytest.mark.parametrize("dialect", ["verl", "verl-2025-11"])
def test_an_empty_section_has_the_defaults(dialect):
    reads(dialect, {"algorithm": {"rollout_correction": {}}}, {"rollout_is_threshold": 2.0}, "rollout_is is absent")


NOVEMBER_2025 = """
rollout_is: null, rollout_rs: sequence | rollout_is: null, rollout_rs: seq_sum_k1, rollout_rs_threshold: 2.0
    | rollout_rs_threshold is absent: 2.0
rollout_is: null, rollout_rs_threshold: 2.0, rollout_rs_threshold_lower: 0.1 | rollout_is: null
    | rollout_rs_threshold=2.0 dropped | rollout_rs_threshold_lower=0.1 dropped
rollout_is: null, use_policy_gradient: true, bypass_mode: true, rollout_token_veto_threshold: 0.0001
    | rollout_is: null, bypass_mode: true, loss_type: reinforce
    | rollout_token_veto_threshold=0.0001 dropped: without rollout_rs the policy-gradient loss
rollout_is: null, loss_type: reinforce, use_policy_gradient: true, bypass_mode: true, rollout_token_veto_threshold:
    0.0001
    | rollout_is: null, bypass_mode: true, loss_type: reinforce, rollout_token_veto_threshold: 0.0001
rollout_is: null, bypass_mode: true, rollout_rs: geometric, rollout_token_veto_threshold: 0.0001
    | rollout_is: null, bypass_mode: true
    | rollout_rs='geometric' dropped: PPO in bypass mode rejected nothing in 2025-11
    | rollout_token_veto_threshold=0.0001 dropped: PPO in bypass mode
rollout_is: null, bypass_mode: true, loss_type: ppo_clip, rollout_rs: token, rollout_rs_threshold: 3
    | rollout_is: null, bypass_mode: true, rollout_rs: token_k1, rollout_rs_threshold: 3.0
"""


@table("{given} {expected} *notes", NOVEMBER_2025)
def test_verl_of_november_2025(given, expected, notes):
    reads("verl-2025-11", given, expected, *notes)
    reads("verl-2025-11", {"algorithm": {"rollout_correction": given}}, expected, *notes)


OCTOBER_2025 = """
rollout_is: false | -
rollout_is: true, rollout_is_mode: mask | - | rollout_is=True dropped | rollout_is_mode='mask' dropped
rollout_is: false, rollout_is_threshold: 2.0, rollout_is_level: sequence
    | rollout_is: sequence, rollout_is_threshold: 2.0, rollout_is_apply: false, rollout_token_veto_threshold: 0.0001
rollout_is: true, rollout_is_threshold: 2.0, rollout_is_threshold_lower: 0.5, rollout_is_level: geometric,
    rollout_is_veto_threshold: 0.001
    | rollout_is: geometric, rollout_is_threshold: 2.0, rollout_token_veto_threshold: 0.001
    | rollout_is_threshold_lower=0.5 dropped: truncation has no lower bound
rollout_is: true, rollout_is_threshold: 3, rollout_is_threshold_lower: 0, rollout_is_mode: clip
    | rollout_is: token, rollout_is_threshold: 1e-300_3.0, rollout_is_mode: mask, rollout_token_veto_threshold: 0.0001
    | rollout_is_threshold_lower=0 is no bound
"""


@table("{given} {expected} *notes", OCTOBER_2025)
def test_verl_of_october_2025(given, expected, notes):
    expected = {"rollout_is": None, **OCTOBER, **expected}
    reads("verl-2025-10", given, expected, *notes)
    nested = {"algorithm": {**given, "gamma": 1.0}, "data": {}}
    reads("verl-2025-10", nested, expected, *notes, "not read, no part of the correction: data, gamma")


VERLS = {
    "rollout_is": "token",
    "rollout_is_threshold": 2.0,
    "rollout_rs": "token_k1",
    "rollout_rs_threshold": "0.5_1.1",
}


def test_bounds_that_verl_turns_round_are_warned_of(tmp_path):
    """tests/settings/test_migrating.py has the words for one criterion from a dict."""
    path = tmp_path / "verl.yaml"
    path.write_text(yaml.safe_dump(VERLS | {"rollout_rs": "token_k3,seq_mean_k1", "rollout_rs_threshold": "1,0.9_1.2"}))
    with pytest.warns(UserWarning, match="seq_mean_k1 ") as caught:
        RolloutCorrectionConfig.from_yaml(path)
    assert len(caught) == 1
    for dialect in ("megatron_rc", "verl"):
        RolloutCorrectionConfig.from_yaml(path, dialect)


@pytest.mark.parametrize(
    "settings",
    [
        VERLS | {"rollout_rs_threshold": "0.5_2.0"},
        VERLS | {"rollout_rs": "group_mean_k1"},  # verl has none of these
        VERLS | {"rollout_rs_threshold": 1.1, "rollout_rs_threshold_lower": 0.5},
    ],
    ids=str,
)
def test_settings_that_are_not_verls_or_mean_the_same_are_read_in_silence(settings):
    RolloutCorrectionConfig.from_dict(settings)
