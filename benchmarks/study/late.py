"""Late responses: a response takes longer the longer it is, by simulated times, and the engine waits, paces or drops.

A response of n tokens takes ``STEPS`` · n / ``LONG`` · exp(``SPREAD`` · z) optimizer steps, with a standard normal z
from the seed of the call. No clock is read, so a run that is repeated has the same times.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.study.design import LATE_FILE
from benchmarks.study.engine import StudyEngine
from benchmarks.study.task import LONG
from megatron_rc.launch.engines import Sample
from megatron_rc.launch.engines.answers import derive_seed
from megatron_rc.launch.engines.registry import EngineInputs
from megatron_rc.launch.weights.checkpoint_names import checkpoint_tensors
from megatron_rc.records.rollout import SamplingParams

# Median time of a response of LONG tokens, in optimizer steps.
STEPS = 4.0
# Standard deviation of the logarithm of a response's time.
SPREAD = 0.3
# Later responses are dropped. 70 % of the responses of LONG tokens are in time, because the launcher ends a run if more
# than half of a batch is dropped: among 128 such responses that happens once in some million batches.
LIMIT = 4.7
# Age of the oldest weights that pacing keeps, in optimizer steps: 1 % of the responses of LONG tokens take longer.
OLDEST = 8
# Added to the seed of a call, so that times and random drops are drawn apart from the tokens.
_TIMES_FROM = 1 << 36
_DROPS_FROM = 1 << 37
# Pacing looks at most this often for weights whose response takes as long as they are old.
_ROUNDS = 3


def normal_noise(count: int, seed: int) -> list[float]:
    """The z of each response of a call."""
    generator = torch.Generator().manual_seed(derive_seed(seed, _TIMES_FROM))
    return torch.randn(count, generator=generator, dtype=torch.float64).tolist()


def time_of(num_tokens: int, z: float) -> float:
    """Optimizer steps that a response takes."""
    return STEPS * num_tokens / LONG * math.exp(SPREAD * z)


def chance_in_time(num_tokens: int) -> float:
    """Probability that a response takes at most ``LIMIT`` steps: Φ(ln(``LIMIT`` / its median time) / ``SPREAD``)."""
    return NormalDist().cdf(math.log(LIMIT / time_of(num_tokens, 0.0)) / SPREAD)


class LateEngine(StudyEngine):
    """The study's engine with exact weights, whose responses may be late.

    Evaluations and the launcher's probes are never late. Each rollout batch appends the expected inclusion rates of its
    longest and of its shortest quarter to ``late.jsonl``, to be compared with the launcher's ``selection/…`` metrics.

    Args:
        inputs: the run's inputs for an engine.
        late: name of the policy for late responses, one of ``_POLICIES``:
            ``wait``: all responses are of the newest weights;
            ``pace``: each response is of the weights of its start, which are as old as it takes, up to ``OLDEST``;
            ``drop``: responses that take longer than ``LIMIT`` are bad responses;
            ``drop_random``: as many as ``drop`` would drop are bad responses, whatever their length.
    """

    def __init__(self, inputs: EngineInputs, late: str) -> None:
        super().__init__(inputs)
        self._batch_size = inputs.config.rollouts.sequences
        self._policy = _POLICIES[late]
        self._late_file = self.policy_file.with_name(LATE_FILE)
        # (version, weights) of the newest steps, the newest last.
        self.kept_weights: list[tuple[int, dict[str, Tensor]]] = []

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take all weights of the model, and keep those of the last ``OLDEST`` steps; see :class:`RolloutEngine`."""
        super().load_weights(weights, version)
        copies = {name: tensor.clone() for name, tensor in checkpoint_tensors(self.exact.model).items()}
        recent = [(kept, tensors) for kept, tensors in self.kept_weights if version - OLDEST <= kept < version]
        self.kept_weights = [*recent, (version, copies)]

    def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int, seed: int
    ) -> list[Sample]:
        """Sample in time or late; see :class:`RolloutEngine`."""

        def sample_by(version: int, indices: Sequence[int]) -> list[Sample]:
            """Responses of old weights to some of the prompts."""
            if self.sampler.version != version:
                self.sampler.load_weights(dict(self.kept_weights)[version].items(), version)
            samples = self.sampler.sample([prompts[index] for index in indices], params, max_new_tokens, seed)
            return [replace(sample, versions=[version] * len(sample.token_ids)) for sample in samples]

        newest = sample_by(self.version, range(len(prompts)))
        if len(prompts) != self._batch_size or max_new_tokens != LONG:
            return newest
        samples, chances = self._policy(self, newest, sample_by, seed)
        _write_expected(self._late_file, self.version, samples, chances)
        return samples

    def weights_of_age(self, age: float) -> int:
        """Version of the newest kept weights that are at least this old, or of the oldest."""
        versions = [version for version, _ in self.kept_weights]
        return max((version for version in versions if version <= self.version - age), default=versions[0])


