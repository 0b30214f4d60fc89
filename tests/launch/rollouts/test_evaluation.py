"""Evaluations: pass@k, what adds up over replicas, and the answers that are written down."""

import itertools
import json
import os
from dataclasses import replace

import pytest

from megatron_rc.launch.rewards.outcome import Outcome
from megatron_rc.launch.rollouts.evaluation import (
    Graded,
    answers_of,
    in_words,
    metrics_of,
    pass_at_k,
    right_by_name,
    sampling_of,
    sums_by_name,
    tries,
    write_answers,
)
from megatron_rc.launch.tasks import Problem
from tests.support.recorded_training import flags, run_config

HELD_OUT = ["--task=python:tests.support.user_rewards:Doubles", "--reward=exact", "--eval-interval=2"]


def config_of(tmp_path, *more):
    return run_config(flags(tmp_path, *HELD_OUT, "--run-name=mine", *more))


def write(problems, config, step):
    """Of a run of one replica."""
    write_answers(answers_of(problems, config, 0), config, step)


def graded(*rewards, problem=None):
    count = len(rewards)
    problem = problem or Problem("4 + 5 = ", 9)
    responses = [f"answer {number}" for number in range(count)]
    return Graded(problem, responses, rewards, [Outcome(reward, {"format": 0.5}) for reward in rewards])


def test_pass_at_k_is_the_share_of_choices_with_a_right_one():
    """Counted out: of all ways to choose k of n responses, those that hold one of the c right ones."""
    for samples in (1, 2, 5, 6):
        for right, k in itertools.product(range(samples + 1), range(1, samples + 1)):
            choices = list(itertools.combinations(range(samples), k))
            share = sum(any(index < right for index in choice) for choice in choices) / len(choices)
            assert pass_at_k(samples, right, k) == pytest.approx(share, abs=1e-12), (samples, right, k)
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5), "many do not overflow"
    assert [tries(samples) for samples in (1, 2, 3, 8, 9)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 9]]


def test_an_evaluation_is_the_mean_over_problems_of_all_replicas():
    """A reward of 1 or more is right; what is partly right counts in the mean alone."""
    problems = [graded(1, 0, 0, 0.5), graded(0, 0, 0, 0), graded(1, 1.5, 1, -1)]
    whole = metrics_of(sums_by_name(problems, 4, []), 4)
    shares = metrics_of(sum(sums_by_name(part, 4, []) for part in (problems[:1], problems[1:], [])), 4)
    assert whole == pytest.approx(shares)
    assert whole == pytest.approx(
        {
            "eval/reward": (1.5 + 0 + 2.5) / 12,
            "eval/exact_match": (1 / 4 + 0 + 3 / 4) / 3,
            "eval/pass@1": (1 / 4 + 0 + 3 / 4) / 3,
            "eval/pass@2": (1 / 2 + 0 + 1) / 3,
            "eval/pass@4": 2 / 3,
            "eval/reward_errors": 0,
        }
    )


def test_each_named_file_has_metrics_of_its_own():
    """The pooled ones are over all problems, not over files."""
    of_files = {"aime": [graded(1, 0), graded(0, 0)], "math.500": [graded(1, 1)], "unscored": [graded(0.5, 0.5)]}
    problems = [replace(one, data=name) for name, results in of_files.items() for one in results]
    names = list(of_files)
    shares = [sums_by_name(part, 2, names) for part in (problems[:1], problems[1:], [])]
    results = metrics_of(sum(shares), 2, names)
    for name, own in {"": problems, **of_files}.items():
        alone = metrics_of(sums_by_name(own, 2, []), 2)
        begin = f"eval/{name}/" if name else "eval/"
        for metric, value in alone.items():
            assert results.pop(begin + metric.removeprefix("eval/")) == pytest.approx(value), (name, metric)
    assert not results
    assert right_by_name(
        {"eval/aime/exact_match": 1, "eval/exact_match": 2, "eval/a/pass@1": 3, "x/exact_match": 4}
    ) == {"aime": 1}


