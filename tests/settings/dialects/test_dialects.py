"""Settings of all other programs: refused ones, notes, and the way back."""

import math
import re

import pytest

from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.dialects import probable_dialects
from tests.settings.dialects.test_nemo_rl import named
from tests.support.tables import table

REFUSED = r"""
verl | rollout_rs: geometric, rollout_rs_threshold: 1.01 | can be read with dialect='verl-2025-11'
megatron_rc | use_tis: true, mis_level: token | read these settings with dialect='slime'$
megatron_rc | algorithm: {rollout_correction: {rollout_rs: geometric, use_policy_gradient: true}}
    | read these settings with dialect='verl-2025-11'$
nemo-rl | grpo: {error: 1} | seq_logprob_error_threshold=1.0 must be above 1
nemo-rl | loss_fn: {use: true, type: seq-mask-tis, max: 1.1, min: 0.9}, grpo: {error: 2}
    | seq_logprob_error_threshold=.*'seq-mask-tis' .* one of the two
nemo-rl | grpo: {error: 1.5}, ppo: {error: 2} | seq_logprob_error_threshold .* 1.5 and 2: keep one
slime | --tis-clip: 3.0, tis_clip: 2.0 | tis_clip .* 3.0 and 2.0: keep one
verl-2026 | - | dialect='verl-2026' is unknown: use one of verl, verl-2025-11, verl-2025-10, slime, nemo-rl, trl
verl | rolout_is: token | unknown setting 'rolout_is' of verl: did you mean rollout_is
verl | rollout_correction: {algorithm: {}} | unknown setting 'algorithm' of verl: known are rollout_is
slime | loss_fn: {} | 'loss_fn' .*name of nemo-rl: read these settings with dialect='nemo-rl'
nemo-rl | bad_log_probs: error | name of megatron_rc: read these settings with
verl | rollout_correction: 3 | rollout_correction=3 must hold settings
verl | rollout_is: geometric | rollout_is='geometric' is unknown: use one of None, token, sequence
verl | rollout_is_batch_normalize: 'yes' | rollout_is_batch_normalize='yes' must be true or false
verl | rollout_rs: token_k1 | rollout_rs_threshold=None: rollout_rs='token_k1' needs a bound
verl | rollout_rs: geometric, rollout_rs_threshold: 2 | rollout_rs='geometric' is unknown to verl
verl | rollout_rs: token_k1, rollout_rs_threshold: '1,2' | has 2 bounds for 1 criteria
verl-2025-11 | rollout_rs: token, rollout_rs_threshold: 2, rollout_rs_threshold_lower: 3
    | rollout_rs_threshold_lower=3 must not lie above rollout_rs_threshold=2
verl-2025-11 | rollout_is: token, rollout_is_threshold: null
    | rollout_is_threshold=None: rollout_is='token' needs a number
verl-2025-11 | rollout_is_threshold: 0.5_5.0 | rollout_is_threshold='0.5_5.0' must be a number
verl-2025-11 | bypass_mode: true, loss_type: reinforce, use_policy_gradient: false
    | loss_type='reinforce' and use_policy_gradient=False contradict
slime | use_tis: true, tis_mode: icepop | tis_mode='icepop' is unknown: use one of truncate, clip, mask
slime | use_tis: true, tis_mode: mask, use_rs: true, rs_lower_bound: 3.0, rs_upper_bound: 4.0 | together accept no ρ
slime | use_tis: true, tis_level: geometric, tis_batch_normalize: true
    | tis_batch_normalize=True fails in slime with tis_level='geometric'
slime | use_tis: true, tis_clip: 2.0, tis_mode: mask | tis_clip belongs to slime's built-in
slime | use_opsm: true, opsm_delta: -1 | opsm_delta=-1.0 must be a number, 0 or more
slime | use_tis: true, use_rollout_logprobs: true | use_tis=True and use_rollout_logprobs=True contradict
nemo-rl | use: true, type: tis | truncated_importance_sampling_ratio=None must be a finite positive number
nemo-rl | use: true, type: icepop, max: 5.0
    | truncated_importance_sampling_ratio_min is missing: 'icepop' needs both bounds
nemo-rl | use: true, type: seq-mask-tis, max: 1.1, min: 0.9, by_sequence: true | 'seq-mask-tis' has token weights
nemo-rl | type: tis, max: 2 | needs use_importance_sampling_correction=True
# Below another key.
trl | use_vllm: true, trl: {vllm_importance_sampling_correction: false}
    | trl holds vllm_importance_sampling_correction, a setting of trl: give the settings below trl alone
trl | use_vllm: true, a: {training_args: {vllm_importance_sampling_cap: 2.0}}
    | a.training_args holds vllm_importance_sampling_cap
slime | use_rs: false, args: {use-tis: true, tis-clip: 2.0} | args holds use_tis, a setting of slime
slime | use_tis: true, args: {use_tis: false} | args holds use_tis
nemo-rl | loss_fn: {use: true}, policy: {loss: {max: 2.0}} | policy.loss holds truncated_importance_sampling_ratio
nemo-rl | loss_fn: {use: true}, rl: {grpo: {error: 2}} | rl.grpo holds seq_logprob_error_threshold
verl | config: {algorithm: {rollout_correction: {rollout_is: token}}}
    | config.algorithm.rollout_correction holds rollout_is, a setting of verl
verl-2025-10 | algorithm: {gamma: 1}, trainer: {rollout_is_threshold: 2} | trainer holds rollout_is_threshold
# Without any setting of the program.
trl | trainer: {algorithm: {off_policy_correction: {tis_ratio_type: token}}}
    | no setting of trl in these settings: known are use_vllm
trl | - | no setting of trl
trl | beta: 0.0, learning_rate: 1.0e-6 | no setting of trl
slime | lr: 1.0e-6 | no setting of slime in these settings: known are use_tis
nemo-rl | model: {name: a} | no setting of nemo-rl
trl | algorithm: {rollout_correction: {rollout_is: token, rollout_rs: token_k3, rollout_rs_threshold: 1}}
    | read these settings with dialect='verl'
verl | adv_estimator: grpo, trainer: {} | there is no algorithm.rollout_correction in these settings: known are
verl | algorithm: {adv_estimator: grpo}, trainer: {} | there is no algorithm.rollout_correction
verl-2025-11 | algorithm: {adv_estimator: grpo}, trainer: {} | there is no algorithm.rollout_correction
verl | - | there is no algorithm.rollout_correction
verl-2025-10 | actor: {clip_ratio: 0.2} | no setting of verl-2025-10
# Misspelt beside other settings.
trl | use_vllm: true, off_policy_mask_treshold: 0.5 | did you mean off_policy_mask_threshold
trl | use_vlm: true, learning_rate: 1.0e-6 | did you mean use_vllm
nemo-rl | loss_fn: {use: true, trucated_importance_sampling_type: tis} | did you mean truncated_importance_sampling_type
nemo-rl | loss_fn: {use: true}, grpo: {seq_logprob_error_treshold: 2} | did you mean seq_logprob_error_threshold
slime | use_tis: true, use_rollout_logprob: true | did you mean use_rollout_logprobs
slime | use_tis: true, custom_tis_funtion_path: a.b | did you mean custom_tis_function_path
# Settings of the loss that cannot work here.
verl | actor_rollout_ref: {actor: {tis_imp_ratio_cap: 2}}, algorithm: {gamma: 1.0}
    | actor_rollout_ref.actor.tis_imp_ratio_cap=2 .* rollout_is: token, rollout_is_threshold: 2
verl-2025-11 | actor_rollout_ref: {actor: {tis_imp_ratio_cap: 2.0}} | actor_rollout_ref.actor.tis_imp_ratio_cap=2.0
verl-2025-10 | actor_rollout_ref.actor.tis_imp_ratio_cap: 2, algorithm: {gamma: 1.0}
    | tis_imp_ratio_cap=2 .*--rollout-is token --rollout-is-threshold 2
trl | use_vllm: true, vllm_importance_sampling_mode: token_truncate, loss_type: vespo | loss_type='vespo'
slime | use_tis: true, use_rs: true, rs_trust_region: max, rs_tr_threshold: 0.5 | rs_trust_region='max'
"""


