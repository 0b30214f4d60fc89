"""NeMo-RL's settings: their translation, and those that are dropped with a note."""

import pytest
import torch

from megatron_rc import correct_rollouts
from megatron_rc.settings.config import RolloutCorrectionConfig
from tests.support.tables import table
from tests.support.translated import reads

# NeMo-RL's names of the words in tables.
NAMES = {
    "use": "use_importance_sampling_correction",
    "type": "truncated_importance_sampling_type",
    "max": "truncated_importance_sampling_ratio",
    "min": "truncated_importance_sampling_ratio_min",
    "by_sequence": "sequence_level_importance_ratios",
    "error": "seq_logprob_error_threshold",
}


def named(settings):
    """The settings with NeMo-RL's names."""
    return {
        NAMES.get(name, name): named(value) if isinstance(value, dict) else value for name, value in settings.items()
    }


READ = """
use: false | rollout_is: null
use: false, min: 0.5 | rollout_is: null | truncated_importance_sampling_ratio_min=0.5 dropped
use: true, by_sequence: true, min: 0.5 | rollout_is: sequence, rollout_is_threshold: UNTRUNCATED
    | truncated_importance_sampling_ratio_min=0.5 dropped | also selects GSPO
use: true, type: tis, max: 2.0, min: 0.0 | rollout_is: token, rollout_is_threshold: 2.0
use: true, max: 3.0 | rollout_is: token, rollout_is_threshold: 3.0 | without a type: 'tis'
use: true, type: seq-mask-tis, max: 1.002, min: 0.999
    | rollout_is: token, rollout_is_threshold: UNTRUNCATED, rollout_rs: seq_mean_k1, rollout_rs_threshold:
    0.999_1.002, rejection_denominator: original
"""


@table("{given} {expected} *notes", READ)
def test_nemo_rl(given, expected, notes):
    given = named(given)
    reads("nemo-rl", given, expected, *notes)
    nested = {"loss_fn": {**given, "ratio_clip_min": 0.2, "use_cispo": False}, "grpo": {}}
    reads("nemo-rl", nested, expected, *notes, "not read, no part of the correction: grpo, ratio_clip_min, use_cispo")


ERROR = {"seq_logprob_error_threshold": 2}


@pytest.mark.parametrize("section", ["grpo", "ppo"])
def test_nemo_rls_rejection_of_sequences(section):
    note = "seq_logprob_error_threshold=2.0 bounds the mean of exp|log ρ|; seq_mean_error is that mean minus 1"
    rejects = {"rollout_rs": "seq_mean_error", "rollout_rs_threshold": 1.0}
    reads("nemo-rl", ERROR, {"rollout_is": None, **rejects}, note)
    fields = {"rollout_is": "token", "rollout_is_threshold": 3.0, **rejects}
    weights = named({"use": True, "type": "tis", "max": 3.0})
    nested = {"loss_fn": weights, section: {**ERROR, "num_prompts_per_step": 8}, "data": {}}
    unread = f"not read, no part of the correction: {section}.num_prompts_per_step, data"
    reads("nemo-rl", nested, fields, note, unread)
    off = {"loss_fn": {}, section: {"seq_logprob_error_threshold": None}}
    reads("nemo-rl", off, {"rollout_is": None})


@pytest.mark.parametrize("kind", ["icepop", "tis"])
def test_equal_bounds_are_legal(kind):
    settings = named({"use": True, "type": kind, "max": 1.0, "min": 1.0})
    assert RolloutCorrectionConfig.from_dict(settings, "nemo-rl").is_bounds == (1.0, 1.0)


def test_gspo_and_its_kl_are_named():
    """Both change the loss, and are no part of the correction."""
    settings = {"loss_fn": {"sequence_level_importance_ratios": True, "token_level_loss": False}}
    config = RolloutCorrectionConfig.from_dict(settings, "nemo-rl")
    assert config.rollout_is is None
    assert any("--policy-loss gspo --loss-aggregation seq-mean-token-mean" in note for note in config.notes)
    settings = {"loss_fn": {"use_importance_sampling_correction": True, "reference_policy_kl_type": "k3"}}
    assert any("--kl-estimator k3+" in note for note in RolloutCorrectionConfig.from_dict(settings, "nemo-rl").notes)


def test_a_setting_that_a_newer_release_adds_is_a_warning():
    """NeMo-RL#2269 proposes this one."""
    settings = {"loss_fn": {"use_importance_sampling_correction": True, "is_correction_level": "token"}}
    with pytest.warns(UserWarning, match="'is_correction_level'"):
        assert RolloutCorrectionConfig.from_dict(settings, "nemo-rl").rollout_is == "token"


def test_that_rejection_is_nemo_rls():
    """Its formula: the mean over a sequence's tokens of exp|log π_old - log π_rollout|, at most the threshold."""
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(64, 12, generator=generator) - 0.5
    old = (rollout + 0.7 * torch.randn(64, 12, generator=generator)).clamp(max=0)
    mask = torch.rand(64, 12, generator=generator) > 0.3
    config = RolloutCorrectionConfig.from_dict({"seq_logprob_error_threshold": 1.7}, "nemo-rl")
    error = ((old - rollout).abs().double().exp() * mask).sum(1) / mask.sum(1).clamp(min=1)
    expected_mask = mask & (error <= 1.7).unsqueeze(1)
    assert 0.2 < expected_mask.sum() / mask.sum() < 0.8
    result = correct_rollouts(old, rollout, mask, config)
    assert torch.equal(result.mask, expected_mask)
    assert result.denominators[0, 2] == expected_mask.sum()
