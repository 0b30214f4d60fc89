"""Metrics of an evaluation on held-out problems, and the file of its answers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from megatron_rc.launch.rewards.outcome import Outcome
from megatron_rc.launch.rewards.rewarder import as_json
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.set_aside import set_aside
from megatron_rc.launch.tasks import Problem
from megatron_rc.records.rollout import SamplingParams

Value = TypeVar("Value")
# A response with at least this reward is right.
RIGHT = 1.0
FOLDER = "eval"
# Parts of the metrics' names: eval/exact_match and eval/pass@<k> of all problems, eval/<name>/… of one file's.
_PREFIX = "eval/"
_EXACT_MATCH = "exact_match"
_PASS_AT = "pass@"


@dataclass(frozen=True)
class Graded:
    """A problem and its graded responses."""

    problem: Problem
    responses: Sequence[str]  # texts without the end tokens behind them
    rewards: Sequence[float]  # one for each response
    outcomes: Sequence[Outcome]  # the reward rule's result for each response
    data: str | None = None  # name of the problem's file among several of --eval-data


def sampling_of(config: RunConfig) -> SamplingParams:
    """Sampling parameters of an evaluation: greedy if no temperature is given."""
    settings = config.evaluation
    if settings.eval_temperature is None:
        return SamplingParams(top_k=1)
    return SamplingParams(temperature=settings.eval_temperature)


def tries(samples: int) -> list[int]:
    """All k of pass@k: the powers of two below ``samples``, and ``samples``."""
    return [*(2**power for power in range(samples.bit_length()) if 2**power < samples), samples]


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k responses is right.

    1 - C(n - c, k) / C(n, k)      (Chen et al. 2021, Evaluating Large Language Models Trained on Code, Eq. 1)
    """
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def sums_of(graded: Sequence[Graded], samples: int) -> Tensor:
    """Return the sums of some problems, [3 + number of k] float64; replicas add up.

    They are the number of problems, the rewards, the responses that could not be scored, and pass@k for each k.
    """
    right_responses = [sum(reward >= RIGHT for reward in problem.rewards) for problem in graded]
    rewards = sum(reward for problem in graded for reward in problem.rewards)
    errors = sum(outcome.failure is not None for problem in graded for outcome in problem.outcomes)
    passed = [sum(pass_at_k(samples, right, k) for right in right_responses) for k in tries(samples)]
    return torch.tensor([len(graded), rewards, errors, *passed], dtype=torch.float64)


def sums_by_name(graded: Sequence[Graded], samples: int, names: Sequence[str]) -> Tensor:
    """Return :func:`sums_of` all problems, and of the problems of each named file, [1 + names, sums]."""
    problems_of_files = [[problem for problem in graded if problem.data == name] for name in names]
    return torch.stack([sums_of(problems, samples) for problems in (graded, *problems_of_files)])


def metrics_of(sums: Tensor, samples: int, names: Sequence[str] = ()) -> dict[str, float]:
    """Metrics of an evaluation, of all problems and of each named file, from :func:`sums_by_name` of all replicas."""
    prefixes = [_PREFIX, *(f"{_PREFIX}{name}/" for name in names)]
    metrics = {}
    for prefix, row in zip(prefixes, sums.tolist(), strict=True):
        problems, rewards, errors, *passed = row
        shares = {f"{prefix}{_PASS_AT}{k}": value / problems for k, value in zip(tries(samples), passed, strict=True)}
        metrics[f"{prefix}reward"] = rewards / (problems * samples)
        metrics[f"{prefix}{_EXACT_MATCH}"] = shares[f"{prefix}{_PASS_AT}1"]
        metrics |= shares
        metrics[f"{prefix}reward_errors"] = errors
    return metrics


def in_words(metrics: Mapping[str, float]) -> str:
    """Return a line for the terminal: share of right answers, pass@k of the largest k, and each file's share."""
    prefix = f"{_PREFIX}{_PASS_AT}"
    pass_at = {int(name.removeprefix(prefix)): share for name, share in metrics.items() if name.startswith(prefix)}
    most_tries = max(pass_at)
    line = f"held out: {metrics[f'{_PREFIX}{_EXACT_MATCH}']:.1%} right"
    if most_tries > 1:
        line += f", {pass_at[most_tries]:.1%} in {most_tries} tries"
    shares_of_files = [f"{name} {share:.1%}" for name, share in right_by_name(metrics).items()]
    if shares_of_files:
        line += f" ({', '.join(shares_of_files)})"
    return line


def right_by_name(metrics: Mapping[str, Value]) -> dict[str, Value]:
    """Return the value of each metric ``eval/<name>/exact_match``, by the name of the file."""
    pattern = re.compile(f"{_PREFIX}(.+)/{_EXACT_MATCH}")
    matches = ((pattern.fullmatch(metric), value) for metric, value in metrics.items())
    return {match[1]: value for match, value in matches if match}


def share_of(config: RunConfig, replica: int) -> range:
    """Numbers of the held-out problems of a data-parallel replica."""
    num_problems = config.evaluation.eval_problems
    replicas = config.data_parallel_size
    return range(num_problems * replica // replicas, num_problems * (replica + 1) // replicas)


def answers_of(graded: Sequence[Graded], config: RunConfig, replica: int) -> str:
    """JSON lines: the first response to each problem of this replica among the first ``--eval-answers`` problems."""
    num_lines = max(0, config.evaluation.eval_answers - share_of(config, replica).start)
    return "".join(json.dumps(_line(problem), default=str) + "\n" for problem in graded[:num_lines])


def write_answers(lines: str, config: RunConfig, step: int) -> None:
    """Write the answers of all replicas to ``eval/step-<step>.jsonl`` in the run's folder, or raise ValueError.

    The evaluation before step 0 starts a new folder, and renames the folder of an older run.
    """
    if not config.evaluation.eval_answers:
        return
    folder = Path(config.launch.runs_dir) / config.launch.run_name / FOLDER
    path = folder / f"step-{step:07d}.jsonl"
    try:
        if step == 0 and folder.exists():
            set_aside(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(lines, encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written ({error.strerror}): make room, choose another --runs-dir, or give "
            "--eval-answers 0"
        ) from error


def _line(graded: Graded) -> dict[str, object]:
    problem = graded.problem
    outcome = graded.outcomes[0]
    of_file = {} if graded.data is None else {"data": graded.data}
    return {
        **of_file,
        "prompt": list(problem.messages) or problem.prompt,
        "response": graded.responses[0],
        "label": as_json(problem.label),
        "reward": graded.rewards[0],
        "components": dict(outcome.components),
        "error": outcome.failure,
    }
