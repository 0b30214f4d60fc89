"""Other programs' configurations: what each setting becomes, what is dropped with a note, what is refused."""

import math

import pytest
import torch

from megatron_rc import correct_rollouts
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.dialects import DIALECTS, translate
from tests.golden.load import cases

LEVELS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
UNTRUNCATED = math.exp(20)
TIS = {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "tis"}
ICEPOP = {**TIS, "truncated_importance_sampling_type": "icepop"}
SEQ_MASK = {**TIS, "truncated_importance_sampling_type": "seq-mask-tis"}
RATIO, RATIO_MIN = "truncated_importance_sampling_ratio", "truncated_importance_sampling_ratio_min"
OCTOBER = {"metric_prefix": "mismatch/", "rejection_denominator": "original"}
SLIME = {"rejection_denominator": "original"}


def reads(dialect, given, expected, *parts):
    """The fields that settings become, and a note for each part of a text: no fewer, no more."""
    own, notes = translate(given, dialect)
    assert RolloutCorrectionConfig.from_dict(own) == RolloutCorrectionConfig(**expected)
    assert notes[0].startswith(f"read as {dialect}: rollout_is={own['rollout_is']!r}")
    assert len(notes) == 1 + len(parts), notes
    for part in parts:
        assert any(part in note for note in notes[1:]), (part, notes)
    assert all("\n" not in note for note in notes)


