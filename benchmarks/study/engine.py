"""The study's rollout engine, which differs from the trainer on purpose by a known amount."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.study.settings import POLICY_FILE, WINDOW
from benchmarks.study.task import LONG, CountOn, CountUp
from megatron_rc.launch.engines import Sample
from megatron_rc.launch.engines.registry import ENGINES, EngineInputs, EngineKind
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
    """

    is_elsewhere = False

    def __init__(self, inputs: EngineInputs, levels: int = 0, warming: float = 0.0, dtype: str = "fp32") -> None:
        launch = inputs.config.launch
        rest = (inputs.text.ends, inputs.text.pad, launch.device)
        self.exact = TransformersEngine(inputs.model, "fp32", *rest)
        self.sampler = TransformersEngine(inputs.model, dtype, *rest, reports_experts=inputs.config.replays_rollouts)
        self.levels = levels
        self.warming = warming
        self._rounded = _linear_weights(self.sampler.model) if levels else set()
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
        self.sampler.load_weights(((name, self._held(name, tensor)) for name, tensor in exact), version)
        if self._is_long and version % WINDOW:
            return
        reward = sampled_reward(self.exact) if self._is_long else expected_reward(self.exact.model)
        row = {"step": version, "reward": reward}
        with self.policy_file.open("a" if version else "w", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int, seed: int
    ) -> list[Sample]:
        """Sample with the mismatch; see :class:`RolloutEngine`."""
        warmer = params.temperature * (1 + self.warming) ** self.version
        return self.sampler.sample(prompts, dataclasses.replace(params, temperature=warmer), max_new_tokens, seed)

    def _held(self, name: str, tensor: Tensor) -> Tensor:
        return round_to_levels(tensor, self.levels) if name in self._rounded else tensor


def round_to_levels(weight: Tensor, levels: int) -> Tensor:
    """[out, in]: each row rounded to multiples of its largest absolute value divided by ``levels``."""
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / levels
    return (weight / scale).round() * scale


@torch.inference_mode()
def expected_reward(model: Any) -> float:
    """The mean reward of a policy at temperature 1 over all hundred problems of count_up, computed instead of sampled.

    The reward is the share of the answer's places before the first mistake. So its expectation is the mean over the
    places of the probability that all places up to there are right: the mean of running products.

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
    return float(((right.cumprod(1) * is_place).sum(1) / is_place.sum(1)).mean())


def sampled_reward(exact: TransformersEngine) -> float:
    """The mean reward of one response at temperature 1 to each of the hundred problems of count_on."""
    task = CountOn(seed=0)
    problems = task.problems(0, 100, held_out=True)
    samples = exact.sample([task.text.encode(one) for one in problems], SamplingParams(), LONG, seed=exact.version)
    answers = [task.text.response_text(sample.token_ids) for sample in samples]
    pairs = zip(problems, answers, strict=True)
    return fmean(task.reward(prompt=one.prompt, response=text, label=None, record={}) for one, text in pairs)


def _linear_weights(model: Any) -> set[str]:
    """Names of the linear layers' weights, except the output layer's."""
    head = model.get_output_embeddings()
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return {f"{name}.weight" for name, module in layers if module is not head}


def register(name: str, **mismatch: Any) -> None:
    """Make ``--rollout-engine NAME`` known to this process."""
    ENGINES[name] = EngineKind(partial(StudyEngine, **mismatch))
