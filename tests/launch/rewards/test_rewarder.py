"""What becomes of responses that cannot be scored: their reward, the file, the line that is said once, the end."""

import json

import pytest

from megatron_rc.launch.rewards import rewarder as module
from megatron_rc.launch.rewards.outcome import MAX_COMPONENTS, Outcome
from megatron_rc.launch.rewards.rewarder import Rewarder, RewardError, Rewards, penalised
from megatron_rc.launch.tasks import Problem
from tests.support.recorded_training import flags, run_config

GOOD = Problem("1 + 1 = ", label="2")
BAD = Problem("1 + 2 = ", label={("a", 1): float}, record={"level": 3})


def make(tmp_path, *more, replica=0):
    return Rewarder(run_config(flags(tmp_path, "--run-name=run", *more)), replica)


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run" / "reward-errors.jsonl").read_text().splitlines()]


def test_an_error_has_its_reward_and_its_line(tmp_path, caplog):
    rewarder = make(tmp_path, "--reward=exact", "--reward-on-error=-0.5", replica=3)
    for step in (4, 6):
        texts = ["2", "3", "1"]
        ids = [[5, 1], [6, 1], [4, 1]]
        rewards = rewarder.score([GOOD, BAD, GOOD], texts, token_ids=ids, step=step, held_out=step == 6)
        assert (rewards.values, rewards.errors, rewards.sums()) == ([1.0, -0.5, 0.0], 1, {})
    rewarder.close()
    first, second = lines(tmp_path)
    assert first["traceback"].startswith("TypeError: --reward exact compares texts and numbers, or a list of them; ")
    assert "\n" not in first["traceback"]
    known = {
        "replica": 3,
        "sample": 1,
        "prompt": "1 + 2 = ",
        "response": "3",
        "record": {"level": 3},
        "token_ids": [6, 1],
    }
    assert first.items() >= known.items()
    assert first["label"] == "{('a', 1): <class 'float'>}", "words where it is no JSON"
    assert (second["step"], second["held_out"]) == (6, True)
    (message,) = caplog.messages
    assert message.startswith(f"--reward exact raised {first['traceback']}, on response '3': it gets -0.5")


def test_the_first_error_ends_it_where_that_is_asked_for(tmp_path):
    rewarder = make(tmp_path, "--reward=exact", "--reward-errors=stop")
    assert rewarder.score([GOOD], ["2"], step=0).values == [1.0]
    with pytest.raises(RewardError, match=r"\n--reward exact raised TypeError: .* 'x{80}': .*--reward-errors"):
        rewarder.score([BAD, BAD], ["x" * 3000, "3"], step=0)
    assert len(lines(tmp_path)) == 2, "all of the batch are kept"
    (tmp_path / "run" / "reward-errors.jsonl").unlink()
    (tmp_path / "run" / "reward-errors.jsonl").symlink_to("/dev/full")
    with pytest.raises(RewardError, match=r"reward-errors\.jsonl .*No space left on device.*--runs-dir$"):
        make(tmp_path, "--reward=exact").score([BAD], ["3"], step=0)


def test_components_of_a_run_are_limited(tmp_path):
    rewarder = make(tmp_path)

    class Scorer:
        def score(self, requests):
            return [Outcome(1.0, {f"part{index}": 2.0 for index in range(int(one["response"]))}) for one in requests]

    rewarder._scorer = Scorer()
    few, all_of_them, many = (rewarder.score([GOOD], [str(n)], step=0) for n in (3, MAX_COMPONENTS, MAX_COMPONENTS + 1))
    assert few.sums() == {f"part{index}": (2.0, 1) for index in range(3)}
    assert (len(all_of_them.sums()), all_of_them.errors) == (MAX_COMPONENTS, 0)
    assert (many.values, many.outcomes[0].failure) == ([0.0], "gave more than 32 different components over the run")
    assert rewarder.score([GOOD], ["5"], step=0).errors == 0


@pytest.mark.parametrize(
    ("cores", "ranks", "workers"), [(1, None, 1), (6, None, 6), (64, None, 8), (2, "4", 1), (16, "8", 2), (128, "8", 8)]
)
def test_workers_share_the_cores_of_the_machine(monkeypatch, cores, ranks, workers):
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda process: range(cores))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert module._default_workers() == workers


def test_the_punishment_is_that_of_dapo(tmp_path):
    """L = 10, B = 4: nothing up to 6 tokens, the whole factor at 10; beside the reward of an error too."""
    config = run_config(flags(tmp_path, "--overlong=penalise", "--overlong-buffer=4", "--overlong-penalty-factor=2"))
    outcomes = [Outcome(1.0, {"right": 1.0}), *[Outcome(0.5)] * 4, Outcome(failure="raised")]
    rewards = Rewards([1.0, 0.5, 0.5, 0.5, 0.5, 0.0], outcomes)
    results = penalised(rewards, [1, 6, 7, 9, 10, 8], config)
    assert results.values == [1.0, 0.5, 0.0, -1.0, -1.5, -1.0]
    assert results.sums() == {"right": (1.0, 1), "overlong_penalty": (5.0, 6)}
    assert results.errors == 1
    assert penalised(rewards, [10] * 6, run_config(flags(tmp_path))) is rewards
