"""The critic's update in float64 on one process, in loops. Imports nothing of the library.

The model is ``training_oracle.py``'s with one row, ``output_layer.weight``, instead of the output layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tests.support import training_oracle
from tests.support.correction_oracle import deviation, mean
from tests.support.training_oracle import HIDDEN, Weights

HEAD = "output_layer.weight"


def make_weights(seed: int, experts: int = 0) -> Weights:
    """Float32 weights under Megatron's names; values are about 1 in size."""
    generator = torch.Generator().manual_seed(seed)
    body = training_oracle.make_weights(seed, experts=experts)
    return body | {HEAD: torch.randn(1, HIDDEN, generator=generator) * 0.2}


def values(weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    """[n, s]: the value after each token."""
    return (training_oracle.last_hidden(weights, tokens) @ weights[HEAD].T).squeeze(-1)


@dataclass(frozen=True)
class Objective:
    """The critic's loss: its clip, aggregation and denominator, and the correction that it uses."""

    clip: float | None = None
    aggregation: str = "token-mean"
    scale: float = 1.0
    correct: str = "mask"
    denominator: str = "accepted"


@dataclass
class Expected:
    """Results by mini-batch: loss, Σ|terms|/G, metrics, gradients."""

    loss: list[float] = field(default_factory=list)
    size: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    gradients: list[Weights] = field(default_factory=list)


def update(
    objective: Objective,
    tokens: torch.Tensor,
    response: torch.Tensor,
    accepted: torch.Tensor,
    weighed: torch.Tensor | None,
    returns: torch.Tensor,
    mini_batch_ids: list[int],
    old: Weights,
    new: Weights,
) -> Expected:
    """Losses and gradients of every mini-batch at the weights ``new``; ``old`` gives the old values."""
    parameters = {name: weight.double().requires_grad_() for name, weight in new.items()}
    now = values(parameters, tokens)
    with torch.no_grad():
        before = values({name: weight.double() for name, weight in old.items()}, tokens)
    mask = response if objective.correct == "none" else accepted
    divides = mask if objective.denominator == "accepted" else response
    expected = Expected()
    for index in range(max(mini_batch_ids) + 1):
        rows = [row for row, mini in enumerate(mini_batch_ids) if mini == index]
        total = torch.zeros((), dtype=torch.float64)
        size = 0.0
        clipped = []
        errors = []
        targets = []
        predicted = []
        for row in rows:
            length = int(divides[row].sum())
            for t in mask[row].nonzero().flatten().tolist():
                loss, is_clipped = token_loss(objective, now[row, t], before[row, t], returns[row, t])
                if objective.correct == "weights" and weighed is not None:
                    loss = loss * weighed[row, t]
                if objective.aggregation == "seq-mean-token-mean":
                    loss = loss / length
                total = total + loss
                size = size + abs(loss.item())
                clipped.append(float(is_clipped))
                errors.append(float(returns[row, t] - now[row, t].detach()))
                targets.append(float(returns[row, t]))
                predicted.append(float(now[row, t].detach()))
        counted = [int(divides[row].sum()) for row in rows]
        sequences = sum(length > 0 for length in counted)
        divisor = training_oracle.divides(objective.aggregation, sum(counted), sequences, objective.scale)
        loss = total / divisor
        expected.loss.append(loss.item())
        expected.size.append(size / divisor)
        expected.metrics.append(
            {
                "critic/value_mean": mean(predicted),
                "critic/return_mean": mean(targets),
                "critic/explained_variance": 1 - (deviation(errors) / deviation(targets)) ** 2,
            }
            | ({"critic/clip_fraction": mean(clipped)} if objective.clip else {})
        )
        gradients = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)
        expected.gradients.append(dict(zip(parameters, gradients, strict=True)))
    return expected


def token_loss(
    objective: Objective, value: torch.Tensor, before: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, bool]:
    """Half the squared error, and whether it is the clipped value's."""
    free = (value - target) ** 2
    if objective.clip is None:
        return free / 2, False
    low = before - objective.clip
    high = before + objective.clip
    clipped = low if value.item() < low.item() else high if value.item() > high.item() else value
    bounded = (clipped - target) ** 2
    return (bounded / 2, True) if bounded.item() > free.item() else (free / 2, False)
