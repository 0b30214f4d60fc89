"""The policy objectives: the loss of every token, and what the rest of the library must know about it.

An :class:`Objective` is one entry of the table :data:`OBJECTIVES`. Flags and their errors, the settings, the masked
loss, the metrics and the descriptions are read from its fields. To add an objective, define it at the end of this
module, or name one of a module of yours by ``--policy-loss python:pkg.module:OBJECT``.

``docs/design.md`` begins with the words and symbols that all modules use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.numerics import EXP_LIMIT, two_point_kl
from megatron_rc.parallel.arguments import one_of
from megatron_rc.parallel.layout import SequenceLayout
from megatron_rc.parallel.whole import WholeSequences

DPPO_LIMIT = 20.0  # the ratio in front of DPPO's gradient is at most this, unless dual_clip is another number
SAPO_TEMPERATURES = (1.0, 1.05)  # of SAPO's gate, for A > 0 and for other A
CPPO_LEAST_WEIGHT = 0.8  # the weight of a response's last token in CPPO; the first token has 1
CPPO_QUANTILE = 0.9  # this quantile of a response's distances is CPPO's budget of a token,
CPPO_BUDGETS = (0.02, 0.04)  # clamped to these bounds


@dataclass(frozen=True)
class TokenTerms:
    """The inputs of an objective, one number for each token; all tensors are 0 at masked positions.

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
        divergence: the divergence from a teacher, differentiated; None unless the objective declares
            ``uses_divergence``.
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
    divergence: Tensor | None = None

    @property
    def from_teacher(self) -> Tensor:
        """The divergence from a teacher; ValueError unless the objective declares ``uses_divergence``."""
        if self.divergence is None:
            raise ValueError("the loss uses terms.from_teacher: define the objective with uses_divergence=True")
        return self.divergence

    @property
    def sequences(self) -> WholeSequences:
        """The tokens' whole sequences; ValueError unless the objective declares ``whole_sequences``."""
        if self.whole is None:
            raise ValueError("the loss uses terms.sequences: define the objective with whole_sequences=True")
        return self.whole

    def ratio(self) -> Tensor:
        """The ratio r = π_θ/π_old; the argument of exp is clamped to ±20, with no gradient outside."""
        return self.log_ratio.clamp(-EXP_LIMIT, EXP_LIMIT).exp()

    def ratios(self) -> tuple[Tensor, Tensor]:
        """The ratio r as :meth:`ratio` gives it, and r clipped to [1 - clip_low, 1 + clip_high]."""
        ratio = self.ratio()
        return ratio, ratio.clamp(1 - self.clip_low, 1 + self.clip_high)


@dataclass(frozen=True)
class TokenLoss:
    """The result of an objective: the loss of each token, and which tokens its bounds have changed.

    Attributes:
        loss: like the log-probs, in their graph.
        low: bool, tokens that a lower bound clips; None: the objective has no bounds.
        high: bool, tokens that an upper bound clips; None: the objective has no bounds.
        dual: bool, tokens that dual clip caps; None: the objective has no such cap.
    """

    loss: Tensor
    low: Tensor | None = None
    high: Tensor | None = None
    dual: Tensor | None = None


@dataclass(frozen=True)
class Objective:
    """A policy objective: the loss of a token, and what flags, settings and metrics must know about it.

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
        uses_divergence: its loss uses ``terms.from_teacher``, so that it needs the divergence of every token.

    Raises:
        ValueError: at definition: something is missing, or does not fit together.
    """

    name: str
    words: str
    loss: Callable[[TokenTerms], TokenLoss]
    weighed_in_bypass: bool
    by_sequence: bool = False
    clips: bool = False
    takes_dual_clip: bool = False
    default_dual_clip: float | None = None
    takes_temperatures: bool = False
    whole_sequences: bool = False
    uses_divergence: bool = False

    def __post_init__(self) -> None:
        problem = _problem_of_fields(self) or _problem_of_loss(self)
        if problem is not None:
            raise ValueError(f"objective {self.name!r}: {problem}")


_SWITCHES = (
    "weighed_in_bypass",
    "by_sequence",
    "clips",
    "takes_dual_clip",
    "takes_temperatures",
    "whole_sequences",
    "uses_divergence",
)