def test_the_terminal_says_both():
    assert in_words({"eval/exact_match": 0.25, "eval/pass@1": 0.25}) == "held out: 25.0% right"
    several = {"eval/exact_match": 0.25, "eval/pass@1": 0.25, "eval/pass@2": 0.5, "eval/pass@16": 0.75}
    assert in_words(several) == "held out: 25.0% right, 75.0% in 16 tries"
    of_files = {"eval/aime/exact_match": 0.1, "eval/aime/pass@1": 0.1, "eval/gsm8k/exact_match": 1.0}
    assert in_words(several | of_files) == "held out: 25.0% right, 75.0% in 16 tries (aime 10.0%, gsm8k 100.0%)"


@pytest.mark.parametrize(
    ("more", "top_k", "temperature"),
    [
        ([], 1, 1.0),
        (["--eval-temperature=0.6"], 0, 0.6),
        (["--eval-samples=4", "--rl-default-temperature=0.8"], 0, 0.8),
    ],
)
def test_one_response_is_the_likeliest_and_several_are_sampled(tmp_path, more, top_k, temperature):
    sampling = sampling_of(config_of(tmp_path, *more))
    assert (sampling.top_k, sampling.temperature) == (top_k, temperature)


def written(folder):
    return [json.loads(line) for line in folder.read_text(encoding="utf-8").splitlines()]


def test_a_few_answers_are_written_down(tmp_path):
    write([graded(1.0)], config_of(tmp_path, "--eval-answers=0"), 6)
    assert not list(tmp_path.rglob("eval")), "or none"
    config = config_of(tmp_path, "--eval-answers=3")
    message = ({"role": "system", "content": "add"}, {"role": "user", "content": "4 + 5 | é\n"})
    problems = [graded(1.0, 0.0), graded(0.0, 1.0, problem=Problem("", {"value": 3}, messages=message))]
    problems += [replace(graded(1.0, problem=Problem("a", {(1, 2): "b"})), data="aime"), graded(1.0, 1.0)]
    write(problems, config, 6)
    first, second, third = written(tmp_path / "mine" / "eval" / "step-0000006.jsonl")
    scored = {"components": {"format": 0.5}, "error": None}
    assert first == {"prompt": "4 + 5 = ", "response": "answer 0", "label": 9, "reward": 1.0, **scored}
    assert second["prompt"] == list(message)
    assert (second["label"], second["reward"]) == ({"value": 3}, 0.0)
    assert third["label"] == "{(1, 2): 'b'}", "in words where it is no JSON"
    assert third["data"] == "aime", "of several files"


def test_responses_that_could_not_be_scored_are_counted_and_written(tmp_path):
    outcomes = [Outcome(failure="raised ValueError: no"), Outcome(1.0)]
    unscored = Graded(Problem("a"), ["b", "c"], [0.0, 1.0], outcomes)
    sums = sums_by_name([unscored, graded(1, 1)], 2, [])
    assert metrics_of(sums, 2)["eval/reward_errors"] == 1
    write([unscored], config_of(tmp_path), 6)
    (line,) = written(tmp_path / "mine" / "eval" / "step-0000006.jsonl")
    assert (line["reward"], line["error"]) == (0.0, "raised ValueError: no")


def test_a_new_run_begins_a_folder_of_its_own(tmp_path):
    config = config_of(tmp_path)
    for step in (0, 2, 4):
        write([graded(1.0)], config, step)
    for reward in (0.5, 0.0):  # older runs of one second are both kept
        os.utime(tmp_path / "mine" / "eval", (1e9, 1e9))
        write([graded(reward)], config, 0)
    folders = sorted((tmp_path / "mine").iterdir())
    assert [len(list(folder.iterdir())) for folder in folders] == [1, 3, 1]
    assert folders[0].name == "eval"
    assert [written(folder / "step-0000000.jsonl")[0]["reward"] for folder in folders] == [0.0, 1.0, 0.5]
