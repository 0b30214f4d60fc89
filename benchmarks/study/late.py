"""Late responses: a response takes longer the longer it is, by simulated times, and the engine waits, paces or drops.

A response of n tokens takes ``STEPS`` · n / ``LONG`` · exp(``SPREAD`` · z) optimizer steps, with a standard normal z
from the seed of the call. No clock is read, so a run that is repeated has the same times.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import NormalDist, fmean

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
_ROUNDS = 2


def normal_noise(count: int, seed: int) -> list[float]:
    """The z of each response of a call."""
    generator = torch.Generator().manual_seed(derive_seed(seed, _TIMES_FROM))
    return torch.randn(count, generator=generator, dtype=torch.float64).tolist()


def _uniform_draws(count: int, seed: int) -> list[float]:
    generator = torch.Generator().manual_seed(derive_seed(seed, _DROPS_FROM))
    return torch.rand(count, generator=generator, dtype=torch.float64).tolist()


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
        late: what it does with late responses.
            ``wait``: all responses are of the newest weights.
            ``pace``: each response is of the weights of its start, which are as old as it takes, up to ``OLDEST``.
            ``drop``: responses that take longer than ``LIMIT`` are bad responses.
            ``drop_random``: as many as ``drop`` would drop are bad responses, whatever their length.
    """

    def __init__(self, inputs: EngineInputs, late: str) -> None:
        super().__init__(inputs)
        self._late = late
        self._batch_size = inputs.config.rollouts.sequences
        self._late_file = self.policy_file.with_name(LATE_FILE)
        # The weights of the last steps by their version, the oldest first.
        self.kept_weights: dict[int, dict[str, Tensor]] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take all weights of the model, and keep those of the last ``OLDEST`` steps; see :class:`RolloutEngine`."""
        super().load_weights(weights, version)
        self.kept_weights[version] = {
            name: tensor.clone() for name, tensor in checkpoint_tensors(self.exact.model).items()
        }
        self.kept_weights = {kept: self.kept_weights[kept] for kept in self.kept_weights if kept >= version - OLDEST}

    def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int, seed: int
    ) -> list[Sample]:
        """Sample in time or late; see :class:`RolloutEngine`."""

        def sample_by(version: int, indices: Sequence[int]) -> list[Sample]:
            """Responses of the weights of a version to some of the prompts."""
            if self.sampler.version != version:
                self.sampler.load_weights(self.kept_weights[version].items(), version)
            samples = self.sampler.sample([prompts[index] for index in indices], params, max_new_tokens, seed)
            return [replace(sample, versions=[version] * len(sample.token_ids)) for sample in samples]

        samples = sample_by(self.version, range(len(prompts)))
        if len(prompts) != self._batch_size or max_new_tokens != LONG:
            return samples

        noise = normal_noise(len(samples), seed)
        if self._late == "pace":
            samples = self._paced(samples, noise, sample_by)
        lengths = [len(sample.token_ids) for sample in samples]
        chances = [1.0] * len(samples)
        is_late = [False] * len(samples)
        if self._late == "drop":
            chances = [chance_in_time(length) for length in lengths]
            is_late = [time_of(length, z) > LIMIT for length, z in zip(lengths, noise, strict=True)]
        if self._late == "drop_random":
            share = fmean(chance_in_time(length) for length in lengths)
            chances = [share] * len(samples)
            is_late = [draw > share for draw in _uniform_draws(len(samples), seed)]
        self._write_expected(lengths, chances)
        # A late response is a bad one. It keeps its tokens, so that the launcher's account has its length.
        return [
            replace(sample, fault="the response is late") if late else sample
            for sample, late in zip(samples, is_late, strict=True)
        ]

    def weights_of_age(self, age: float) -> int:
        """Version of the newest kept weights that are at least this old, or of the oldest."""
        old_enough = [version for version in self.kept_weights if version <= self.version - age]
        return max(old_enough, default=min(self.kept_weights))

    def _paced(
        self, newest: Sequence[Sample], noise: Sequence[float], sample_by: Callable[[int, Sequence[int]], list[Sample]]
    ) -> list[Sample]:
        """Replace each response by one of older weights that takes as long as they are old.

        The time of a response is known once it is sampled, and it says which weights should have sampled it. So the
        search begins with the time of the newest weights' response.
        """
        samples = list(newest)
        versions = [self.version] * len(samples)
        for _ in range(_ROUNDS):
            indices_of: dict[int, list[int]] = {}
            for index, sample in enumerate(samples):
                version = self.weights_of_age(time_of(len(sample.token_ids), noise[index]))
                if version != versions[index]:
                    indices_of.setdefault(version, []).append(index)
            for version, indices in indices_of.items():
                for index, sample in zip(indices, sample_by(version, indices), strict=True):
                    samples[index] = sample
                    versions[index] = version
        return samples

    def _write_expected(self, lengths: Sequence[int], chances: Sequence[float]) -> None:
        """Append the mean chances of the shortest and of the longest quarter of a batch's responses."""
        by_length = [chance for _, chance in sorted(zip(lengths, chances, strict=True))]
        quarter = len(by_length) // 4
        row = {
            "step": self.version,
            "expected/shortest": fmean(by_length[:quarter]),
            "expected/longest": fmean(by_length[-quarter:]),
        }
        with self._late_file.open("a" if self.version else "w", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
