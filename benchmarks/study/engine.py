"""The study's rollout engines, which differ from the trainer on purpose by a known amount."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.study.design import POLICY_FILE, WINDOW
from benchmarks.study.task import LONG, CountOn, CountUp
from megatron_rc.attribution import fp8_per_tensor
from megatron_rc.launch.engines import Sample
from megatron_rc.launch.engines.registry import EngineInputs
from megatron_rc.launch.engines.transformers_engine import TransformersEngine
from megatron_rc.launch.weights.checkpoint_names import checkpoint_tensors
from megatron_rc.records.rollout import SamplingParams


class StudyEngine:
    """A ``transformers`` model that samples with a mismatch, and an exact copy of the trainer's model to measure.

    Its log-probs are of the distribution that it samples from. After every weight sync it appends the expected reward
    of the trainer's policy to ``policy.jsonl`` in the run's folder.

    Args:
        inputs: the run's inputs for an engine.
        levels: rounds weights of linear layers to this number of values on each side of 0, with one scale an output
            row; 0: exact weights.
        warming: relative growth of the sampling temperature with each optimizer step; the trainer does not know of it.
        dtype: number format that the sampler's weights are rounded to.
        fp8_by_tensor: rounds weights of linear layers to fp8 (e4m3) with one scale for each weight.
    """

    is_elsewhere = False

    def __init__(
        self,
        inputs: EngineInputs,
        levels: int = 0,
        warming: float = 0.0,
        dtype: str = "fp32",
        fp8_by_tensor: bool = False,
    ) -> None:
        launch = inputs.config.launch
        rest = (inputs.text.ends, inputs.text.pad, launch.device)
        self.exact = TransformersEngine(inputs.model, "fp32", *rest)
        self.sampler = TransformersEngine(inputs.model, dtype, *rest, reports_experts=inputs.config.replays_rollouts)
        self.warming = warming
        self._round = _rounding(levels, fp8_by_tensor)
        self._linear_weights = _linear_weights(self.sampler.model)
        self._is_long = inputs.config.task.task == CountOn.NAME
        self.policy_file = Path(launch.runs_dir) / launch.run_name / POLICY_FILE

    @property
    def version(self) -> int:
        """Version of the weights: the number of optimizer steps that made them."""
        return self.exact.version

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take all weights of the model; see :class:`RolloutEngine`."""
        self.exact.load_weights(weights, version)
        exact = checkpoint_tensors(self.exact.model).items()
        self.sampler.load_weights(((name, self._rounded(name, tensor)) for name, tensor in exact), version)
        if self._is_long and version % WINDOW:
            return
        quality = sampled_quality(self.exact) if self._is_long else expected_quality(self.exact.model)
        row = {"step": version, "reward": quality.reward, "right": quality.right}
        with self.policy_file.open("a" if version else "w", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int, seed: int
    ) -> list[Sample]:
        """Sample with the mismatch; see :class:`RolloutEngine`."""
        warmer = params.temperature * (1 + self.warming) ** self.version
        return self.sampler.sample(prompts, dataclasses.replace(params, temperature=warmer), max_new_tokens, seed)

    def _rounded(self, name: str, tensor: Tensor) -> Tensor:
        return self._round(tensor) if name in self._linear_weights else tensor


class ExactlyEvaluatedEngine:
    """A ``transformers`` model in ``--rollout-dtype``, with an exact copy of the trainer's model for evaluations.

    Evaluations are greedy, and no rollout batch is: this tells them apart.

    Args:
        inputs: the run's inputs for an engine.
    """

    is_elsewhere = False

    def __init__(self, inputs: EngineInputs) -> None:
        rest = (inputs.text.ends, inputs.text.pad, inputs.config.launch.device)
        self.exact = TransformersEngine(inputs.model, "fp32", *rest)
        self.sampler = TransformersEngine(inputs.model, inputs.config.engine.rollout_dtype, *rest)

    @property
    def version(self) -> int:
        """Version of the weights: the number of optimizer steps that made them."""
        return self.exact.version

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take all weights of the model; see :class:`RolloutEngine`."""
        self.exact.load_weights(weights, version)
        self.sampler.load_weights(checkpoint_tensors(self.exact.model).items(), version)

    def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int, seed: int
    ) -> list[Sample]:
        """Sample with the mismatch, or greedily without it; see :class:`RolloutEngine`."""
        model = self.exact if params.top_k == 1 else self.sampler
        return model.sample(prompts, params, max_new_tokens, seed)


def _rounding(levels: int, fp8_by_tensor: bool) -> Callable[[Tensor], Tensor]:
    """The rounding of a linear layer's weight."""
    if fp8_by_tensor:
        return fp8_per_tensor
    if levels:
        return partial(round_to_levels, levels=levels)
    return lambda weight: weight


def round_to_levels(weight: Tensor, levels: int) -> Tensor:
    """[out, in]: each row rounded to multiples of its largest absolute value divided by ``levels``."""
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / levels
    return (weight / scale).round() * scale


@dataclass(frozen=True)
class Quality:
    """How good a policy's answers at temperature 1 are, over a hundred problems.

    Attributes:
        reward: mean reward.
        right: share of the answers that are whole and right.
    """

    reward: float
    right: float


@torch.inference_mode()
def expected_quality(model: Any) -> Quality:
    """The quality of a policy over all hundred problems of count_up, computed instead of sampled.

    The reward is the share of the answer's places before the first mistake. So its expectation is the mean over the
    places of the probability that all places up to there are right: the mean of running products. The product of all
    places is the probability of a whole and right answer.

    Args:
        model: a model of transformers with the task's tokens.
    """
    task = CountUp(seed=0)
    problems = task.problems(0, 100, held_out=True)
    shown = torch.tensor([task.text.encode(problem) for problem in problems])
    answers = [torch.tensor([*task.text.tokens_of(problem.label), task.text.eos]) for problem in problems]
    # Padding stands after the ends of shorter answers, at which a causal model does not look.
    places = pad_sequence(answers, batch_first=True)
    is_place = pad_sequence([torch.ones(len(answer)) for answer in answers], batch_first=True)
    logits = model(input_ids=torch.cat([shown, places[:, :-1]], dim=1)).logits[:, shown.shape[1] - 1 :]
    right = logits.double().softmax(-1).gather(-1, places.unsqueeze(-1)).squeeze(-1)
    right_up_to = right.masked_fill(is_place == 0, 1.0).cumprod(1)
    rewards = (right_up_to * is_place).sum(1) / is_place.sum(1)
    return Quality(float(rewards.mean()), float(right_up_to[:, -1].mean()))


def sampled_quality(exact: TransformersEngine) -> Quality:
    """The quality of one response to each of the hundred problems of count_on."""
    task = CountOn(seed=0)
    problems = task.problems(0, 100, held_out=True)
    prompts = [task.text.encode(problem) for problem in problems]
    samples = exact.sample(prompts, SamplingParams(), LONG, seed=exact.version)
    rewards = []
    for problem, sample in zip(problems, samples, strict=True):
        answer = task.text.response_text(sample.token_ids)
        rewards.append(task.reward(prompt=problem.prompt, response=answer, label=None, record={}))
    return Quality(fmean(rewards), fmean(reward == 1 for reward in rewards))


def _linear_weights(model: Any) -> set[str]:
    """Names of the linear layers' weights, except the output layer's."""
    head = model.get_output_embeddings()
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return {f"{name}.weight" for name, module in layers if module is not head}
