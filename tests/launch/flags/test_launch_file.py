"""A correction that is nested in a launch file, as other programs have it: the same run, and the same errors."""

import re

import pytest

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.configure import configure
from tests.support.recorded_training import flags

FLAT = """rollout-is: token
rollout-is-threshold: 3
rollout-rs: none
rollout-token-veto-threshold: 1e-4
no-rollout-is-batch-normalize: true
"""
NESTED = """rollout_correction:
  rollout_is: token
  rollout_is_threshold: 3
  rollout_rs: null
  rollout-token-veto-threshold: 1e-4
  rollout_is_batch_normalize: false
"""


def correction(tmp_path, text, *more):
    (tmp_path / "a.yaml").write_text(text)
    words = [word for word in flags(tmp_path / "runs") if not word.startswith(("--rollout-is", "--rollout-rs"))]
    return configure([*words, f"--config={tmp_path}/a.yaml", *more], 1)[0].correction


def test_a_nested_correction_is_that_of_the_flat_keys(tmp_path):
    nested = correction(tmp_path, NESTED)
    assert nested == correction(tmp_path, FLAT)
    assert (nested.rollout_is, nested.rollout_is_threshold, nested.rollout_token_veto_threshold) == ("token", 3, 1e-4)
    assert correction(tmp_path, NESTED, "--rollout-is-threshold=5").rollout_is_threshold == 5


def test_a_nested_switch_is_one(tmp_path):
    on = "rollout_correction: {rollout_is: token, rollout_is_batch_normalize: true}\n"
    assert correction(tmp_path, on).rollout_is_batch_normalize
    assert not correction(tmp_path, on, "--no-rollout-is-batch-normalize").rollout_is_batch_normalize


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "rollout_is_treshold: 2",
            "below rollout_correction: unknown key 'rollout_is_treshold': did you mean rollout",
        ),
        ("lr: 1", "below rollout_correction: lr is no field of the correction: give it a line of its own"),
        ("rollout_is: token\n  rollout_is: token", "the key 'rollout_is' is given twice; keep one"),
        ("rollout_is: token\n  rollout-is: token", "below rollout_correction: rollout-is is given twice: keep one"),
        ("rollout_is: token\nrollout-is: token", "rollout-is is given twice, below rollout_correction too: keep one"),
        ("rollout_is: [token]", "below rollout_correction: rollout-is: ['token'] must be one number or one string"),
        ("bypass_mode: 1", "below rollout_correction: bypass-mode: '1' must be true or false"),
        ("rollout_is: words", "rollout_is='words'"),
        ("rollout_is: none\n  rollout_is_threshold: 2", "rollout_is_threshold"),
    ],
)
def test_what_is_wrong_below_it_is_named(tmp_path, text, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        correction(tmp_path, f"rollout_correction:\n  {text}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rollout_correction: token", "rollout_correction: 'token' must be lines of `field: value` below it"),
        ("rollout_correction:", "rollout_correction: '' must be lines of `field: value` below it"),
        (
            "algorithm: {adv_estimator: grpo}",
            "unknown key 'algorithm': nothing is nested but rollout_correction; every other flag has a line of its own",
        ),
    ],
)
def test_nothing_else_is_nested(tmp_path, text, message):
    with pytest.raises(ConfigurationError, match=re.escape(f"a.yaml: {message}")):
        correction(tmp_path, f"{text}\n")