def _problem_of_fields(objective: Objective) -> str | None:
    """Return what is wrong with the name, the words or a switch of a definition, or None."""
    if not objective.name.replace("_", "").isalnum() or objective.name != objective.name.lower():
        return "the name must be letters, digits and underscores, in lower case"
    if not objective.words or not callable(objective.loss):
        return "words and loss must be given"
    if any(not isinstance(getattr(objective, switch), bool) for switch in _SWITCHES):
        return f"{', '.join(_SWITCHES)} must be True or False"
    return None


def _problem_of_loss(objective: Objective) -> str | None:
    """Return what is wrong with the loss of a definition, or None; the loss is tried on three tokens."""
    terms = _three_tokens(whole_sequences=objective.whole_sequences, uses_divergence=objective.uses_divergence)
    result = objective.loss(terms)
    if not isinstance(result, TokenLoss) or result.loss.shape != (3,) or not result.loss.requires_grad:
        return "loss must give a TokenLoss with one differentiable number a token"

    # The switches promise the clipped tokens, which the metrics count.
    if (result.low is not None) != objective.clips or (result.high is not None) != objective.clips:
        return f"clips={objective.clips} does not agree with the clipped tokens of loss"
    if (result.dual is not None) != objective.takes_dual_clip:
        return f"takes_dual_clip={objective.takes_dual_clip} does not agree with the clipped tokens of loss"
    for clipped in (result.low, result.high, result.dual):
        if clipped is not None and (clipped.dtype != torch.bool or clipped.shape != (3,)):
            return "the clipped tokens of loss must be bool, one a token"

    (gradient,) = torch.autograd.grad(result.loss.sum(), terms.log_probs)
    if not result.loss.isfinite().all() or not gradient.isfinite().all():
        return "loss and gradient must be finite"
    return None


def _three_tokens(*, whole_sequences: bool, uses_divergence: bool) -> TokenTerms:
    """Terms on which a new objective is tried: one sequence of three tokens, with advantages of both signs.

    The divergence of a token stands for that from a teacher, and has a gradient at the log-probs.
    """
    log_probs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    old_log_probs = torch.tensor([-2.5, -3.5, -4.5])
    whole = None
    if whole_sequences:
        mask = torch.ones(3, dtype=torch.bool)
        whole = WholeSequences(mask, SequenceLayout.packed([0, 3]), cp=None)
    return TokenTerms(
        log_probs=log_probs,
        old_log_probs=old_log_probs,
        log_ratio=log_probs - old_log_probs,
        advantages=torch.tensor([1.0, -1.0, 0.5]),
        whole=whole,
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=2.0,
        tau_pos=1.0,
        tau_neg=1.0,
        divergence=-log_probs if uses_divergence else None,
    )


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


# The losses. Formulas and papers are in the docstring of ``megatron_rc.loss.policy.policy_loss``.


def _ppo_clip(terms: TokenTerms) -> TokenLoss:
    """max(-A r, -A clip(r)); with dual clip c at most -A c where A < 0. GSPO too: its r is the sequence's."""
    ratio, clipped_ratio = terms.ratios()
    free_loss = -terms.advantages * ratio
    clipped_loss = -terms.advantages * clipped_ratio
    loss = torch.maximum(free_loss, clipped_loss)
    is_clipped = clipped_loss > free_loss
    is_capped = torch.zeros_like(is_clipped)

    if terms.dual_clip is not None:
        is_negative = terms.advantages < 0
        cap = -terms.advantages * terms.dual_clip
        is_capped = is_negative & (loss > cap)
        loss = torch.where(is_negative, torch.minimum(loss, cap), loss)

    return TokenLoss(
        loss,
        low=is_clipped & (ratio < clipped_ratio),
        high=is_clipped & (ratio > clipped_ratio),
        dual=is_capped,
    )


def _cispo(terms: TokenTerms) -> TokenLoss:
    """-A clip(r) log π_θ, with no gradient through the clipped ratio: every token keeps a gradient."""
    ratio, clipped_ratio = terms.ratios()
    loss = -terms.advantages * clipped_ratio.detach() * terms.log_probs
    return TokenLoss(loss, low=ratio < clipped_ratio, high=ratio > clipped_ratio)


def _reinforce(terms: TokenTerms) -> TokenLoss:
    """-A log π_θ, without a ratio and without bounds."""
    return TokenLoss(-terms.advantages * terms.log_probs)


