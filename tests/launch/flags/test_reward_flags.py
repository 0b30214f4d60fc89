"""Flags of rewards that work, and their defaults."""

import pytest

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.records.rollout import save_rollouts
from tests.support.recorded_training import flags, recorded_batch, run_config

USER = "python:tests.support.user_rewards"
PENALISE = ("--overlong=penalise", "--overlong-buffer=4")
DOUBLES = (f"--task={USER}:Doubles", "--max-response-length=2")


def check(tmp_path, *more):
    return run_config(flags(tmp_path / "runs", *more))


def test_rewards_have_defaults(tmp_path):
    rewards = check(tmp_path).rewards
    assert (rewards.reward, rewards.reward_workers, rewards.reward_timeout) == (None, None, 10.0)
    assert (rewards.reward_errors, rewards.reward_on_error, rewards.overlong) == ("continue", 0.0, "keep")


@pytest.mark.parametrize(
    "words",
    [
        (f"--reward={USER}:parts", "--reward-workers=2", "--reward-timeout=0.5", "--reward-on-error=-1"),
        ("--reward=exact", "--reward-errors=stop"),
        (*PENALISE, "--overlong-penalty-factor=0.5"),
        ("--overlong=penalise", "--overlong-buffer=10"),
        ("--overlong=mask",),
        (*DOUBLES, "--reward-timeout=3"),
        (*DOUBLES, "--reward=exact"),
    ],
)
def test_what_works(tmp_path, words):
    check(tmp_path, *words)


def test_a_class_brings_its_tokens_and_its_longest_response(tmp_path):
    config = run_config([word for word in flags(tmp_path, DOUBLES[0]) if "max-response-length" not in word])
    assert (config.model.vocab_size, config.rollouts.max_response_length) == (13, 2)


def test_math_verify_names_its_extra_where_it_is_missing(tmp_path, monkeypatch):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "math_verify" else found(name))
    with pytest.raises(ConfigurationError, match=r"--reward math-verify .*math_verify.*\[math\]"):
        check(tmp_path, "--reward=math-verify")


def test_recorded_responses_without_an_end_may_be_left_out(tmp_path):
    folder = tmp_path / "records"
    folder.mkdir()
    save_rollouts(recorded_batch(0), folder / "step-0000000-replica-0000.safetensors")
    assert check(tmp_path, f"--load-rollouts={folder}", "--train-iters=2", "--overlong=mask").rewards.overlong == "mask"
