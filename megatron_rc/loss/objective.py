"""The form of a policy objective: the terms that its loss gets, the loss of a token, and its properties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.numerics import EXP_LIMIT
from megatron_rc.parallel.layout import SequenceLayout
from megatron_rc.parallel.whole import WholeSequences


@dataclass(frozen=True)
class TokenTerms:
    """The terms of an objective, per token; all are 0 at masked positions.

    Attributes:
        log_probs: log π_θ, differentiated.
        old_log_probs: log π_old.
        log_ratio: log π_θ - log π_old, differentiated; of objectives ``by_sequence`` the mean over the token's
            sequence, with the gradient of the token's own.
        advantages: A.
        whole: the tokens' whole sequences; None unless the objective declares ``whole_sequences``.
        clip_low: the ratio is clipped below 1 - this.
        clip_high: the ratio is clipped above 1 + this.
        dual_clip: c, or None.
        tau_pos: temperature for A > 0, or None.
        tau_neg: temperature for other A, or None.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    log_ratio: Tensor
    advantages: Tensor
    whole: WholeSequences | None
    clip_low: float
    clip_high: float
    dual_clip: float | None
    tau_pos: float | None
    tau_neg: float | None

    @property
    def sequences(self) -> WholeSequences:
        """The tokens' whole sequences; ValueError unless the objective declares ``whole_sequences``."""
        if self.whole is None:
            raise ValueError("the loss uses terms.sequences: define the objective with whole_sequences=True")
        return self.whole

    def ratio(self) -> Tensor:
        """The ratio r; the argument of exp is clamped, with no gradient outside."""
        return self.log_ratio.clamp(-EXP_LIMIT, EXP_LIMIT).exp()

    def ratios(self) -> tuple[Tensor, Tensor]:
        """(r, clip(r)), both as :meth:`ratio` makes r."""
        ratio = self.ratio()
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
        clips: it has bounds, ``clip_low`` and ``clip_high``, and says which tokens lie outside.
        takes_dual_clip: it has a cap, ``dual_clip``.
        default_dual_clip: the cap unless the user gives one; None: no cap.
        takes_temperatures: it has ``tau_pos`` and ``tau_neg``.
        whole_sequences: its loss uses ``terms.sequences``, so that it needs the CP group and the layout.

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
    default_dual_clip: float | None = None
    takes_temperatures: bool = False
    whole_sequences: bool = False

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise ValueError(f"objective {self.name!r}: {problem}")


_FLAGS = ("weighed_in_bypass", "by_sequence", "clips", "takes_dual_clip", "takes_temperatures", "whole_sequences")


def _problems(objective: Objective) -> list[str]:
    """The problems of a definition, found by a run on three tokens."""
    if not objective.name.replace("_", "").isalnum() or objective.name != objective.name.lower():
        return ["the name must be letters, digits and underscores, in lower case"]
    if not objective.words or not callable(objective.loss):
        return ["words and loss must be given"]
    if any(not isinstance(getattr(objective, name), bool) for name in _FLAGS):
        return [f"{', '.join(_FLAGS)} must be True or False"]
    terms = _three_tokens(objective.whole_sequences)
    found = objective.loss(terms)
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
    (gradient,) = torch.autograd.grad(found.loss.sum(), terms.log_probs)
    return [] if found.loss.isfinite().all() and gradient.isfinite().all() else ["loss and gradient must be finite"]


def _three_tokens(whole_sequences: bool) -> TokenTerms:
    """Terms with which an objective is tried: three tokens of one sequence."""
    log_probs, advantages = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True), torch.tensor([1.0, -1.0, 0.5])
    old = torch.tensor([-2.5, -3.5, -4.5])
    whole = WholeSequences(advantages != 0, SequenceLayout.packed([0, 3]), cp=None) if whole_sequences else None
    return TokenTerms(log_probs, old, log_probs - old, advantages, whole, 0.2, 0.2, 2.0, 1.0, 1.0)
