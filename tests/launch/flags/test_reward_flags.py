"""Flags of rewards: what they mean, and the one sentence for each that cannot work or would do nothing."""

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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--reward=exactly"], r"^--reward exactly is unknown: use exact, math-verify or python:pkg\.module:function$"),
        (["--reward=python:nowhere:f"], r"^--reward python:nowhere:f: there is no module nowhere: start the run in"),
        ([f"--reward={USER}:nothing"], r"^--reward \S+: tests\.support\.user_rewards has no nothing"),
        ([f"--reward={USER}:NUMBER"], r"^--reward \S+ is of type int: name a function$"),
        ([f"--reward={USER}"], r"write it as python:pkg\.module:name, which is"),
        (
            ["--reward-workers=2"],
            r"^--reward-workers 2 does nothing with --task count_up, which is scored by the trainer",
        ),
        (
            ["--reward-timeout=2", "--reward=exact"],
            r"^--reward-timeout 2\.0 does nothing with --reward exact, which is sc",
        ),
        (["--reward-workers=0", f"--reward={USER}:parts"], r"^--reward-workers 0 must be positive$"),
        (["--reward-timeout=-1", f"--reward={USER}:parts"], r"^--reward-timeout -1\.0 must be positive$"),
        (["--reward-on-error=nan"], r"^--reward-on-error nan cannot be trained on: give a number that float32 holds$"),
        (["--reward-on-error=1e39"], r"^--reward-on-error 1e\+39 cannot be trained on: give a number that float32"),
        ([f"--reward={USER}:too_few"], r"^--reward \S+ cannot be called with prompt, response, label and record \("),
        ([f"--task={USER}:BadReward"], r"^--task \S+ cannot be called with prompt, response, label and record \("),
        (["--reward-on-error=bad"], r"argument --reward-on-error: invalid float value: 'bad'"),
        (["--reward-errors=ignore"], r"argument --reward-errors: invalid choice: 'ignore'"),
        (
            ["--reward-errors=stop", "--reward-on-error=1"],
            r"^--reward-on-error 1\.0 does nothing with --reward-errors stop",
        ),
        (["--overlong=cut"], r"argument --overlong: invalid choice: 'cut'"),
        (["--overlong=penalise"], r"^--overlong penalise needs --overlong-buffer N"),
        (
            ["--overlong=penalise", "--overlong-buffer=11"],
            r"^--overlong-buffer 11 is more than --max-response-length 10",
        ),
        (["--overlong-buffer=4"], r"^--overlong-buffer 4 does nothing with --overlong keep: drop it, or use penalise$"),
        (["--overlong=mask", "--overlong-buffer=4"], r"^--overlong-buffer 4 does nothing with --overlong mask"),
        (["--overlong=mask", "--overlong-penalty-factor=2"], r"^--overlong-penalty-factor 2\.0 does nothing with"),
        ([*PENALISE, "--overlong-penalty-factor=-1"], r"^--overlong-penalty-factor -1\.0 must be positive$"),
    ],
)
def test_what_cannot_work_is_one_sentence(tmp_path, words, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        check(tmp_path, *words)
    assert "\n" not in str(caught.value)


def test_math_verify_names_its_extra_where_it_is_missing(tmp_path, monkeypatch):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "math_verify" else found(name))
    with pytest.raises(ConfigurationError, match=r"^--reward math-verify needs math_verify, .*pip install .*\[math\]'$"):
        check(tmp_path, "--reward=math-verify")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--reward=exact"], r"^--reward exact does nothing with --load-rollouts \S+, which has rewards: drop one"),
        (["--reward-errors=stop"], r"^--reward-errors stop does nothing with --load-rollouts"),
        (list(PENALISE), r"^--overlong penalise changes rewards, and those of --load-rollouts \S+ are recorded"),
        (["--overlong=mask"], None),
    ],
)
def test_recorded_rollouts_have_their_rewards(tmp_path, words, message):
    folder = tmp_path / "records"
    folder.mkdir()
    save_rollouts(recorded_batch(0), folder / "step-0000000-replica-0000.safetensors")
    words = [f"--load-rollouts={folder}", "--train-iters=2", *words]
    if message is None:
        assert check(tmp_path, *words).rewards.overlong == "mask"
        return
    with pytest.raises(ConfigurationError, match=message):
        check(tmp_path, *words)
