"""Policy objectives: one object each, with the loss of a token and its use of weights and clipping.

To add one, define it at the end. Everything else asks the object: the flags and their errors, the config, the loss, the
metrics and the words.

``docs/design.md`` begins with the words and symbols that are used here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.numerics import EXP_LIMIT
from megatron_rc.parallel.arguments import one_of


@dataclass(frozen=True)
class TokenTerms:
    """The terms of an objective, per token; all are 0 at masked positions.

    Attributes:
        log_probs: log π_θ, differentiated.
        log_ratio: log π_θ - log π_old, differentiated; of objectives ``by_sequence`` the mean over the token's
            sequence, with the gradient of the token's own.
        advantages: A.
        clip_low: the ratio is clipped below 1 - this.
        clip_high: the ratio is clipped above 1 + this.
        dual_clip: c, or None.
    """

    log_probs: Tensor
    log_ratio: Tensor
    advantages: Tensor
    clip_low: float
    clip_high: float
    dual_clip: float | None

    def ratios(self) -> tuple[Tensor, Tensor]:
        """(r, clip(r)); the argument of exp is clamped, with no gradient outside."""
        ratio = self.log_ratio.clamp(-EXP_LIMIT, EXP_LIMIT).exp()
        return ratio, ratio.clamp(1 - self.clip_low, 1 + self.clip_high)


@dataclass(frozen=True)
class TokenLoss:
    """The loss per token, and bool: which tokens were clipped below, above and by dual clip; None: no token."""

    loss: Tensor
    low: Tensor | None = None
    high: Tensor | None = None
    dual: Tensor | None = None


@dataclass(frozen=True)
class Objective:
    """One policy objective.

    Attributes:
        name: as the user writes it.
        words: its use of ρ in bypass mode, in which its ratio is ρ: "PPO clips ρ itself".
        loss: the loss of every token.
        weighed_in_bypass: in bypass mode the importance weights multiply it. False if its ratio π_θ/π_rollout is the
            correction already.
        by_sequence: its log ratio is the mean over the sequence.
        clips: it clips the ratio, and says which tokens.
        takes_dual_clip: it has a cap for negative advantages.

    Raises:
        ValueError: at definition: something is missing, or does not fit together.
    """

    name: str
    words: str
    loss: Callable[[TokenTerms], TokenLoss]
    weighed_in_bypass: bool
    by_sequence: bool
    clips: bool
    takes_dual_clip: bool

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise ValueError(f"objective {self.name!r}: {problem}")


OBJECTIVES: dict[str, Objective] = {}


def define(*objectives: Objective) -> None:
    """Make objectives known by their names; ValueError for a name that is known already."""
    for objective in objectives:
        if objective.name in OBJECTIVES:
            raise ValueError(f"objective {objective.name!r} is defined already: give it another name")
        OBJECTIVES[objective.name] = objective


def objective_of(name: str) -> Objective:
    """The objective of this name; ValueError for an unknown one."""
    one_of("algorithm", name, OBJECTIVES)
    return OBJECTIVES[name]


def _problems(objective: Objective) -> list[str]:
    """The problems of a definition, found by a run on three tokens."""
    if not objective.name.replace("_", "").isalnum() or objective.name != objective.name.lower():
        return ["the name must be letters, digits and underscores, in lower case"]
    if not objective.words or not callable(objective.loss):
        return ["words and loss must be given"]
    names = ("weighed_in_bypass", "by_sequence", "clips", "takes_dual_clip")
    if any(not isinstance(getattr(objective, name), bool) for name in names):
        return [f"{', '.join(names)} must be True or False"]
    log_probs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 0.5])
    found = objective.loss(TokenTerms(log_probs, log_probs + 1.5, advantages, 0.2, 0.2, 2.0))
    if not isinstance(found, TokenLoss) or found.loss.shape != (3,) or not found.loss.requires_grad:
        return ["loss must give a TokenLoss with one differentiable number a token"]
    for has, given, flags in (
        (objective.clips, "clips", (found.low, found.high)),
        (objective.takes_dual_clip, "takes_dual_clip", (found.dual,)),
    ):
        if any((flag is not None) != has for flag in flags):
            return [f"{given}={has} does not agree with the clipped tokens of loss"]
        if any(flag is not None and (flag.dtype != torch.bool or flag.shape != (3,)) for flag in flags):
            return ["the clipped tokens of loss must be bool, one a token"]
    (gradient,) = torch.autograd.grad(found.loss.sum(), log_probs)
    return [] if found.loss.isfinite().all() and gradient.isfinite().all() else ["loss and gradient must be finite"]


def _ppo_clip(terms: TokenTerms) -> TokenLoss:
    ratio, clipped = terms.ratios()
    free_loss, clipped_loss = -terms.advantages * ratio, -terms.advantages * clipped
    loss = torch.maximum(free_loss, clipped_loss)
    is_clipped = clipped_loss > free_loss
    dual = torch.zeros_like(is_clipped)
    if terms.dual_clip is not None:
        negative, cap = terms.advantages < 0, -terms.advantages * terms.dual_clip
        dual = negative & (loss > cap)
        loss = torch.where(negative, torch.minimum(loss, cap), loss)
    return TokenLoss(loss, is_clipped & (ratio < clipped), is_clipped & (ratio > clipped), dual)


def _cispo(terms: TokenTerms) -> TokenLoss:
    ratio, clipped = terms.ratios()
    loss = -terms.advantages * clipped.detach() * terms.log_probs
    return TokenLoss(loss, ratio < clipped, ratio > clipped)


def _reinforce(terms: TokenTerms) -> TokenLoss:
    return TokenLoss(-terms.advantages * terms.log_probs)


# Name, words, loss; weighed_in_bypass, by_sequence, clips, takes_dual_clip.
define(
    Objective("ppo_clip", "PPO clips ρ itself", _ppo_clip, False, False, True, True),
    Objective("reinforce", "REINFORCE, without clipping", _reinforce, True, False, False, False),
    Objective("gspo", "GSPO clips the geometric mean of a sequence's ρ", _ppo_clip, False, True, True, True),
    Objective("cispo", "CISPO weighs each token by its clipped ρ", _cispo, False, False, True, False),
)
