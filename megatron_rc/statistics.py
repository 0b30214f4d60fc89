"""Per-token and per-sequence quantities of the two policies, and the sums that every metric is made of.

Everything here is local arithmetic. Sums over sequences and batches are float64, so that they can be added over
tokens, micro-batches and ranks in any order; a sum's slot is found by its name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.config import Criterion, RolloutCorrectionConfig
from megatron_rc.parallel.layout import SequenceLayout

EXP_LIMIT = 20.0  # a ratio is exp(clamp(x, ±20))
PPL_LIMIT = 80.0  # a perplexity is exp(clamp(x, ±80))
POSITIVE_LIMIT = 1e-4  # a log-prob above this is no rounding error
KEY_STRIDE = 2.0**32  # key of a token: sequence id · 2³² + position

Sums = dict[str, Tensor]


@dataclass(frozen=True)
class TokenTerms:
    """Local per-token tensors, of the log-probs' shape; every value at an uncounted position is 0.

    Attributes:
        counted: bool, the response mask.
        bad_train: bool, a counted token whose training log-prob is NaN, infinite or positive.
        bad_rollout: bool, the same for the rollout log-prob.
        train: log π_train.
        rollout: log π_rollout.
        log_ratio: log ρ = train - rollout.
    """

    counted: Tensor
    bad_train: Tensor
    bad_rollout: Tensor
    train: Tensor
    rollout: Tensor
    log_ratio: Tensor


def token_terms(train_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> TokenTerms:
    """Replace everything at uncounted and bad positions by 0 before any arithmetic."""
    counted = response_mask
    bad_train = counted & ~_is_log_prob(train_log_probs)
    bad_rollout = counted & ~_is_log_prob(rollout_log_probs)
    good = counted & ~bad_train & ~bad_rollout
    dtype = torch.promote_types(torch.promote_types(train_log_probs.dtype, rollout_log_probs.dtype), torch.float32)
    train = torch.where(good, train_log_probs.detach().to(dtype), 0)
    rollout = torch.where(good, rollout_log_probs.detach().to(dtype), 0)
    return TokenTerms(counted, bad_train, bad_rollout, train, rollout, train - rollout)


def divergence(kind: str, log_ratio: Tensor) -> Tensor:
    """k1 as log ρ (the bounds are on ρ), k2 = ½(log ρ)², k3 = ρ - 1 - log ρ with ρ = exp(min(log ρ, 20)).

    Schulman 2020, "Approximating KL Divergence" (there k1 is -log ρ).
    """
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    return torch.expm1(log_ratio.clamp(max=EXP_LIMIT)) - log_ratio


def exp_ratio(log_ratio: Tensor) -> Tensor:
    """exp(clamp(x, ±20)): a ratio that is finite and never 0."""
    return log_ratio.clamp(-EXP_LIMIT, EXP_LIMIT).exp()


def accepted_tokens(terms: TokenTerms, criteria: tuple[Criterion, ...]) -> dict[str, Tensor]:
    """For each token-level criterion the counted tokens that it accepts: bool, of the local shape."""
    return {
        criterion.name: terms.counted & within(criterion, divergence(criterion.divergence, terms.log_ratio))
        for criterion in criteria
        if criterion.aggregation == "token"
    }


def within(criterion: Criterion, statistic: Tensor) -> Tensor:
    """True where the criterion accepts the statistic."""
    return (statistic >= criterion.lower) & (statistic <= criterion.upper)


def sequence_sums(
    terms: TokenTerms, accepted_by: dict[str, Tensor], criteria: tuple[Criterion, ...], layout: SequenceLayout
) -> Sums:
    """Local parts of what is known of whole sequences, each ``[n]`` float64; the CP group holds the other parts.

    ``tokens`` counted, ``kept`` accepted by all token-level criteria (``accepted_by``), ``train`` and ``rollout``
    summed, and ``k2`` or ``k3`` where a sequence-level criterion asks for it.
    """
    kept = terms.counted
    for accepted in accepted_by.values():
        kept = kept & accepted
    sums = {
        "tokens": layout.sum_sequences(terms.counted),
        "kept": layout.sum_sequences(kept),
        "train": layout.sum_sequences(terms.train),
        "rollout": layout.sum_sequences(terms.rollout),
    }
    for kind in sorted({c.divergence for c in criteria if c.aggregation != "token"} - {"k1"}):
        value = divergence(kind, terms.log_ratio.double())
        sums[kind] = layout.sum_sequences(torch.where(terms.counted, value, 0))
    return sums


def sequence_statistic(criterion: Criterion, sums: Sums) -> Tensor:
    """The statistic of whole sequences that a sequence-level criterion tests: [n], float64; 0 without tokens."""
    total = sums["train"] - sums["rollout"] if criterion.divergence == "k1" else sums[criterion.divergence]
    return total if criterion.aggregation == "seq_sum" else total / sums["tokens"].clamp(min=1)


def token_batch_sums(terms: TokenTerms) -> Sums:
    """Sums over the local counted tokens that describe how far the two policies are apart."""
    log_ratio = terms.log_ratio.double()
    excess = torch.where(terms.counted, torch.expm1(log_ratio.clamp(-EXP_LIMIT, EXP_LIMIT)), 0)
    return {
        "tokens": terms.counted.sum(),
        "log_ratio": log_ratio.sum(),
        "k3": divergence("k3", log_ratio).sum(),
        "excess": excess.sum(),
        "excess_squared": excess.square().sum(),
        "bad_train": terms.bad_train.sum(),
        "bad_rollout": terms.bad_rollout.sum(),
    }


def sequence_batch_sums(sums: Sums) -> Sums:
    """Sums over the whole sequences with at least one counted token; count them on one CP rank only."""
    valid = sums["tokens"] > 0
    length = sums["tokens"].clamp(min=1)
    train, rollout = sums["train"] / length, sums["rollout"] / length
    difference = rollout - train
    excess = torch.expm1((sums["train"] - sums["rollout"]).clamp(-EXP_LIMIT, EXP_LIMIT))
    terms = {
        "sequences": torch.ones_like(length),
        "train_ppl": _ppl(-train),
        "rollout_ppl": _ppl(-rollout),
        "train_log_ppl": -train,
        "rollout_log_ppl": -rollout,
        "log_ppl_diff": difference,
        "log_ppl_abs_diff": difference.abs(),
        "ppl_ratio": _ppl(difference),
        "sequence_excess": excess,
        "sequence_excess_squared": excess.square(),
    }
    return {name: torch.where(valid, value, 0).sum() for name, value in terms.items()}


def sequence_batch_maxima(sums: Sums) -> Sums:
    """Largest values over sequences; a minimum is the largest negative."""
    valid = sums["tokens"] > 0
    difference = (sums["rollout"] - sums["train"]) / sums["tokens"].clamp(min=1)
    return {"log_ppl_diff": _max(difference, valid), "-log_ppl_diff": _max(-difference, valid)}


def bad_token_maxima(terms: TokenTerms, sequence_ids: Tensor, layout: SequenceLayout) -> Sums:
    """The negative of the lowest key of a bad token, for each policy; -inf if there is none."""
    device = terms.counted.device
    keys = layout.expand(sequence_ids.double().to(device)) * KEY_STRIDE + layout.positions().to(device)
    return {"-bad_train_key": _max(-keys, terms.bad_train), "-bad_rollout_key": _max(-keys, terms.bad_rollout)}


def weight_sums(raw: Tensor, weights: Tensor, counted: Tensor, config: RolloutCorrectionConfig) -> tuple[Sums, Sums]:
    """(sums, maxima) over the local counted tokens of the weights before and after truncation."""
    raw, weights = raw.double(), weights.double()
    sums, maxima = {}, {}
    for name, value in (("raw", raw), ("weight", weights)):
        value = torch.where(counted, value, 0)
        sums[name] = value.sum()
        # About 1, so that a small variance is not the difference of two large numbers.
        sums[f"{name}_excess_squared"] = torch.where(counted, value - 1, 0).square().sum()
        maxima[name], maxima[f"-{name}"] = _max(value, counted), _max(-value, counted)
    sums["above"] = (counted & (raw > config.is_threshold)).sum()
    sums["below"] = (counted & (raw < 1 / config.is_threshold)).sum()
    return sums, maxima


def _is_log_prob(log_probs: Tensor) -> Tensor:
    return log_probs.isfinite() & (log_probs <= POSITIVE_LIMIT)


def _ppl(value: Tensor) -> Tensor:
    return value.clamp(-PPL_LIMIT, PPL_LIMIT).exp()


def _max(values: Tensor, where: Tensor) -> Tensor:
    if values.numel() == 0:
        return torch.tensor(-torch.inf, dtype=torch.float64, device=values.device)
    return torch.where(where, values.double(), -torch.inf).max()
