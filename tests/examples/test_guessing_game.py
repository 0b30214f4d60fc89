"""The guessing game: its rules, and a short run of its launch file. tests/long learns it."""

import pytest

from examples.guessing_game import HIGHEST, Game
from tests.support.paths import ROOT
from tests.support.ranks import Layout
from tests.support.training_runs import agreed, rows, run_training


def asked(label, response, turns=()):
    return {"prompt": "?", "response": response, "label": label, "record": {}, "turns": list(turns)}


@pytest.mark.parametrize("label", range(1, HIGHEST + 1))
def test_halving_finds_every_number_in_three_guesses(label):
    game = Game(1)
    turns = []
    reward = 0.0
    low = 1
    high = HIGHEST
    for _ in range(3):
        guess = (low + high) // 2
        reply = game.reply(**asked(label, str(guess), turns))
        reward += reply["reward"]
        if reply["observation"] is None:
            break
        turns.append((str(guess), reply["observation"]))
        low, high = (low, guess - 1) if reply["observation"] == "<" else (guess + 1, high)
    score = game.reward(**asked(label, str(guess), turns))
    assert score == {"reward": 0.9, "right": 1.0, "guesses": len(turns) + 1}
    assert reward == pytest.approx(0.1)
    assert game.reward(**asked(label, str(label % HIGHEST + 1)))["reward"] == 0


def test_other_words_than_guesses_end_the_game():
    game = Game(1)
    assert game.reply(**asked(3, "?")) is game.reply(**asked(3, "")) is None
    assert {problem.label for problem in game.problems(0, 100)} == set(range(1, HIGHEST + 1))


def test_the_launch_file_trains(ranks, tmp_path):
    arguments = [f"--config={ROOT}/examples/guessing_game.yaml", "--cpu", f"--runs-dir={tmp_path}", "--run-name=run"]
    arguments += ["--grpo-iterations=1", "--train-iters=2", "--grpo-prompts-per-step=4"]
    arguments += ["--global-batch-size=64", "--micro-batch-size=32"]
    assert agreed(ranks.run(run_training, Layout(dp=2), arguments)) is None
    metrics = rows(tmp_path)
    assert len(metrics) == 2
    for row in metrics:
        assert row["rollout/turns"] == pytest.approx(row["reward/guesses"])
        assert row["reward/errors"] == 0
        assert row["rollout/sync_error"] < 0.25