@table("dialect {given} message", REFUSED)
def test_what_cannot_work_is_refused(dialect, given, message):
    with pytest.raises(ValueError, match=message):
        RolloutCorrectionConfig.from_dict(named(given) if dialect == "nemo-rl" else given, dialect)


@pytest.mark.parametrize(
    ("dialect", "settings", "section"),
    [
        (
            "verl",
            {"algorithm": {"rollout_correction": {"rollout_is": "token"}}},
            {"reward_kwargs": {"loss_type": "mse"}},
        ),
        ("verl-2025-11", {"algorithm": {"rollout_correction": {"rollout_is": "token"}}}, {"trainer": {"preset": "x"}}),
        ("trl", {"vllm_importance_sampling_mode": "token_mask"}, {"teacher": {"use_vllm": True}}),
    ],
)
def test_names_that_mean_something_else_in_other_sections_are_no_settings(dialect, settings, section):
    alone = RolloutCorrectionConfig.from_dict(settings, dialect)
    assert RolloutCorrectionConfig.from_dict(settings | section, dialect) == alone


@pytest.mark.parametrize(
    ("dialect", "section", "rollout_is"),
    [
        ("verl", {"algorithm": {"rollout_correction": {}}}, "sequence"),
        ("verl-2025-10", {"algorithm": {"adv_estimator": "grpo"}}, None),
        ("nemo-rl", {"loss_fn": {"ratio_clip_min": 0.2}}, None),
    ],
)
def test_a_section_without_settings_of_the_correction_means_the_programs_defaults(dialect, section, rollout_is):
    config = RolloutCorrectionConfig.from_dict(section, dialect)
    assert config.rollout_is == rollout_is
    assert config.notes[0].startswith(f"read as {dialect}: rollout_is={rollout_is!r}")


