"""Metrics of an evaluation on held-out problems, and the file of its answers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_rc.launch.rewards.outcome import Outcome
from megatron_rc.launch.rewards.rewarder import as_json
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.set_aside import set_aside
from megatron_rc.launch.tasks import Problem
from megatron_rc.records.rollout import SamplingParams

# A response with at least this reward is right.
RIGHT = 1.0
FOLDER = "eval"
_PASS = "eval/pass@"


@dataclass(frozen=True)
class Graded:
    """A problem and its graded responses."""

    problem: Problem
    responses: Sequence[str]  # texts without the end tokens behind them
    rewards: Sequence[float]  # one for each response
    outcomes: Sequence[Outcome]  # the reward rule's result for each response


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
    """[3 + number of k] float64: problems, rewards, errors, and the sum of pass@k for each k; replicas add up."""
    right = [sum(reward >= RIGHT for reward in one.rewards) for one in graded]
    rewards = sum(reward for one in graded for reward in one.rewards)
    errors = sum(outcome.failure is not None for one in graded for outcome in one.outcomes)
    passed = [sum(pass_at_k(samples, count, k) for count in right) for k in tries(samples)]
    return torch.tensor([len(graded), rewards, errors, *passed], dtype=torch.float64)


def metrics_of(sums: Tensor, samples: int) -> dict[str, float]:
    """Metrics of an evaluation from the sums over all replicas."""
    problems, rewards, errors, *passed = sums.tolist()
    shares = {f"{_PASS}{k}": value / problems for k, value in zip(tries(samples), passed, strict=True)}
    means = {"eval/reward": rewards / (problems * samples), "eval/exact_match": shares[f"{_PASS}1"]}
    return {**means, **shares, "eval/reward_errors": errors}


def in_words(metrics: Mapping[str, float]) -> str:
    """One line about an evaluation for the terminal."""
    passed = {int(name.removeprefix(_PASS)): share for name, share in metrics.items() if name.startswith(_PASS)}
    most = max(passed)
    more = f", {passed[most]:.1%} in {most} tries" if most > 1 else ""
    return f"held out: {metrics['eval/exact_match']:.1%} right{more}"


def share_of(config: RunConfig, replica: int) -> range:
    """Numbers of the held-out problems of a data-parallel replica."""
    number, replicas = config.evaluation.eval_problems, config.data_parallel_size
    return range(number * replica // replicas, number * (replica + 1) // replicas)


def answers_of(graded: Sequence[Graded], config: RunConfig, replica: int) -> str:
    """JSON lines: the first response to each problem of this replica among the first ``--eval-answers`` problems."""
    wanted = max(0, config.evaluation.eval_answers - share_of(config, replica).start)
    return "".join(json.dumps(_line(one), default=str) + "\n" for one in graded[:wanted])


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
    problem, outcome = graded.problem, graded.outcomes[0]
    return {
        "prompt": list(problem.messages) or problem.prompt,
        "response": graded.responses[0],
        "label": as_json(problem.label),
        "reward": graded.rewards[0],
        "components": dict(outcome.components),
        "error": outcome.failure,
    }
