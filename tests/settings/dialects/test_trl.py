"""TRL's settings: their translation, their meaning in TRL's own formula, and refused ones."""

import math

import pytest
import torch

from megatron_rc import correct_rollouts
from megatron_rc.settings.config import RolloutCorrectionConfig
from tests.support.tables import table
from tests.support.translated import reads

PREFIX = "vllm_importance_sampling_"
# TRL's names of the words in tables.
NAMES = {name: f"{PREFIX}{name}" for name in ("correction", "mode", "clip_max", "clip_min", "cap")}


def named(settings):
    """The settings with TRL's names."""
    return {NAMES.get(name, name): value for name, value in settings.items()}


READ = """
mode: token_truncate | rollout_is: token, rollout_is_threshold: 3.0
mode: token_truncate, clip_max: 2.0, clip_min: 0.5
    | rollout_is: token, rollout_is_threshold: 0.5_2.0, rollout_is_mode: clamp
mode: sequence_truncate, clip_max: null, clip_min: 0.5
    | rollout_is: sequence, rollout_is_threshold: '0.5_1e+300', rollout_is_mode: clamp
mode: token_mask, clip_min: 0.5, clip_max: 5 | rollout_is: token, rollout_is_threshold: 0.5_5.0, rollout_is_mode: mask
mode: sequence_mask | rollout_is: sequence, rollout_is_threshold: 1e-300_3.0, rollout_is_mode: mask
mode: token_mask, clip_max: null | rollout_is: token, rollout_is_threshold: UNTRUNCATED
- | rollout_is: sequence, rollout_is_threshold: 1e-300_3.0, rollout_is_mode: mask | mode is absent: 'sequence_mask'
mode: token_truncate, cap: 2.0 | rollout_is: token, rollout_is_threshold: 2.0
mode: token_truncate, cap: 2.0, clip_max: 5.0 | rollout_is: token, rollout_is_threshold: 2.0 | clip_max=5.0 dropped
correction: false, mode: token_mask | rollout_is: null | mode='token_mask' dropped
mode: token_truncate, off_policy_mask_threshold: 0.5
    | rollout_is: token, rollout_is_threshold: 3.0, rollout_rs: opsm, rollout_rs_threshold: 0.5, rejection_denominator:
    original
    | off_policy_mask_threshold: TRL compares
"""


@table("{given} {expected} *notes", READ)
def test_trl(given, expected, notes):
    reads(
        "trl",
        {"use_vllm": True, "beta": 0.0, **named(given)},
        expected,
        *notes,
        "not read, no part of the correction: beta",
    )


def test_a_part_of_a_file_is_read_as_with_vllm():
    settings = named({"mode": "token_truncate"})
    expected = {"rollout_is": "token", "rollout_is_threshold": 3.0}
    reads("trl", settings, expected, "use_vllm is absent")
    reads("trl", {"use_vllm": False, **settings}, {"rollout_is": None}, "mode='token_truncate' dropped")


REFUSED = """
mode: token_clip | vllm_importance_sampling_mode='token_clip' is unknown: use one of token_truncate
mode: token_truncate, clip_max: null | vllm_importance_sampling_mode='token_truncate' needs a bound
mode: token_mask, clip_min: 3.0 | vllm_importance_sampling_clip_min=3 must be less than .*clip_max=3
mode: token_mask, clip_max: -1 | vllm_importance_sampling_clip_max=-1.0 must be a finite positive number
vllm_importance_sampling_mod: token_mask | unknown setting 'vllm_importance_sampling_mod' of trl
off_policy_mask_threshold: -1 | off_policy_mask_threshold=-1.0
"""


@table("{given} message", REFUSED)
def test_what_cannot_work_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        RolloutCorrectionConfig.from_dict(named(given), "trl")


MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
BOUNDS = ((None, 1.3), (0.8, 1.3), (0.8, None))
CASES = [(mode, *bounds) for mode in MODES for bounds in BOUNDS]
# Truncation without a bound is an error in TRL, too.
CASES += [("token_mask", None, None), ("sequence_mask", None, None)]


@pytest.mark.parametrize(("mode", "lower", "upper"), CASES)
def test_the_weights_are_trls(mode, lower, upper):
    """The lines of TRL's ``_generate_and_score_completions`` that compute the ratio, in float64."""
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(64, 12, generator=generator, dtype=torch.float64) - 0.5
    old = rollout + 0.1 * torch.randn(64, 12, generator=generator, dtype=torch.float64)
    mask = torch.rand(64, 12, generator=generator) > 0.3

    difference = (old - rollout) * mask
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    if mode.endswith("truncate"):
        expected = ratio.clamp(min=lower, max=upper)
    else:
        low = -math.inf if lower is None else lower
        high = math.inf if upper is None else upper
        expected = ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
    expected = expected.expand_as(old) * mask
    assert upper is None or (ratio > upper).any()

    settings = named({"mode": mode, "clip_min": lower, "clip_max": upper})
    result = correct_rollouts(old, rollout, mask, RolloutCorrectionConfig.from_dict(settings, "trl"))
    torch.testing.assert_close(result.weights, expected, rtol=1e-12, atol=0)
    assert torch.equal(result.mask, mask)