def test_notes_are_kept_and_no_part_of_the_config():
    settings = {"rollout_is": "token", "rollout_rs_threshold": 3.0}
    config = RolloutCorrectionConfig.from_dict(settings, "verl")
    assert config == RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=2.0)
    assert config.notes == (
        "read as verl: rollout_is='token', rollout_is_threshold=2.0",
        "rollout_rs_threshold=3.0 dropped: there is no criterion in rollout_rs",
    )
    assert settings == {"rollout_is": "token", "rollout_rs_threshold": 3.0}


UNREAD = """
verl | rollout_correction: {rollout_is: null}, actor_rollout_ref: {actor: {tis_imp_ratio_cap: -1, kl_loss_type: k1}}
verl | algorithm: {rollout_correction: {rollout_is: token}}, actor_rollout_ref: {policy_loss: {rollout_correction:
    {rollout_is: token}}}
trl | use_vllm: true, loss_type: dapo
slime | use_tis: true, rs_trust_region: null, rs_tr_threshold: 0.5
slime | use_tis: true, custom_loss_function_path: null
nemo-rl | loss_fn: {use: true, force_on_policy_ratio: false, disable_ppo_ratio: false}
"""


@table("dialect {given}", UNREAD)
def test_what_changes_nothing_is_named_alone(dialect, given):
    *_, note = RolloutCorrectionConfig.from_dict(named(given), dialect).notes
    assert note.startswith("not read, no part of the correction: ")


BESIDE = """
nemo-rl | loss_fn: {use: true, disable_ppo_ratio: true} | disable_ppo_ratio=True: .*--policy-loss reinforce
nemo-rl | loss_fn: {use: true, force_on_policy_ratio: true} | force_on_policy_ratio=True: .*--grpo-iterations 1
nemo-rl | loss_fn: {use: true, reference_policy_kl_type: k3} | --kl-estimator k3\\+
slime | use_tis: true, use_unbiased_kl: true | --kl-importance-weight
slime | use_tis: true, custom_loss_function_path: my.loss | custom_loss_function_path='my.loss'
"""


@table("dialect {given} words", BESIDE)
def test_settings_of_the_loss_are_notes(dialect, given, words):
    notes = RolloutCorrectionConfig.from_dict(named(given), dialect).notes
    assert any(re.search(words, note) for note in notes)


def test_numbers_survive_exactly():
    low = 0.1 + 0.2
    high = 1 + 2**-50
    config = RolloutCorrectionConfig.from_dict(
        {"rollout_is": None, "rollout_rs": "token", "rollout_rs_threshold": high, "rollout_rs_threshold_lower": low},
        "verl-2025-11",
    )
    (criterion,) = config.criteria
    assert (criterion.lower, criterion.upper) == (math.log(low), math.log(high))


PROBABLE = """
rollout_rs: geometric, rollout_rs_threshold: 1.01 | verl-2025-11
algorithm: {rollout_correction: {rollout_rs: seq_mean_k1, rollout_rs_threshold: 0.9_1.1}} | verl
rollout_is_threshold: 2.0, rollout_is: true, rollout_is_level: token | verl-2025-10
use_tis: true, tis_level: token | slime
loss_fn: {use_importance_sampling_correction: true, ratio_clip_min: 0.2} | nemo-rl
rollout_is: token, rollout_is_threshold: 2.0 | verl | verl-2025-11
learning_rate: 1
"""


@table("{settings} *dialects", PROBABLE)
def test_settings_are_probably_of(settings, dialects):
    assert probable_dialects(settings) == dialects