@pytest.mark.parametrize(
    ("given", "expected", "notes"),
    [
        ({"rollout_is": None}, {"rollout_is": None}, ()),
        ({}, {"rollout_is_threshold": 2.0}, ("rollout_is is absent: 'sequence'",)),
        ({"rollout_is": "token"}, {"rollout_is": "token", "rollout_is_threshold": 2.0}, ()),
        (
            {"rollout_is": "token", "rollout_is_threshold": "3"},
            {"rollout_is": "token", "rollout_is_threshold": 3.0},
            (),
        ),
        (
            {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0", "rollout_is_batch_normalize": True},
            {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0", "rollout_is_batch_normalize": True},
            (),
        ),
        (
            {"rollout_is": "token", "rollout_is_threshold": None, "rollout_is_batch_normalize": True},
            {"rollout_is": None},
            ("rollout_is='token' dropped", "rollout_is_batch_normalize=True dropped"),
        ),
        (
            {"rollout_is": None, "rollout_is_threshold": 3.0, "rollout_is_batch_normalize": True},
            {"rollout_is": None},
            ("rollout_is_threshold=3.0 dropped", "rollout_is_batch_normalize=True dropped"),
        ),
        (
            {"rollout_is": None, "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": False},
            {"rollout_is": None},
            (),
        ),
        (
            {"rollout_is": None, "rollout_rs_threshold": 2.0},
            {"rollout_is": None},
            ("rollout_rs_threshold=2.0 dropped",),
        ),
        (
            {"rollout_is": None, "rollout_rs": "token_k1", "rollout_rs_threshold": 1.5},
            {"rollout_is": None, "rollout_rs": "token_k1", "rollout_rs_threshold": 1.5},
            (),
        ),
        (
            {"rollout_is": None, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_4"},
            {"rollout_is": None, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.25_2.0"},
            ("seq_mean_k1: verl's bounds 0.5_4 apply to 1/ρ, so they are 0.25_2.0 on ρ",),
        ),
        (
            {"rollout_is": None, "rollout_rs": "seq_sum_k1,token_k3", "rollout_rs_threshold": "0.5_2.0, 0.1"},
            {"rollout_is": None, "rollout_rs": "seq_sum_k1,token_k3", "rollout_rs_threshold": "0.5_2.0,0.1"},
            (),
        ),
        (
            {"rollout_is": None, "rollout_rs": "token_k2, token_k2,seq_max_k3", "rollout_rs_threshold": 0.3},
            {"rollout_is": None, "rollout_rs": "token_k2,seq_max_k3", "rollout_rs_threshold": "0.3,0.3"},
            (),
        ),
        ({"rollout_is": None, "loss_type": "reinforce"}, {"rollout_is": None}, ("policy-gradient loss dropped",)),
        ({"rollout_is": None, "loss_type": "ppo_clip"}, {"rollout_is": None}, ()),
        (
            {"rollout_is": "token", "bypass_mode": True, "loss_type": "reinforce", "rollout_is_batch_normalize": True},
            {
                "rollout_is": "token",
                "rollout_is_threshold": 2.0,
                "rollout_is_batch_normalize": True,
                "bypass_mode": True,
                "loss_type": "reinforce",
            },
            (),
        ),
        (
            {"rollout_is": "token", "bypass_mode": True, "rollout_is_batch_normalize": True},
            {"rollout_is": "token", "rollout_is_threshold": 2.0, "bypass_mode": True},
            ("rollout_is_batch_normalize=True dropped: PPO in bypass mode applies no weights",),
        ),
    ],
)
def test_verl(given, expected, notes):
    reads("verl", given, expected, *notes)
    reads("verl", {"rollout_correction": given}, expected, *notes)
    nested = {"algorithm": {"rollout_correction": given, "gamma": 1.0}, "trainer": {}}
    reads("verl", nested, expected, *notes, "not read, no part of the correction: trainer, gamma")


@pytest.mark.parametrize("dialect", ["verl", "verl-2025-11"])
@pytest.mark.parametrize("given", [{"rollout_correction": None}, {"algorithm": {"rollout_correction": None}}])
def test_a_section_that_is_switched_off(dialect, given):
    reads(dialect, given, {"rollout_is": None})


@pytest.mark.parametrize(
    ("given", "expected", "notes"),
    [
        ({"rollout_is": "sequence"}, {"rollout_is_threshold": 2.0}, ()),
        (
            {"rollout_is": None, "rollout_rs": "geometric", "rollout_rs_threshold": 1.001},
            {"rollout_is": None, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.001},
            (),
        ),
        (
            {
                "rollout_is": None,
                "rollout_rs": "token",
                "rollout_rs_threshold": 2,
                "rollout_rs_threshold_lower": 0.8,
                "rollout_token_veto_threshold": "1e-4",
            },
            {
                "rollout_is": None,
                "rollout_rs": "token_k1",
                "rollout_rs_threshold": "0.8_2.0",
                "rollout_token_veto_threshold": 1e-4,
            },
            (),
        ),
        (
            {"rollout_is": None, "rollout_rs": "sequence"},
            {"rollout_is": None, "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": 2.0},
            ("rollout_rs_threshold is absent: 2.0",),
        ),
        (
            {"rollout_is": None, "rollout_rs": "sequence", "rollout_rs_threshold_lower": 0},
            {"rollout_is": None, "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "1e-300_2.0"},
            ("rollout_rs_threshold is absent: 2.0", "rollout_rs_threshold_lower=0 is no bound: written as 1e-300"),
        ),
        (
            {"rollout_is": None, "rollout_rs_threshold": 2.0, "rollout_rs_threshold_lower": 0.1},
            {"rollout_is": None},
            ("rollout_rs_threshold=2.0 dropped", "rollout_rs_threshold_lower=0.1 dropped"),
        ),
        (
            {"rollout_is": None, "rollout_token_veto_threshold": 1e-4},
            {"rollout_is": None, "rollout_token_veto_threshold": 1e-4},
            (),
        ),
        (
            {
                "rollout_is": None,
                "use_policy_gradient": True,
                "bypass_mode": True,
                "rollout_token_veto_threshold": 1e-4,
            },
            {"rollout_is": None, "bypass_mode": True, "loss_type": "reinforce"},
            ("rollout_token_veto_threshold=0.0001 dropped: without rollout_rs the policy-gradient loss",),
        ),
        (
            {
                "rollout_is": None,
                "loss_type": "reinforce",
                "use_policy_gradient": True,
                "bypass_mode": True,
                "rollout_token_veto_threshold": 1e-4,
            },
            {"rollout_is": None, "bypass_mode": True, "loss_type": "reinforce", "rollout_token_veto_threshold": 1e-4},
            (),
        ),
        (
            {
                "rollout_is": None,
                "use_pure_rollout_correction": True,
                "bypass_old_logprob_for_rollout": True,
                "rollout_rs": "token",
                "rollout_rs_threshold": 2.0,
                "rollout_token_veto_threshold": 1e-4,
            },
            {"rollout_is": None, "bypass_mode": True, "loss_type": "reinforce", "rollout_token_veto_threshold": 1e-4}
            | {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0},
            (),
        ),
        # verl's own YAML spells the thresholds of what is off as null.
        (
            {
                "rollout_is": None,
                "rollout_is_threshold": 2.0,
                "rollout_rs": None,
                "rollout_rs_threshold": None,
                "rollout_rs_threshold_lower": None,
                "rollout_token_veto_threshold": None,
            },
            {"rollout_is": None},
            (),
        ),
        (
            {"rollout_is": "token", "bypass_old_logprob_for_rollout": True, "use_pure_rollout_correction": True},
            {"rollout_is": "token", "rollout_is_threshold": 2.0, "bypass_mode": True, "loss_type": "reinforce"},
            (),
        ),
        (
            {
                "rollout_is": "token",
                "bypass_mode": True,
                "use_policy_gradient": False,
                "rollout_is_batch_normalize": True,
            },
            {"rollout_is": "token", "rollout_is_threshold": 2.0, "bypass_mode": True},
            ("rollout_is_batch_normalize=True dropped: PPO in bypass mode",),
        ),
        ({"rollout_is": None, "use_policy_gradient": True}, {"rollout_is": None}, ("policy-gradient loss dropped",)),
        (
            {"rollout_is": None, "bypass_mode": True, "rollout_rs": "geometric", "rollout_token_veto_threshold": 1e-4},
            {"rollout_is": None, "bypass_mode": True},
            (
                "rollout_rs='geometric' dropped: PPO in bypass mode rejected nothing in 2025-11",
                "rollout_token_veto_threshold=0.0001 dropped: PPO in bypass mode",
            ),
        ),
        (
            {
                "rollout_is": None,
                "bypass_mode": True,
                "loss_type": "ppo_clip",
                "rollout_rs": "token",
                "rollout_rs_threshold": 3,
            },
            {"rollout_is": None, "bypass_mode": True, "rollout_rs": "token_k1", "rollout_rs_threshold": 3.0},
            (),
        ),
        ({"rollout_is": None, "loss_type": "ppo_clip", "bypass_mode": False}, {"rollout_is": None}, ()),
    ],
)
def test_verl_of_november_2025(given, expected, notes):
    reads("verl-2025-11", given, expected, *notes)
    reads("verl-2025-11", {"algorithm": {"rollout_correction": given}}, expected, *notes)


@pytest.mark.parametrize(
    ("given", "expected", "notes"),
    [
        ({}, {}, ()),
        (
            {"rollout_is": True, "rollout_is_mode": "mask"},
            {},
            ("rollout_is=True dropped", "rollout_is_mode='mask' dropped"),
        ),
        (
            {"rollout_is": False, "rollout_is_threshold": 2.0, "rollout_is_level": "sequence"},
            {"rollout_is": "sequence", "rollout_is_threshold": 2.0, "rollout_is_apply": False},
            (),
        ),
        (
            {
                "rollout_is_threshold": 2.0,
                "rollout_is_threshold_lower": 0.4,
                "rollout_is_mode": "mask",
                "rollout_is_veto_threshold": 1e-3,
            },
            {"rollout_is": "token", "rollout_is_threshold": "0.4_2.0", "rollout_is_mode": "mask"}
            | {"rollout_is_apply": False},
            ("rollout_is_veto_threshold=0.001 dropped: with rollout_is off, nothing was rejected there",),
        ),
        (
            {"rollout_is": True, "rollout_is_threshold": 2.0},
            {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_token_veto_threshold": 1e-4},
            (),
        ),
        (
            {"rollout_is": True, "rollout_is_threshold": 2.0, "rollout_is_veto_threshold": None},
            {"rollout_is": "token", "rollout_is_threshold": 2.0},
            (),
        ),
        (
            {
                "rollout_is": True,
                "rollout_is_threshold": 2.0,
                "rollout_is_threshold_lower": 0.5,
                "rollout_is_level": "geometric",
                "rollout_is_veto_threshold": 1e-3,
            },
            {"rollout_is": "geometric", "rollout_is_threshold": 2.0, "rollout_token_veto_threshold": 1e-3},
            ("rollout_is_threshold_lower=0.5 dropped: truncation has no lower bound",),
        ),
        *(
            (
                {
                    "rollout_is": True,
                    "rollout_is_threshold": 3,
                    "rollout_is_threshold_lower": lower,
                    "rollout_is_level": "sequence",
                    "rollout_is_mode": mode,
                    "rollout_is_veto_threshold": None,
                },
                {"rollout_is": "sequence", "rollout_is_threshold": written, "rollout_is_mode": "mask"},
                notes,
            )
            for mode in ("mask", "clip")
            for lower, written, notes in (
                (None, 3.0, ()),
                (0.4, "0.4_3.0", ()),
                (0, "1e-300_3.0", ("rollout_is_threshold_lower=0 is no bound",)),
            )
        ),
    ],
)
def test_verl_of_october_2025(given, expected, notes):
    expected = {"rollout_is": None, **OCTOBER, **expected}
    reads("verl-2025-10", given, expected, *notes)
    nested = {"algorithm": {**given, "gamma": 1.0}, "data": {}}
    reads("verl-2025-10", nested, expected, *notes, "not read, no part of the correction: data, gamma")


@pytest.mark.parametrize(
    ("given", "expected", "notes"),
    [
        ({}, {"rollout_is": None}, ()),
        (
            {"use_tis": False, "use_rs": True, "rs_veto_threshold": 1e-4},
            {"rollout_is": None},
            ("use_rs=True dropped", "rs_veto_threshold=0.0001 dropped"),
        ),
        ({"use_tis": True}, {"rollout_is": "token", "rollout_is_threshold": 2.0}, ()),
        ({"--use-tis": True, "--tis-clip": 3.0}, {"rollout_is": "token", "rollout_is_threshold": 3.0}, ()),
        (
            {"use_tis": True, "tis_clip": 3.0, "tis_clip_low": 0.25},
            {"rollout_is": "token", "rollout_is_threshold": "0.25_3.0", "rollout_is_mode": "clamp"},
            (),
        ),
        (
            {"use-tis": True, "tis-level": "sequence", "tis-upper-bound": 3, "tis-lower-bound": 0.2},
            {"rollout_is": "sequence", "rollout_is_threshold": 3.0},
            ("tis_lower_bound=0.2 dropped: truncation has no lower bound",),
        ),
        # An upper bound below 1 has a reciprocal above it, which truncation never looks at.
        ({"use_tis": True, "tis_upper_bound": 0.9}, {"rollout_is": "token", "rollout_is_threshold": 0.9}, ()),
        (
            {"use_tis": True, "tis_mode": "clip", "tis_upper_bound": 4.0},
            {"rollout_is": "token", "rollout_is_threshold": 4.0, "rollout_is_mode": "clamp"},
            (),
        ),
        (
            {
                "use_tis": True,
                "tis_mode": "clip",
                "tis_upper_bound": 4.0,
                "tis_lower_bound": 0.8,
                "tis_level": "geometric",
            },
            {"rollout_is": "geometric", "rollout_is_threshold": "0.8_4.0", "rollout_is_mode": "clamp"},
            (),
        ),
        (
            {"use_tis": True, "tis_mode": "mask", "tis_level": "sequence", "rs_upper_bound": 3.0},
            {
                "rollout_is": "sequence",
                "rollout_is_threshold": UNTRUNCATED,
                "rollout_rs": "seq_sum_k1",
                "rollout_rs_threshold": "0.5_2.0",
            },
            ("tis_mode='mask' leaves the weights", "rs_upper_bound=3.0 dropped: use_rs is off"),
        ),
        (
            {"use_tis": True, "use_rs": True, "rs_veto_threshold": 1e-4, "tis_lower_bound": 0.25},
            {
                "rollout_is": "token",
                "rollout_is_threshold": 2.0,
                "rollout_rs": "token_k1",
                "rollout_rs_threshold": "0.25_2.0",
                "rollout_token_veto_threshold": 1e-4,
            },
            (),
        ),
        (
            {"use_tis": True, "use_rs": True, "rs_level": "geometric", "tis_lower_bound": 0.25, "rs_lower_bound": 0.5},
            {
                "rollout_is": "token",
                "rollout_is_threshold": 2.0,
                "rollout_rs": "seq_mean_k1",
                "rollout_rs_threshold": "0.5_2.0",
            },
            ("tis_lower_bound=0.25 dropped",),
        ),
        (
            {"use_tis": True, "use_rs": True, "rs_upper_bound": 3.0, "rs_lower_bound": 0},
            {
                "rollout_is": "token",
                "rollout_is_threshold": 2.0,
                "rollout_rs": "token_k1",
                "rollout_rs_threshold": "1e-300_3.0",
            },
            ("rs_lower_bound=0 is no bound: written as 1e-300",),
        ),
        (
            {"use_tis": True, "tis_mode": "mask", "use_rs": True, "rs_lower_bound": 0.7, "rs_upper_bound": 9.0},
            {
                "rollout_is": "token",
                "rollout_is_threshold": UNTRUNCATED,
                "rollout_rs": "token_k1",
                "rollout_rs_threshold": "0.7_2.0",
            },
            ("tis_mode='mask'",),
        ),
        (
            {"use_tis": True, "tis_mode": "mask", "use_rs": True, "rs_level": "sequence", "rs_upper_bound": 9.0},
            {
                "rollout_is": "token",
                "rollout_is_threshold": UNTRUNCATED,
                "rollout_rs": "token_k1,seq_sum_k1",
                "rollout_rs_threshold": "0.5_2.0,0.5_9.0",
            },
            ("tis_mode='mask'",),
        ),
        (
            {"use_tis": True, "rs_veto_threshold": 1e-4, "tis_batch_normalize": True},
            {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": True},
            ("rs_veto_threshold=0.0001 dropped: use_rs is off", "slime's mean is over the micro-batch"),
        ),
        # Off-policy sequence masking.
        (
            {"--use-opsm": True, "--use-rollout-logprobs": True},
            {"rollout_is": None, "bypass_mode": True, "rollout_rs": "opsm", "rollout_rs_threshold": 1e-4},
            (),
        ),
        (
            {"use_opsm": True, "opsm_delta": 1e-3, "use_tis": True, "use_rs": True},
            {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": "token_k1,opsm"}
            | {"rollout_rs_threshold": "0.5_2.0,0.001"},
            ("use_opsm: slime compares π_θ with π_old",),
        ),
        ({"opsm_delta": 1e-3}, {"rollout_is": None}, ("opsm_delta=0.001 dropped: use_opsm is off",)),
        ({"use_rollout_logprobs": True}, {"rollout_is": None, "bypass_mode": True}, ()),
        # The example's names of October 2025: what is out of bounds has a weight of 0.
        (
            {
                "use_mis": True,
                "mis_level": "token",
                "mis_mode": "mask",
                "mis_lower_bound": 0.5,
                "mis_upper_bound": 3.0,
                "mis_veto_threshold": 1.0e-4,
            },
            {"rollout_is": "token", "rollout_is_threshold": "0.5_3.0", "rollout_is_mode": "mask"}
            | {"rollout_token_veto_threshold": 1e-4},
            (),
        ),
        (
            {"use_mis": True, "mis_mode": "mask", "mis_level": "sequence"},
            {"rollout_is": "sequence", "rollout_is_threshold": 2.0, "rollout_is_mode": "mask"},
            (),
        ),
        (
            {"use_mis": False, "use_tis": False, "mis_mode": "mask"},
            {"rollout_is": None},
            ("mis_mode='mask' dropped: slime does nothing",),
        ),
        # Those of November 2025: it is rejected.
        (
            {"use_tis": True, "mis_mode": "mask", "mis_level": "geometric", "mis_lower_bound": 0.9}
            | {"mis_upper_bound": 1.1, "mis_veto_threshold": 1e-4},
            {"rollout_is": "geometric", "rollout_is_threshold": UNTRUNCATED, "rollout_rs": "seq_mean_k1"}
            | {"rollout_rs_threshold": "0.9_1.1", "rollout_token_veto_threshold": 1e-4},
            ("mis_mode='mask' leaves the weights as they are",),
        ),
        (
            {"use_tis": True, "mis_mode": "clip", "mis_lower_bound": 0.4},
            {"rollout_is": "token", "rollout_is_threshold": "0.4_2.0", "rollout_is_mode": "clamp"},
            (),
        ),
        (
            {"use_tis": True, "mis_lower_bound": 0.5, "mis_upper_bound": 3.0},
            {"rollout_is": "token", "rollout_is_threshold": 3.0},
            ("mis_lower_bound=0.5 dropped: truncation has no lower bound",),
        ),
    ],
)
def test_slime(given, expected, notes):
    reads("slime", given, {**SLIME, **expected}, *notes)


@pytest.mark.parametrize(
    ("given", "expected", "notes"),
    [
        ({}, {"rollout_is": None}, ()),
        (
            {"use_importance_sampling_correction": False, RATIO_MIN: 0.5},
            {"rollout_is": None},
            (f"{RATIO_MIN}=0.5 dropped",),
        ),
        (
            {"use_importance_sampling_correction": True},
            {"rollout_is": "token", "rollout_is_threshold": UNTRUNCATED},
            (),
        ),
        (
            {"use_importance_sampling_correction": True, "sequence_level_importance_ratios": True, RATIO_MIN: 0.5},
            {"rollout_is": "sequence", "rollout_is_threshold": UNTRUNCATED},
            (f"{RATIO_MIN}=0.5 dropped",),
        ),
        ({**TIS, RATIO: 2.0}, {"rollout_is": "token", "rollout_is_threshold": 2.0}, ()),
        ({**TIS, RATIO: 2.0, RATIO_MIN: 0.0}, {"rollout_is": "token", "rollout_is_threshold": 2.0}, ()),
        (
            {**TIS, RATIO: 2, RATIO_MIN: 0.3},
            {"rollout_is": "token", "rollout_is_threshold": "0.3_2.0", "rollout_is_mode": "clamp"},
            (),
        ),
        (
            {"use_importance_sampling_correction": True, RATIO: 3.0},
            {"rollout_is": "token", "rollout_is_threshold": 3.0},
            ("without a type: 'tis'",),
        ),
        ({**ICEPOP, RATIO: 5.0, RATIO_MIN: 0.5}, {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}, ()),
        (
            {**SEQ_MASK, RATIO: 1.002, RATIO_MIN: 0.999},
            {
                "rollout_is": "token",
                "rollout_is_threshold": UNTRUNCATED,
                "rollout_rs": "seq_mean_k1",
                "rollout_rs_threshold": "0.999_1.002",
                "rejection_denominator": "original",
            },
            (),
        ),
    ],
)
def test_nemo_rl(given, expected, notes):
    reads("nemo-rl", given, expected, *notes)
    nested = {"loss_fn": {**given, "ratio_clip_min": 0.2, "use_cispo": False}, "grpo": {}}
    reads("nemo-rl", nested, expected, *notes, "not read, no part of the correction: grpo, ratio_clip_min, use_cispo")


ERROR = {"seq_logprob_error_threshold": 2}


@pytest.mark.parametrize("section", ["grpo", "ppo"])
def test_nemo_rls_rejection_of_sequences(section):
    note = "seq_logprob_error_threshold=2.0 bounds the mean of exp|log ρ|, seq_mean_error what is above 1 of it"
    rejects = {"rollout_rs": "seq_mean_error", "rollout_rs_threshold": 1.0}
    reads("nemo-rl", ERROR, {"rollout_is": None, **rejects}, note)
    own = {"rollout_is": "token", "rollout_is_threshold": 3.0, **rejects}
    nested = {"loss_fn": {**TIS, RATIO: 3.0}, section: {**ERROR, "num_prompts_per_step": 8}, "data": {}}
    unread = f"not read, no part of the correction: {section}.num_prompts_per_step, data"
    reads("nemo-rl", nested, own, note, unread)
    reads("nemo-rl", {section: ERROR}, {"rollout_is": None, **rejects}, note)
    off = {"loss_fn": {}, section: {"seq_logprob_error_threshold": None}}
    reads("nemo-rl", off, {"rollout_is": None})


def test_that_rejection_is_nemo_rls():
    """Its own formula: the mean over a sequence's tokens of exp|log π_old - log π_rollout|, at most the threshold."""
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(64, 12, generator=generator) - 0.5
    old = (rollout + 0.7 * torch.randn(64, 12, generator=generator)).clamp(max=0)
    mask = torch.rand(64, 12, generator=generator) > 0.3
    config = RolloutCorrectionConfig.from_dict({"seq_logprob_error_threshold": 1.7}, "nemo-rl")
    error = ((old - rollout).abs().double().exp() * mask).sum(1) / mask.sum(1).clamp(min=1)
    kept = mask & (error <= 1.7).unsqueeze(1)
    assert 0.2 < kept.sum() / mask.sum() < 0.8
    result = correct_rollouts(old, rollout, mask, config)
    assert torch.equal(result.mask, kept)
    assert result.denominators[0, 2] == kept.sum()


@pytest.mark.parametrize(
    ("dialect", "given", "message"),
    [
        ("nemo-rl", {"grpo": {"seq_logprob_error_threshold": 1}}, "seq_logprob_error_threshold=1.0 must be above 1"),
        ("nemo-rl", {"seq_logprob_error_threshold": "x"}, "seq_logprob_error_threshold='x' must be a number"),
        (
            "nemo-rl",
            {"loss_fn": {**SEQ_MASK, RATIO: 1.1, RATIO_MIN: 0.9}, "grpo": ERROR},
            "takes sequences out of the denominators and 'seq-mask-tis' leaves them in: keep one",
        ),
        (
            "verl-2026",
            {},
            "dialect='verl-2026' is unknown: use one of verl, verl-2025-11, verl-2025-10, slime, nemo-rl",
        ),
        ("megatron-lm", {}, "dialect='megatron-lm' is unknown"),
        *(
            (
                dialect,
                {"rolout_is": "token"},
                "unknown setting 'rolout_is': known are .*(rollout_is|use_tis|use_importance)",
            )
            for dialect in DIALECTS
        ),
        ("verl", {"use_tis": True}, "'use_tis', a name of slime: read these settings with dialect='slime'"),
        ("slime", {"loss_fn": {}}, "'loss_fn', a name of nemo-rl: read these settings with dialect='nemo-rl'"),
        ("verl", {"rollout_is_level": "token"}, "a name of verl-2025-10: read these settings with"),
        ("nemo-rl", {"bad_log_probs": "error"}, "a name of megatron_rc: read these settings with"),
        ("megatron_rc", {"use_tis": True}, "'use_tis' .*, a name of slime: read these settings with dialect='slime'"),
        ("megatron_rc", {"algorithm": {}}, "a name of verl and verl-2025-11 and verl-2025-10: read"),
        ("slime", {3: True}, "unknown setting '3': known are use_tis"),
        ("verl", {"use_policy_gradient": True}, "unknown setting 'use_policy_gradient'"),
        ("verl", {"rollout_token_veto_threshold": 1e-4}, "unknown setting 'rollout_token_veto_threshold'"),
        ("verl", {"rollout_correction": 3}, "rollout_correction=3 must hold settings"),
        ("verl", {"algorithm": {"rollout_correction": {"rollout_ris": 1}}}, "unknown setting 'rollout_ris'"),
        ("verl", {"rollout_is": "geometric"}, "rollout_is='geometric' is unknown: use one of None, token, sequence"),
        ("verl", {"rollout_is": True}, "rollout_is=True is unknown"),
        ("verl", {"rollout_is_threshold": True}, "rollout_is_threshold=True must be"),
        ("verl", {"rollout_is_threshold": "5_0.5"}, "must lie below the upper one"),
        ("verl", {"rollout_is_threshold": -1}, "must be a finite positive number"),
        ("verl", {"rollout_is_batch_normalize": "yes"}, "rollout_is_batch_normalize='yes' must be true or false"),
        ("verl", {"rollout_rs": "token_k1"}, "rollout_rs_threshold=None: rollout_rs='token_k1' needs a bound"),
        ("verl", {"rollout_rs": "geometric", "rollout_rs_threshold": 2}, "rollout_rs='geometric' is unknown to verl"),
        ("verl", {"rollout_rs": "opsm", "rollout_rs_threshold": 2}, "rollout_rs='opsm' is unknown to verl"),
        ("verl", {"rollout_rs": "group_mean_k1", "rollout_rs_threshold": 2}, "'group_mean_k1' is unknown to verl"),
        ("verl", {"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2}, "rollout_rs='seq_max_k1' is unknown"),
        ("verl", {"rollout_rs": "token_k1", "rollout_rs_threshold": "1,2"}, "has 2 bounds for 1 criteria"),
        ("verl", {"rollout_rs": "token_k1", "rollout_rs_threshold": "0_2"}, "must be a finite positive number"),
        ("verl", {"rollout_rs": "token_k1", "rollout_rs_threshold": "x"}, "'x' is not a number"),
        ("verl", {"rollout_rs": "token_k3", "rollout_rs_threshold": "0.1_0.2"}, "token_k3 takes one upper bound"),
        ("verl", {"loss_type": "gspo"}, "loss_type='gspo' is unknown"),
        ("verl", {"bypass_mode": 1}, "bypass_mode=1 must be true or false"),
        (
            "verl-2025-11",
            {"rollout_rs": "token_k1"},
            "rollout_rs='token_k1' is unknown: use one of None, token, sequence",
        ),
        (
            "verl-2025-11",
            {"rollout_rs": "token", "rollout_rs_threshold": 0},
            "rollout_rs_threshold=0.0 must be a finite",
        ),
        (
            "verl-2025-11",
            {"rollout_rs": "token", "rollout_rs_threshold": 2, "rollout_rs_threshold_lower": 3},
            "rollout_rs_threshold_lower=3 must lie below rollout_rs_threshold=2",
        ),
        (
            "verl-2025-11",
            {"rollout_is": None, "rollout_rs": "sequence", "rollout_rs_threshold": None},
            "rollout_rs_threshold=None: rollout_rs='sequence' needs a number: set it, or set rollout_rs to null",
        ),
        (
            "verl-2025-11",
            {"rollout_is": "token", "rollout_is_threshold": None},
            "rollout_is_threshold=None: rollout_is='token' needs a number",
        ),
        ("verl-2025-11", {"rollout_is_threshold": "0.5_5.0"}, "rollout_is_threshold='0.5_5.0' must be a number"),
        ("verl-2025-11", {"rollout_token_veto_threshold": -1}, "rollout_token_veto_threshold=-1.0 must be a finite"),
        ("verl-2025-11", {"rollout_token_veto_threshold": "nan"}, "rollout_token_veto_threshold='nan' must be finite"),
        (
            "verl-2025-11",
            {"bypass_mode": True, "bypass_old_logprob_for_rollout": False},
            "bypass_mode=True and bypass_old_logprob_for_rollout=False contradict",
        ),
        (
            "verl-2025-11",
            {"bypass_mode": True, "loss_type": "reinforce", "use_policy_gradient": False},
            "loss_type='reinforce' and use_policy_gradient=False contradict",
        ),
        ("verl-2025-10", {"rollout_is": "token"}, "rollout_is='token' must be true or false"),
        (
            "verl-2025-10",
            {"rollout_is_mode": "clamp"},
            "rollout_is_mode='clamp' is unknown: use one of truncate, mask, clip",
        ),
        ("verl-2025-10", {"rollout_is_level": None}, "rollout_is_level=None is unknown"),
        (
            "verl-2025-10",
            {"rollout_is": True, "rollout_is_threshold": "0.5_2"},
            "rollout_is_threshold='0.5_2' must be a num",
        ),
        (
            "verl-2025-10",
            {"rollout_is": True, "rollout_is_threshold": 2, "rollout_is_mode": "mask", "rollout_is_threshold_lower": 2},
            "rollout_is_threshold_lower=2 must lie below rollout_is_threshold=2",
        ),
        (
            "verl-2025-10",
            {"rollout_is": True, "rollout_is_threshold": 2, "rollout_is_veto_threshold": 0},
            "rollout_is_veto_threshold=0.0 must be a finite positive number",
        ),
        ("slime", {"use_tis": "true"}, "use_tis='true' must be true or false"),
        (
            "slime",
            {"use_tis": True, "tis_mode": "icepop"},
            "tis_mode='icepop' is unknown: use one of truncate, clip, mask",
        ),
        ("slime", {"use_tis": True, "tis_level": None}, "tis_level=None is unknown"),
        ("slime", {"use_tis": True, "tis_upper_bound": None}, "tis_upper_bound=None must be a finite positive number"),
        (
            "slime",
            {"use_tis": True, "tis_mode": "clip", "tis_lower_bound": 3.0},
            "tis_lower_bound=3 must lie below tis_upper_bound=2",
        ),
        ("slime", {"use_tis": True, "use_rs": True, "rs_level": None}, "rs_level=None is unknown"),
        ("slime", {"use_tis": True, "use_rs": True, "rs_veto_threshold": 0}, "rs_veto_threshold=0.0 must be"),
        (
            "slime",
            {"use_tis": True, "use_rs": True, "rs_upper_bound": 0.1},
            "rs_lower_bound=0.5 must lie below rs_upper",
        ),
        (
            "slime",
            {"use_tis": True, "tis_mode": "mask", "use_rs": True, "rs_lower_bound": 3.0, "rs_upper_bound": 4.0},
            "together accept no ρ",
        ),
        (
            "slime",
            {"use_tis": True, "tis_level": "geometric", "tis_batch_normalize": True},
            "tis_batch_normalize=True fails in slime with tis_level='geometric'",
        ),
        ("slime", {"use_tis": True, "tis_clip": 2.0, "tis_mode": "mask"}, "tis_clip belongs to slime's built-in"),
        (
            "slime",
            {"use_tis": True, "mis_mode": "mask", "rs_level": "token"},
            "rs_level belongs to its example's and mis_mode to its example's of October and November 2025: keep one",
        ),
        ("slime", {"use_mis": True, "mis_mode": "drop"}, "mis_mode='drop' is unknown: use one of truncate, clip, mask"),
        ("slime", {"use_mis": True, "mis_upper_bound": 0}, "mis_upper_bound=0.0 must be a finite positive number"),
        ("slime", {"use_opsm": True, "opsm_delta": -1}, "opsm_delta=-1.0 must be a number, 0 or more"),
        ("slime", {"use_opsm": True, "opsm_delta": None}, "opsm_delta=None must be a number"),
        ("slime", {"use_opsm": 1}, "use_opsm=1 must be true or false"),
        (
            "slime",
            {"use_tis": True, "use_rollout_logprobs": True},
            "use_tis=True and use_rollout_logprobs=True contradict",
        ),
        ("nemo-rl", {"ratio_clip_min": 0.2}, "unknown setting 'ratio_clip_min'"),
        ("nemo-rl", {"loss_fn": [1]}, r"loss_fn=\[1\] must hold settings"),
        ("nemo-rl", {**TIS, "truncated_importance_sampling_type": "TIS"}, "'TIS' is unknown"),
        ("nemo-rl", TIS, f"{RATIO}=None must be a finite positive number"),
        ("nemo-rl", {**TIS, RATIO: -2}, f"{RATIO}=-2.0 must be a finite positive number"),
        ("nemo-rl", {**TIS, RATIO: 2, RATIO_MIN: 3}, f"{RATIO_MIN}=3 must lie below {RATIO}=2"),
        ("nemo-rl", {**ICEPOP, RATIO: 5.0}, f"{RATIO_MIN} is missing: 'icepop' needs both bounds"),
        ("nemo-rl", {**SEQ_MASK, RATIO: 1.1}, f"{RATIO_MIN} is missing: 'seq-mask-tis' needs both bounds"),
        (
            "nemo-rl",
            {**SEQ_MASK, RATIO: 1.1, RATIO_MIN: 0.9, "sequence_level_importance_ratios": True},
            "'seq-mask-tis' has token weights",
        ),
        (
            "nemo-rl",
            {"truncated_importance_sampling_type": "tis", RATIO: 2},
            "needs use_importance_sampling_correction=True",
        ),
        ("nemo-rl", {RATIO: 2}, "needs use_importance_sampling_correction=True"),
    ],
)
def test_what_cannot_work_is_refused(dialect, given, message):
    with pytest.raises(ValueError, match=message):
        RolloutCorrectionConfig.from_dict(given, dialect)


def test_notes_are_kept_logged_and_no_part_of_the_config(caplog):
    caplog.set_level("INFO", "megatron_rc")
    given = {"rollout_is": "token", "rollout_rs_threshold": 3.0}
    config = RolloutCorrectionConfig.from_dict(given, "verl")
    assert config == RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=2.0)
    assert config.notes == (
        "read as verl: rollout_is='token', rollout_is_threshold=2.0",
        "rollout_rs_threshold=3.0 dropped: there is no criterion in rollout_rs",
    )
    assert [record.message for record in caplog.records] == list(config.notes)
    assert given == {"rollout_is": "token", "rollout_rs_threshold": 3.0}


def test_numbers_survive_exactly():
    low, high = 0.1 + 0.2, 1 + 2**-50
    config = RolloutCorrectionConfig.from_dict(
        {"rollout_is": None, "rollout_rs": "token", "rollout_rs_threshold": high, "rollout_rs_threshold_lower": low},
        "verl-2025-11",
    )
    (criterion,) = config.criteria
    assert (criterion.lower, criterion.upper) == (math.log(low), math.log(high))
    config = RolloutCorrectionConfig.from_dict({**ICEPOP, RATIO: high, RATIO_MIN: low}, "nemo-rl")
    assert config.is_bounds == (low, high)


@pytest.mark.parametrize("bounds", ["0.5_2", '"0.5_2"', "0.5_2.0"])
def test_a_pair_of_bounds_in_a_nested_file(tmp_path, bounds):
    (tmp_path / "verl.yaml").write_text(
        "algorithm:\n  gamma: 1.0\n  rollout_correction:\n    rollout_is: token\n"
        f"    rollout_is_threshold: {bounds}\n    rollout_rs: token_k3\n    rollout_rs_threshold: 1e-2\n"
    )
    config = RolloutCorrectionConfig.from_yaml(tmp_path / "verl.yaml", "verl")
    assert (config.is_mode, config.is_bounds) == ("mask", (0.5, 2.0))
    assert config.criteria[0].upper == 0.01


def golden(generation):
    return [pytest.param(case, id=case["id"]) for case in cases("rollout_correction", generation=generation)]


def expected_criteria(*pairs):
    """(name, lower on ρ, upper on ρ) as (name, log lower, log upper)."""
    return [
        (name, pytest.approx(math.log(low), abs=1e-12), pytest.approx(math.log(high), abs=1e-12))
        for name, low, high in pairs
    ]


def criteria(config):
    return [(criterion.name, criterion.lower, criterion.upper) for criterion in config.criteria]


@pytest.mark.parametrize("case", golden("gen1"))
def test_recorded_settings_of_october_2025(case):
    given = {"rollout_is": True, **case["config"]}
    config = RolloutCorrectionConfig.from_dict(given, "verl-2025-10")
    upper, lower = given["rollout_is_threshold"], given["rollout_is_threshold_lower"]
    masks = given["rollout_is_mode"] == "mask"
    assert (config.rollout_is, config.is_mode) == (given["rollout_is_level"], given["rollout_is_mode"])
    assert config.is_bounds == (lower if masks and lower else 1 / upper, upper)
    assert config.rollout_token_veto_threshold == given["rollout_is_veto_threshold"]
    assert (config.criteria, config.rejection_denominator) == ((), "original")
    measured = RolloutCorrectionConfig.from_dict(case["config"], "verl-2025-10")
    assert (measured.rollout_is, measured.applies_weights, measured.rejects) == (config.rollout_is, False, False)
    assert (measured.is_mode, measured.is_bounds) == (config.is_mode, config.is_bounds)


@pytest.mark.parametrize("case", golden("gen2"))
def test_recorded_settings_of_november_2025(case):
    given = case["config"]
    config = RolloutCorrectionConfig.from_dict(given, "verl-2025-11")
    assert config.rollout_is == given["rollout_is"]
    assert config.rollout_is_batch_normalize == given["rollout_is_batch_normalize"]
    if config.rollout_is:
        assert (config.is_mode, config.is_bounds[1]) == ("truncate", given["rollout_is_threshold"])
    upper, lower = given["rollout_rs_threshold"], given["rollout_rs_threshold_lower"]
    found = [(LEVELS[given["rollout_rs"]], lower or 1 / upper, upper)] if given["rollout_rs"] else []
    assert criteria(config) == expected_criteria(*found)
    assert config.rollout_token_veto_threshold == given["rollout_token_veto_threshold"]
    assert config.rejection_denominator == "accepted"


@pytest.mark.parametrize("case", golden("gen3"))
def test_recorded_settings_of_2026(case):
    given = {"rollout_is": None, **case["config"]}
    config = RolloutCorrectionConfig.from_dict(given, "verl")
    assert config.rollout_is == given["rollout_is"]
    assert config.rollout_is_batch_normalize == given.get("rollout_is_batch_normalize", False)
    if config.rollout_is:
        bounds = [float(bound) for bound in str(given["rollout_is_threshold"]).split("_")]
        assert config.is_mode == ("mask" if len(bounds) == 2 else "truncate")
        assert config.is_bounds == (bounds[0] if len(bounds) == 2 else 1 / bounds[0], bounds[-1])
    names = (given.get("rollout_rs") or "").split(",") if given.get("rollout_rs") else []
    thresholds = str(given.get("rollout_rs_threshold")).split(",") * len(names)
    assert [criterion.name for criterion in config.criteria] == names
    for criterion, threshold in zip(config.criteria, thresholds, strict=False):
        if criterion.bounds.on_ratio:
            low, high = case["rho_bounds"][criterion.name]
            assert math.exp(criterion.lower) == pytest.approx(low, rel=1e-12)
            assert math.exp(criterion.upper) == pytest.approx(high, rel=1e-12)
        else:
            assert (criterion.lower, criterion.upper) == (-math.inf, float(threshold))


def test_the_recorded_settings_pin_the_orientation():
    """Some recorded bounds differ from their reciprocals, so that reading them as bounds on ρ would be found out."""
    wrong = 0
    for case in cases("rollout_correction", generation="gen3"):
        for name, bounds in (case.get("rho_bounds") or {}).items():
            as_written = RolloutCorrectionConfig(
                rollout_is=None, **{k: v for k, v in case["config"].items() if "_rs" in k}
            )
            criterion = next(c for c in as_written.criteria if c.name == name)
            wrong += math.exp(criterion.lower) != pytest.approx(bounds[0], rel=1e-3)
    assert wrong >= 10


@pytest.mark.parametrize("case", golden("slime"))
def test_recorded_settings_of_slime(case):
    given = {name: value for name, value in case["config"].items() if value is not None}
    config = RolloutCorrectionConfig.from_dict(given, "slime")
    upper, lower = given["tis_upper_bound"], given.get("tis_lower_bound", 1 / given["tis_upper_bound"])
    assert (config.rollout_is, config.rejection_denominator) == (given["tis_level"], "original")
    assert config.rollout_is_batch_normalize == given["tis_batch_normalize"]
    bound = {"truncate": (1 / upper, upper), "clip": (lower, upper), "mask": (1 / UNTRUNCATED, UNTRUNCATED)}
    assert config.is_bounds == bound[given["tis_mode"]]
    assert config.is_mode == ("clamp" if given["tis_mode"] == "clip" else "truncate")
    found = [(LEVELS[given["tis_level"]], lower, upper)] if given["tis_mode"] == "mask" else []
    if given["use_rs"]:
        found.append((LEVELS[given["rs_level"]], given["rs_lower_bound"], given["rs_upper_bound"]))
    assert criteria(config) == expected_criteria(*found)
    assert config.rollout_token_veto_threshold == (given.get("rs_veto_threshold") if given["use_rs"] else None)


def test_recorded_settings_of_nemo_rl():
    read = [
        RolloutCorrectionConfig.from_dict({"loss_fn": case["config"]}, "nemo-rl")
        for case in cases("policy_loss")
        if case["source"]["project"] == "NeMo-RL"
    ]
    kinds = {(config.rollout_is, config.is_mode, config.is_bounds[1], config.rollout_rs) for config in read}
    assert kinds >= {
        (None, "truncate", 2.0, None),
        ("token", "truncate", 2.0, None),
        ("token", "mask", 5.0, None),
        ("token", "truncate", UNTRUNCATED, "seq_mean_k1"),
    }


@pytest.mark.parametrize("generation", ["gen1", "gen2", "gen3", "slime"])
def test_translations_survive_a_round_trip(generation):
    dialect = {"gen1": "verl-2025-10", "gen2": "verl-2025-11", "gen3": "verl", "slime": "slime"}[generation]
    count = 0
    for case in cases("rollout_correction", generation=generation):
        given = {name: value for name, value in case["config"].items() if value is not None}
        config = RolloutCorrectionConfig.from_dict(given, dialect)
        assert RolloutCorrectionConfig.from_dict(config.to_dict()) == config
        assert config.notes[0].startswith(f"read as {dialect}: ")
        count += 1
    assert count >= 10