def _dppo_tv(terms: TokenTerms) -> TokenLoss:
    """DPPO with bounds on how far the token's probability has risen or fallen, π_θ - π_old."""
    rise = terms.log_probs.detach().exp() - terms.old_log_probs.exp()
    return _dppo(terms, too_low=rise < -terms.clip_low, too_high=rise > terms.clip_high)


def _dppo_kl(terms: TokenTerms) -> TokenLoss:
    """DPPO with bounds on the KL of two events, this token and any other, on the side to which the token has moved."""
    new = terms.log_probs.detach()
    old = terms.old_log_probs
    distance = two_point_kl(old, new)
    too_low = (distance > terms.clip_low) & (new < old)
    too_high = (distance > terms.clip_high) & (new > old)
    return _dppo(terms, too_low=too_low, too_high=too_high)


def _dppo(terms: TokenTerms, *, too_low: Tensor, too_high: Tensor) -> TokenLoss:
    """-A min(r, c) log π_θ, with no gradient through the ratio; 0 for tokens that would move further out.

    Args:
        terms: the inputs; c is ``dual_clip``.
        too_low: bool, tokens whose probability has fallen too far: left out if the advantage lowers it further.
        too_high: bool, tokens whose probability has risen too far: left out if the advantage raises it further.
    """
    raises = terms.advantages > 0
    low = too_low & ~raises
    high = too_high & raises
    is_left_out = low | high

    ratio = terms.ratio().detach()
    limit = torch.inf if terms.dual_clip is None else terms.dual_clip
    loss = -terms.advantages * ratio.clamp(max=limit) * terms.log_probs
    is_capped = (ratio > limit) & ~is_left_out
    return TokenLoss(torch.where(is_left_out, 0, loss), low=low, high=high, dual=is_capped)


def _cppo(terms: TokenTerms) -> TokenLoss:
    """-A r, and 0 for tokens that would move further out and exceed their response's budget of distance."""
    new = terms.log_probs.detach().double()
    old = terms.old_log_probs.double()
    # The budget of a token depends on all tokens before it, so whole responses are needed: [n, s].
    distances, mask = terms.sequences.rows((new.exp() - old.exp()).abs())
    needed_bound = terms.sequences.cut(_least_cppo_bound(distances, mask))

    low = (terms.advantages < 0) & (new < old) & (needed_bound > terms.clip_low)
    high = (terms.advantages > 0) & (new > old) & (needed_bound > terms.clip_high)
    loss = -terms.advantages * terms.ratio()
    return TokenLoss(torch.where(low | high, 0, loss), low=low, high=high)


def _least_cppo_bound(distances: Tensor, mask: Tensor) -> Tensor:
    """The smallest bound δ under which CPPO still trains each token.

    CPPO trains a token if Z_t ≤ min(δ, δ + δ_b Σ_{j<t} w_j - Σ_{j<t} Z_j), with Z_t = w_t |π_θ - π_old|. Solved for δ
    this is Z_t - min(0, δ_b Σ_{j<t} w_j - Σ_{j<t} Z_j) ≤ δ.

    Args:
        distances: [n, s] float64, |π_θ - π_old| of whole responses; 0 outside the mask.
        mask: [n, s] bool, tokens that count.

    Returns:
        [n, s] float64.
    """
    num_tokens = mask.double().sum(1, keepdim=True)
    index_of_token = mask.double().cumsum(1) - 1  # 0 for the first token that counts
    # w_t falls evenly from 1 for the first token to CPPO_LEAST_WEIGHT for the last.
    token_weights = 1 - (1 - CPPO_LEAST_WEIGHT) * index_of_token / (num_tokens - 1).clamp(min=1)
    token_weights = torch.where(mask, token_weights, 0.0)
    weighted = token_weights * distances

    # δ_b: a quantile of the response's distances, linear between its two neighbours. torch.quantile takes no mask.
    ranked = distances.masked_fill(~mask, torch.inf).sort(1).values
    rank = CPPO_QUANTILE * (num_tokens - 1).clamp(min=0)
    below = ranked.gather(1, rank.floor().long())
    above = ranked.gather(1, rank.ceil().long())
    budget = torch.lerp(below, above, rank - rank.floor()).clamp(*CPPO_BUDGETS)

    weights_before = token_weights.cumsum(1) - token_weights
    spent_before = weighted.cumsum(1) - weighted
    budget_left = budget * weights_before - spent_before
    return weighted - budget_left.clamp(max=0)


