"""Late responses: a response takes longer the longer it is, by simulated times, and the engine waits, paces or drops.

A response of n tokens takes ``STEPS`` · n / ``LONGEST`` · exp(``SPREAD`` · z) optimizer steps, with a standard normal z
from the seed of the call. No clock is read, so a run that is repeated has the same times.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import NormalDist, fmean

import torch
from torch import Tensor

from benchmarks.study.design import LATE_FILE
from benchmarks.study.engine import StudyEngine
from megatron_rc.launch.engines import Sample
from megatron_rc.launch.engines.answers import derive_seed
from megatron_rc.launch.engines.registry import EngineInputs
from megatron_rc.launch.weights.checkpoint_names import checkpoint_tensors
from megatron_rc.records.rollout import SamplingParams

# Largest number of tokens of a response of count_up: nine digits and the end.
LONGEST = 10
# Median time of a response of LONGEST tokens, in optimizer steps.
STEPS = 4.0
# Standard deviation of the logarithm of a response's time.
SPREAD = 0.3
# Share of a batch's responses that train if late ones are dropped. The launcher ends a run if more than half of a batch
# is dropped.
KEEP = 0.55
# Age of the oldest weights that pacing keeps, in optimizer steps: 1 % of the responses of LONGEST tokens take longer.
OLDEST = 8
# Optimizer steps with each batch, by configs/study/count_up.yaml.
STEPS_OF_A_BATCH = 2
# Added to the seed of a call, so that times, random drops and the responses of older weights are drawn apart from the
# responses of the newest weights.
_TIMES_FROM = 1 << 36
_DROPS_FROM = 1 << 37
_ROUNDS_FROM = 1 << 38
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
    return STEPS * num_tokens / LONGEST * math.exp(SPREAD * z)


def chances_in_time(lengths: Sequence[int], share: float) -> list[float]:
    """The probability of each response to be among the first of its batch, if this share of the batch trains.

    A response of n tokens takes at most t steps with the probability Φ(ln(t / its median time) / ``SPREAD``). The t is
    the one at which the mean of these probabilities is the share.
    """

    def chances_at(log_time: float) -> list[float]:
        return [NormalDist().cdf((log_time - math.log(time_of(length, 0.0))) / SPREAD) for length in lengths]

    low, high = math.log(1e-3), math.log(1e3)
    for _ in range(60):
        middle = (low + high) / 2
        if fmean(chances_at(middle)) < share:
            low = middle
        else:
            high = middle
    return chances_at(high)


def _are_not_smallest(values: Sequence[float], count: int) -> list[bool]:
    """False for the ``count`` smallest values, True for the others."""
    limit = sorted(values)[count - 1]
    return [value > limit for value in values]


class LateEngine(StudyEngine):
    """The study's engine with exact weights, whose responses to ``count_up`` may be late.

    Evaluations and the launcher's probes are never late. Each rollout batch appends a line to ``late.jsonl``: the
    expected inclusion rates of its longest and of its shortest quarter, to be compared with the launcher's
    ``selection/…`` metrics, and the simulated time of the batch.

    Args:
        inputs: the run's inputs for an engine.
        late: what it does with late responses.
            ``wait``: all responses are of the newest weights.
            ``pace``: each response is of the weights of its start, which are as old as it takes, up to ``OLDEST``.
            ``drop``: the share ``KEEP`` that finishes first trains, and the others are bad responses.
            ``drop_random``: as many train as with ``drop``, chosen at random.
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
        samples = self._sample_by(self.version, prompts, params, max_new_tokens, seed)
        if len(prompts) != self._batch_size or max_new_tokens != LONGEST:
            return samples

        noise = normal_noise(len(samples), seed)
        if self._late == "pace":
            samples = self._paced(samples, noise, prompts, params, seed)
        lengths = [len(sample.token_ids) for sample in samples]
        times = [time_of(length, z) for length, z in zip(lengths, noise, strict=True)]
        num_in_time = int(KEEP * len(samples))
        share = num_in_time / len(samples)
        chances = [1.0] * len(samples)
        is_late = [False] * len(samples)
        if self._late == "drop":
            chances = chances_in_time(lengths, share)
            is_late = _are_not_smallest(times, num_in_time)
        if self._late == "drop_random":
            chances = [share] * len(samples)
            is_late = _are_not_smallest(_uniform_draws(len(samples), seed), num_in_time)
        self._write_batch(lengths, chances, self._time_of_batch(times, is_late))
        # A late response is a bad one. It keeps its tokens, so that the launcher's account has its length.
        return [
            replace(sample, fault="the response is late") if late else sample
            for sample, late in zip(samples, is_late, strict=True)
        ]

    def weights_of_age(self, age: float) -> int:
        """Version of the newest kept weights that are at least this old, or of the oldest."""
        old_enough = [version for version in self.kept_weights if version <= self.version - age]
        return max(old_enough, default=min(self.kept_weights))

    def _sample_by(
        self, version: int, prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int, seed: int
    ) -> list[Sample]:
        """Responses of the weights of a version."""
        if self.sampler.version != version:
            self.sampler.load_weights(self.kept_weights[version].items(), version)
        samples = self.sampler.sample(prompts, params, max_new_tokens, seed)
        return [replace(sample, versions=[version] * len(sample.token_ids)) for sample in samples]

    def _paced(
        self,
        newest: Sequence[Sample],
        noise: Sequence[float],
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        seed: int,
    ) -> list[Sample]:
        """Replace each response by one of older weights that takes as long as they are old.

        The time of a response is known once it is sampled, and it says which weights should have sampled it. So the
        search begins with the time of the newest weights' response.
        """
        samples = list(newest)
        versions = [self.version] * len(samples)
        for number in range(_ROUNDS):
            indices_of: dict[int, list[int]] = {}
            for index, sample in enumerate(samples):
                version = self.weights_of_age(time_of(len(sample.token_ids), noise[index]))
                if version != versions[index]:
                    indices_of.setdefault(version, []).append(index)
            seed_of_round = derive_seed(seed, _ROUNDS_FROM + number)
            for version, indices in indices_of.items():
                # With one seed for all versions, the first responses of each would begin with the same draws.
                seed_of_version = derive_seed(seed_of_round, version)
                chosen_prompts = [prompts[index] for index in indices]
                older = self._sample_by(version, chosen_prompts, params, LONGEST, seed_of_version)
                for index, sample in zip(indices, older, strict=True):
                    samples[index] = sample
                    versions[index] = version
        return samples

    def _time_of_batch(self, times: Sequence[float], is_late: Sequence[bool]) -> float:
        """Optimizer steps that the sampling of a batch takes: until the last response that trains has finished.

        Pacing samples while the trainer trains, so each batch takes as long as the steps with it.
        """
        if self._late == "pace":
            return STEPS_OF_A_BATCH
        return max(time for time, late in zip(times, is_late, strict=True) if not late)

    def _write_batch(self, lengths: Sequence[int], chances: Sequence[float], batch_time: float) -> None:
        """Append a batch's time, and the mean chances of its shortest and of its longest quarter."""
        by_length = [chance for _, chance in sorted(zip(lengths, chances, strict=True))]
        quarter = len(by_length) // 4
        row = {
            "step": self.version,
            "expected/shortest": fmean(by_length[:quarter]),
            "expected/longest": fmean(by_length[-quarter:]),
            "batch_time": batch_time,
        }
        with self._late_file.open("a" if self.version else "w", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
