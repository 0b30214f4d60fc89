"""The policy objectives: one object each, with the loss of a token and its use of weights and bounds.

To add one, define it at the end. Everything else asks the object: the flags and their errors, the config, the loss, the
metrics and the words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rc.loss.objective import Objective, TokenLoss, TokenTerms
from megatron_rc.numerics import EXP_LIMIT, two_point_kl
from megatron_rc.parallel.arguments import one_of

__all__ = ["OBJECTIVES", "Objective", "TokenLoss", "TokenTerms", "define", "objective_of"]

DPPO_LIMIT = 20.0  # the ratio in front of DPPO's gradient is at most this, unless dual_clip is another number
SAPO_TEMPERATURES = (1.0, 1.05)  # of SAPO's gate, for A > 0 and for other A
CPPO_LEAST_WEIGHT = 0.8  # the weight of a response's last token in CPPO; the first token has 1
CPPO_QUANTILE = 0.9  # this quantile of a response's distances is CPPO's budget of a token,
CPPO_BUDGETS = (0.02, 0.04)  # clamped to these bounds

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


def _dppo_tv(terms: TokenTerms) -> TokenLoss:
    rise = terms.log_probs.detach().exp() - terms.old_log_probs.exp()
    return _dppo(terms, rise < -terms.clip_low, rise > terms.clip_high)


def _dppo_kl(terms: TokenTerms) -> TokenLoss:
    new, old = terms.log_probs.detach(), terms.old_log_probs
    distance = two_point_kl(old, new)
    return _dppo(terms, (distance > terms.clip_low) & (new < old), (distance > terms.clip_high) & (new > old))


def _dppo(terms: TokenTerms, low: Tensor, high: Tensor) -> TokenLoss:
    """The loss without tokens that lie too far ``low`` or ``high`` and would go further."""
    rises = terms.advantages > 0
    low, high = low & ~rises, high & rises
    ratio, limit = terms.ratio().detach(), torch.inf if terms.dual_clip is None else terms.dual_clip
    loss = -terms.advantages * ratio.clamp(max=limit) * terms.log_probs
    is_left_out = low | high
    return TokenLoss(torch.where(is_left_out, 0, loss), low, high, (ratio > limit) & ~is_left_out)


def _cppo(terms: TokenTerms) -> TokenLoss:
    new, old = terms.log_probs.detach().double(), terms.old_log_probs.double()
    distances, mask = terms.sequences.rows((new.exp() - old.exp()).abs())
    excess = terms.sequences.cut(_over_budget(distances, mask))
    low = (terms.advantages < 0) & (new < old) & (excess > terms.clip_low)
    high = (terms.advantages > 0) & (new > old) & (excess > terms.clip_high)
    return TokenLoss(torch.where(low | high, 0, -terms.advantages * terms.ratio()), low, high)


def _over_budget(distances: Tensor, mask: Tensor) -> Tensor:
    """Z_t - min(0, δ_b Σ_{j<t} w_j - Σ_{j<t} Z_j) of whole responses, all [n, s]; CPPO bounds it by δ."""
    length, place = mask.double().sum(1, keepdim=True), mask.double().cumsum(1) - 1
    weights = torch.where(mask, 1 - (1 - CPPO_LEAST_WEIGHT) * place / (length - 1).clamp(min=1), 0.0)
    weighted = weights * distances
    # Between the two neighbours of the quantile's place, as torch.quantile, which takes no mask.
    ranked, rank = distances.masked_fill(~mask, torch.inf).sort(1).values, CPPO_QUANTILE * (length - 1).clamp(min=0)
    below, above = (ranked.gather(1, side.long()) for side in (rank.floor(), rank.ceil()))
    budget = torch.lerp(below, above, rank - rank.floor()).clamp(*CPPO_BUDGETS)
    left = budget * (weights.cumsum(1) - weights) - (weighted.cumsum(1) - weighted)
    return weighted - left.clamp(max=0)


def _sapo(terms: TokenTerms) -> TokenLoss:
    given = (terms.tau_pos, terms.tau_neg)
    positive, other = (one if tau is None else tau for tau, one in zip(given, SAPO_TEMPERATURES, strict=True))
    ratio = terms.ratio()
    tau = torch.full_like(ratio, other).masked_fill(terms.advantages > 0, positive)
    return TokenLoss(-terms.advantages * 4 / tau * torch.sigmoid(tau * (ratio - 1)))


def _gmpo(terms: TokenTerms) -> TokenLoss:
    log_ratio = terms.log_ratio
    # An advantage of exactly 0 pushes to neither side, so nothing is clipped there.
    low = (terms.advantages < 0) & (log_ratio < -terms.clip_low)
    high = (terms.advantages > 0) & (log_ratio > terms.clip_high)
    bounded = torch.where(low, log_ratio.clamp(min=-terms.clip_low), log_ratio)
    bounded = torch.where(high, log_ratio.clamp(max=terms.clip_high), bounded)
    mean = terms.sequences.mean(bounded) + (bounded - bounded.detach())
    return TokenLoss(-terms.advantages * mean.clamp(-EXP_LIMIT, EXP_LIMIT).exp(), low, high)


# Name, words, loss; weighed_in_bypass, by_sequence, clips, takes_dual_clip, default_dual_clip.
define(
    Objective("ppo_clip", "PPO clips ρ itself", _ppo_clip, False, False, True, True),
    Objective("reinforce", "REINFORCE, without clipping", _reinforce, True, False, False, False),
    Objective("gspo", "GSPO clips the geometric mean of a sequence's ρ", _ppo_clip, False, True, True, True),
    Objective("cispo", "CISPO weighs each token by its clipped ρ", _cispo, False, False, True, False),
    Objective("dppo_tv", "DPPO bounds π_θ - π_rollout of each token", _dppo_tv, False, False, True, True, DPPO_LIMIT),
    Objective(
        "dppo_kl", "DPPO bounds the KL of each token's two events", _dppo_kl, False, False, True, True, DPPO_LIMIT
    ),
    Objective(
        *("cppo", "CPPO bounds |π_θ - π_rollout| of each token and of the tokens before", _cppo),
        *(False, False, True, False),
        whole_sequences=True,
    ),
    Objective(
        *("sapo", "SAPO dampens ρ by a sigmoid", _sapo),
        *(False, False, False, False),
        takes_temperatures=True,
    ),
    Objective(
        *("gmpo", "GMPO clips each token's log ρ and takes a sequence's geometric mean", _gmpo),
        *(False, False, True, False),
        whole_sequences=True,
    ),
)
