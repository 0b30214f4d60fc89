"""Flags of rewards that work, and their defaults."""

import pytest

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.records.rollout import save_rollouts
from tests.support.recorded_training import flags, recorded_batch, run_config

USER = "python:tests.support.user_rewards"
DOUBLES = (f"--task={USER}:Doubles", "--max-response-length=2")


def check(tmp_path, *more):
    return run_config(flags(tmp_path / "runs", *more))


def test_rewards_have_defaults(tmp_path):
    rewards = check(tmp_path).rewards
    assert (rewards.reward, rewards.reward_workers, rewards.reward_timeout) == (None, None, 10.0)
    assert (rewards.reward_errors, rewards.reward_on_error, rewards.overlong) == ("continue", 0.0, "keep")


WORK = f"""
--reward={USER}:parts --reward-workers=2 --reward-timeout=0.5 --reward-on-error=-1
--reward=exact --reward-errors=stop
--overlong=penalise --overlong-buffer=4 --overlong-penalty-factor=0.5
--overlong=penalise --overlong-buffer=10
--overlong=mask
{" ".join(DOUBLES)} --reward-timeout=3
{" ".join(DOUBLES)} --reward=exact
--overlong=mask --train-iters=2 --load-rollouts=RECORDS
"""


@pytest.mark.parametrize("words", WORK.strip().splitlines())
def test_what_works(tmp_path, words):
    if "RECORDS" in words:  # recorded responses without an end may be left out
        (tmp_path / "records").mkdir()
        save_rollouts(recorded_batch(0), tmp_path / "records" / "step-0000000-replica-0000.safetensors")
    found = check(tmp_path, *words.replace("RECORDS", f"{tmp_path}/records").split()).rewards
    assert (found.overlong == "keep") == ("--overlong=" not in words)


def test_a_class_brings_its_tokens_and_its_longest_response(tmp_path):
    config = run_config([word for word in flags(tmp_path, DOUBLES[0]) if "max-response-length" not in word])
    assert (config.model.vocab_size, config.rollouts.max_response_length) == (13, 2)


def test_math_verify_names_its_extra_where_it_is_missing(tmp_path, monkeypatch):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "math_verify" else found(name))
    with pytest.raises(ConfigurationError, match=r"--reward math-verify .*math_verify.*\[math\]"):
        check(tmp_path, "--reward=math-verify")
