"""A policy small enough to list all of its responses, so that every expectation is a finite sum in float64.

Responses have ``length`` tokens of ``VOCABULARY``; the logits of a token depend on all tokens before it. The engine's
conditional probabilities are multiples of 1/4, and the batch has each response in proportion to its probability. A
mean over its 4^length rows is exactly an expectation under the engine. Imports nothing of the library.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

VOCABULARY = 3
QUARTERS = ((2, 1, 1), (1, 2, 1), (1, 1, 2))  # the engine's probabilities of a token, in quarters


@dataclass(frozen=True)
class Enumerated:
    """All responses under the engine μ and the trainer π; [n, T] with n = 4^T rows, float64.

    Attributes:
        logits: [prefixes, 3], logits of the trainer's probabilities; a leaf with gradient.
        engine: [prefixes, 3], the engine's probabilities.
        tokens: [n, T], int64.
        first: [3^T], one row for each different response.
        train: log π of each token, in the graph of ``logits``.
        rollout: log μ of each token.
        rewards: [n], between -1 and 1.
    """

    logits: Tensor
    engine: Tensor
    tokens: Tensor
    first: Tensor
    train: Tensor
    rollout: Tensor
    rewards: Tensor

    @property
    def mask(self) -> Tensor:
        return torch.ones_like(self.tokens, dtype=torch.bool)

    @property
    def log_ratio(self) -> Tensor:
        """Log ρ of each token, detached."""
        return (self.train - self.rollout).detach()

    @property
    def ratio(self) -> Tensor:
        """[n], π/μ of the whole response."""
        return self.log_ratio.sum(1).exp()

    def gradient(self, loss: Tensor) -> Tensor:
        """The gradient of a number with respect to the logits."""
        (gradient,) = torch.autograd.grad(loss, self.logits, retain_graph=True)
        return gradient

    def wanted(self) -> Tensor:
        """The gradient of E_π[R], from the probabilities themselves."""
        probability = self.train.sum(1).exp()
        return self.gradient((probability * self.rewards)[self.first].sum())

    def distance(self) -> float:
        """TV of π and μ over whole responses: half of Σ|π - μ|."""
        return float((self.train.detach().sum(1).exp() - self.rollout.sum(1).exp())[self.first].abs().sum() / 2)


def enumerated(
    length: int = 3,
    *,
    distance: float = 1.0,
    seed: int = 0,
    by_prefix: bool = True,
    trainer: tuple[float, ...] | None = None,
) -> Enumerated:
    """The toy policies.

    Args:
        length: tokens of each response.
        distance: factor of log π - log μ before it is normalised; 0: equal policies.
        seed: seed of the trainer's logits and of the rewards.
        by_prefix: the probabilities depend on the tokens before; False: on nothing.
        trainer: the trainer's probabilities after every prefix, instead of random ones.
    """
    generator = torch.Generator().manual_seed(seed)
    index: dict[tuple[int, ...], int] = {}
    for size in range(length):
        for prefix in itertools.product(range(VOCABULARY), repeat=size):
            index[prefix] = len(index)
    engine = torch.tensor([QUARTERS[sum(prefix) % 3 if by_prefix else 0] for prefix in index], dtype=torch.float64) / 4
    # More rows than needed: the values depend on the number of rows that are drawn at once.
    noise = torch.randn(100, VOCABULARY, generator=generator, dtype=torch.float64)[: len(index)]
    logits = engine.log() + distance * (noise if by_prefix else noise[:1])
    if trainer is not None:
        logits = torch.tensor(trainer, dtype=torch.float64).log().repeat(len(index), 1)
    logits.requires_grad_()
    responses = list(itertools.product(range(VOCABULARY), repeat=length))
    copies = [round(4**length * _probability(response, engine, index)) for response in responses]
    different = torch.tensor(responses)
    prefixes = torch.tensor([[index[response[:t]] for t in range(length)] for response in responses])
    train = logits.log_softmax(1)[prefixes, different]
    rewards = torch.randn(len(responses), generator=generator, dtype=torch.float64).clamp(-1, 1)
    rows = torch.repeat_interleave(torch.tensor(copies))
    return Enumerated(
        logits,
        engine,
        different[rows],
        torch.tensor(copies).cumsum(0) - torch.tensor(copies),
        train[rows],
        engine.log()[prefixes, different][rows],
        rewards[rows],
    )


def _probability(response: tuple[int, ...], engine: Tensor, index: dict[tuple[int, ...], int]) -> float:
    return math.prod(float(engine[index[response[:t]], token]) for t, token in enumerate(response))


def reached(policy: Tensor) -> Tensor:
    """Return the probability of reaching each prefix, [prefixes], from those of the next tokens, [prefixes, 3]."""
    probabilities = [policy.new_ones(())]  # of the empty prefix
    # The prefixes one token longer than prefix i are 3i + 1, 3i + 2 and 3i + 3.
    for prefix in range(len(policy) // 3):
        probabilities.extend(probabilities[prefix] * policy[prefix])
    return torch.stack(probabilities)


def divergences(toy: Enumerated, reference: Enumerated) -> dict[str, Tensor]:
    """Distances of the next token's distributions after each prefix, in the graph of the logits.

    KL(π_θ ‖ π_ref), KL(π_ref ‖ π_θ) and Σ|π_θ - π_ref|.
    """
    log_policy = toy.logits.log_softmax(1)
    log_ref = reference.logits.detach().log_softmax(1)
    return {
        "forward": (log_policy.exp() * (log_policy - log_ref)).sum(1),
        "reverse": (log_ref.exp() * (log_ref - log_policy)).sum(1),
        "distance": (log_policy.exp() - log_ref.exp()).abs().sum(1),
    }