def _sapo(terms: TokenTerms) -> TokenLoss:
    """-A (4/τ) sigmoid(τ (r - 1)): the gradient falls off smoothly on both sides of r = 1, faster for a larger τ."""
    default_pos, default_neg = SAPO_TEMPERATURES
    tau_pos = default_pos if terms.tau_pos is None else terms.tau_pos
    tau_neg = default_neg if terms.tau_neg is None else terms.tau_neg

    ratio = terms.ratio()
    tau = torch.full_like(ratio, tau_neg).masked_fill(terms.advantages > 0, tau_pos)
    return TokenLoss(-terms.advantages * 4 / tau * torch.sigmoid(tau * (ratio - 1)))


def _gmpo(terms: TokenTerms) -> TokenLoss:
    """-A exp(mean of log r over the sequence), each log r clipped on the side to which A pushes it."""
    log_ratio = terms.log_ratio
    # An advantage of exactly 0 pushes to neither side, so nothing is clipped there.
    low = (terms.advantages < 0) & (log_ratio < -terms.clip_low)
    high = (terms.advantages > 0) & (log_ratio > terms.clip_high)
    clipped = torch.where(low, log_ratio.clamp(min=-terms.clip_low), log_ratio)
    clipped = torch.where(high, log_ratio.clamp(max=terms.clip_high), clipped)

    # The value of the sequence's mean, with the gradient of the token's own clipped log r.
    mean = terms.sequences.mean(clipped) + (clipped - clipped.detach())
    return TokenLoss(-terms.advantages * mean.clamp(-EXP_LIMIT, EXP_LIMIT).exp(), low=low, high=high)


def _distill(terms: TokenTerms) -> TokenLoss:
    """The divergence from the teacher, without the log-prob of the token, its advantage and bounds."""
    return TokenLoss(terms.from_teacher)


define(
    Objective(
        name="ppo_clip",
        words="PPO clips ρ itself",
        loss=_ppo_clip,
        weighed_in_bypass=False,
        clips=True,
        takes_dual_clip=True,
    ),
    Objective(
        name="reinforce",
        words="REINFORCE, without clipping",
        loss=_reinforce,
        weighed_in_bypass=True,
    ),
    Objective(
        name="gspo",
        words="GSPO clips the geometric mean of a sequence's ρ",
        loss=_ppo_clip,
        weighed_in_bypass=False,
        by_sequence=True,
        clips=True,
        takes_dual_clip=True,
    ),
    Objective(
        name="cispo",
        words="CISPO weighs each token by its clipped ρ",
        loss=_cispo,
        weighed_in_bypass=False,
        clips=True,
    ),
    Objective(
        name="dppo_tv",
        words="DPPO bounds π_θ - π_rollout of each token",
        loss=_dppo_tv,
        weighed_in_bypass=False,
        clips=True,
        takes_dual_clip=True,
        default_dual_clip=DPPO_LIMIT,
    ),
    Objective(
        name="dppo_kl",
        words="DPPO bounds the KL of each token's two events",
        loss=_dppo_kl,
        weighed_in_bypass=False,
        clips=True,
        takes_dual_clip=True,
        default_dual_clip=DPPO_LIMIT,
    ),
    Objective(
        name="cppo",
        words="CPPO bounds |π_θ - π_rollout| of each token and of the tokens before",
        loss=_cppo,
        weighed_in_bypass=False,
        clips=True,
        whole_sequences=True,
    ),
    Objective(
        name="sapo",
        words="SAPO dampens ρ by a sigmoid",
        loss=_sapo,
        weighed_in_bypass=False,
        takes_temperatures=True,
    ),
    Objective(
        name="gmpo",
        words="GMPO clips each token's log ρ and takes a sequence's geometric mean",
        loss=_gmpo,
        weighed_in_bypass=False,
        clips=True,
        whole_sequences=True,
    ),
    Objective(
        name="distill",
        words="distillation: the divergence of each token's distribution from the teacher's",
        loss=_distill,
        weighed_in_bypass=True,
        uses_divergence=True,
    ),
)