Resample = Callable[[int, Sequence[int]], list[Sample]]
# Samples, and the expected probability of each one to train.
Result = tuple[list[Sample], list[float]]


def _wait(engine: LateEngine, samples: list[Sample], resample: Resample, seed: int) -> Result:
    return samples, [1.0] * len(samples)


def _pace(engine: LateEngine, samples: list[Sample], resample: Resample, seed: int) -> Result:
    """Replace each response by one of older weights that takes as long as they are old.

    The time of a response is known once it is sampled, and it says which weights should have sampled it. So the search
    begins with the time of the newest weights' response.
    """
    noise = normal_noise(len(samples), seed)
    samples = list(samples)
    for _ in range(_ROUNDS):
        others: dict[int, list[int]] = {}
        for index, sample in enumerate(samples):
            version = engine.weights_of_age(time_of(len(sample.token_ids), noise[index]))
            if sample.versions and version != sample.versions[0]:
                others.setdefault(version, []).append(index)
        for version, indices in others.items():
            for index, sample in zip(indices, resample(version, indices), strict=True):
                samples[index] = sample
    return samples, [1.0] * len(samples)


def _drop(engine: LateEngine, samples: list[Sample], resample: Resample, seed: int) -> Result:
    noise = normal_noise(len(samples), seed)
    times = [time_of(len(sample.token_ids), z) for sample, z in zip(samples, noise, strict=True)]
    in_time = [_marked(sample, is_late=time > LIMIT) for sample, time in zip(samples, times, strict=True)]
    return in_time, [chance_in_time(len(sample.token_ids)) for sample in samples]


def _drop_random(engine: LateEngine, samples: list[Sample], resample: Resample, seed: int) -> Result:
    share = fmean(chance_in_time(len(sample.token_ids)) for sample in samples)
    generator = torch.Generator().manual_seed(derive_seed(seed, _DROPS_FROM))
    draws = torch.rand(len(samples), generator=generator, dtype=torch.float64).tolist()
    marked = [_marked(sample, is_late=draw > share) for sample, draw in zip(samples, draws, strict=True)]
    return marked, [share] * len(samples)


_POLICIES: dict[str, Callable[[LateEngine, list[Sample], Resample, int], Result]] = {
    "wait": _wait,
    "pace": _pace,
    "drop": _drop,
    "drop_random": _drop_random,
}


def _marked(sample: Sample, *, is_late: bool) -> Sample:
    """A late response is a bad one, which keeps its tokens, so that the launcher's account has its length."""
    return replace(sample, fault="the response is late") if is_late else sample


def _write_expected(file: Path, version: int, samples: Sequence[Sample], chances: Sequence[float]) -> None:
    """Append the mean chances of the shortest and of the longest quarter of a batch's responses."""
    pairs: list[tuple[int, float]] = [
        (len(sample.token_ids), chance) for sample, chance in zip(samples, chances, strict=True)
    ]
    by_length = [chance for _, chance in sorted(pairs)]
    quarter = len(by_length) // 4
    row: dict[str, Any] = {
        "step": version,
        "expected/shortest": fmean(by_length[:quarter]),
        "expected/longest": fmean(by_length[-quarter:]),
    }
    with file.open("a" if version else "w", encoding="utf-8") as lines:
        lines.write(json.dumps(row) + "\n")
