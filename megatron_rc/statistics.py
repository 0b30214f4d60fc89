"""The one pass over the tokens: sums for each sequence, sums for the batch, weights and token-level verdicts.

Everything here is local arithmetic on one block of tokens at a time, so that the scratch it needs does not grow with
the batch. Sums are float64 and found by name, so that they add up over blocks, micro-batches and ranks in any order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_rc.config import RolloutCorrectionConfig
from megatron_rc.criteria import OPSM, Criterion
from megatron_rc.parallel.blocks import Block
from megatron_rc.tokens import POSITIVE_LIMIT, FusedTerms, Scratch, TokenTerms
from megatron_rc.weights import EXP_LIMIT, bounded_weights, log_bounds, within

Sums = dict[str, Tensor]
Terms = TokenTerms | FusedTerms


@dataclass
class BlockTerms:
    """What one block contributes.

    Attributes:
        sequence: [rows] float64 sums by name.
        sequence_max: [rows] float64 maxima by name.
        batch: 0-D float64 sums by name.
        batch_max: 0-D float64 maxima by name; a minimum is the largest negative.
        codes: the bin of each log ρ, int32, the block's shape; lives in the scratch.
    """

    sequence: Sums = field(default_factory=dict)
    sequence_max: Sums = field(default_factory=dict)
    batch: Sums = field(default_factory=dict)
    batch_max: Sums = field(default_factory=dict)
    codes: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass(frozen=True)
class BlockTokens:
    """The tokens of one block: three inputs, and where two outputs go; all of the block's shape.

    Attributes:
        train: log π_train, float32 or float64.
        rollout: log π_rollout, alike.
        mask: the response mask, bool (int32 in a compiled call).
        negative: bool, where the advantage of the token is below 0; None where ``opsm`` does not test tokens.
        weights: takes the bounded weights at token level, else 1 where valid; None without weights.
        kept: bool (int32 in a compiled call), takes where valid and accepted by the token-level criteria.
    """

    train: Tensor
    rollout: Tensor
    mask: Tensor
    negative: Tensor | None
    weights: Tensor | None
    kept: Tensor


def block_terms(
    tokens: BlockTokens, block: Block, config: RolloutCorrectionConfig, scratch: Scratch | None
) -> BlockTerms:
    """All that is known of a block before anything is known of whole sequences.

    Args:
        tokens: inputs and outputs.
        block: which tokens these are.
        config: decides which terms there are.
        scratch: buffers of the block's shape; None in a compiled call, whose ``mask`` and ``kept`` are int32.
    """
    terms: Terms
    if scratch is None:
        terms = FusedTerms(tokens.train, tokens.rollout, tokens.mask)
    else:
        terms = TokenTerms(tokens.train, tokens.rollout, tokens.mask, block, scratch)
    out = BlockTerms()
    out.sequence |= {"response": terms.count(tokens.mask), "valid": terms.count(terms.valid)}
    _policy_terms(terms, out)
    if config.rollout_is == "token" and tokens.weights is not None:
        _weight_terms(terms, tokens.weights, config, out)
    elif tokens.weights is not None:
        tokens.weights.copy_(terms.valid)
    kept = terms.begin_mask(tokens.kept)
    wide = terms.log_ratio.double() if any(c.divergence in ("k2", "k3") for c in config.criteria) else terms.log_ratio
    for criterion in config.criteria:
        _criterion_terms(criterion, wide, terms, kept, block, out)
    if config.rollout_token_veto_threshold is not None:
        limit = math.log(config.rollout_token_veto_threshold)
        out.sequence["catastrophic"] = terms.count(terms.flag(torch.lt, terms.log_ratio, limit))
    _kept_terms(terms, kept, tokens, config, out)
    terms.end_mask(kept, tokens.kept)
    out.codes = terms.codes()
    return out


def is_log_prob(values: Tensor) -> Tensor:
    """Where a log-prob is usable: neither NaN nor infinite nor positive."""
    return within(values, torch.finfo(values.dtype).min, POSITIVE_LIMIT)


def divergence(kind: str, log_ratio: Tensor) -> Tensor:
    """k1 as log ρ (the bounds are on ρ), k2 = ½(log ρ)², k3 = ρ - 1 - log ρ with ρ = exp(min(log ρ, 20)).

    Schulman 2020, "Approximating KL Divergence" (there k1 is -log ρ).
    """
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    return torch.expm1(log_ratio.clamp(max=EXP_LIMIT)) - log_ratio


def _policy_terms(terms: Terms, out: BlockTerms) -> None:
    """How far the two policies are apart."""
    excess = terms.clamp(terms.log_ratio, -EXP_LIMIT, EXP_LIMIT).expm1_()
    out.sequence |= {"train": terms.train_sum, "rollout": terms.rollout_sum, "excess": terms.sum(excess)}
    out.batch["excess_squared"] = terms.total(excess.square_())
    out.batch_max["log_ratio"], out.batch_max["-log_ratio"] = terms.extremes(terms.log_ratio)


def _weight_terms(terms: Terms, weights: Tensor, config: RolloutCorrectionConfig, out: BlockTerms) -> None:
    """Token-level weights; the bounds are compared in log space."""
    lower, upper = log_bounds(config)
    bounded = bounded_weights(terms.log_ratio, config, out=terms.spare)
    terms.hold(bounded, out=weights)
    out.batch_max["weight"] = weights.amax().double()
    out.sequence["weight"] = terms.sum(weights)
    excess = bounded.sub_(1)
    out.batch["weight_excess_squared"] = terms.total(terms.hold(excess, out=excess).square_())
    for name, compare, bound in (("above", torch.gt, upper), ("below", torch.lt, lower)):
        outside = terms.flag(compare, terms.log_ratio, bound)
        out.batch[name] = terms.total_count(outside)
        if config.is_mode == "mask":
            out.sequence[f"outside_{name}"] = terms.count(outside)


def _criterion_terms(
    criterion: Criterion, wide: Tensor, terms: Terms, kept: Tensor, block: Block, out: BlockTerms
) -> None:
    """What a criterion needs of tokens; a token-level one takes what it rejects out of ``kept``."""
    name, kind = criterion.name, criterion.divergence
    statistic = terms.log_ratio
    if kind in ("k2", "k3"):
        exact = torch.where(terms.valid, divergence(kind, wide), 0)
        out.sequence[kind] = block.sum(exact)
        statistic = exact.to(statistic.dtype)
        if criterion.aggregation == "seq_max":
            out.sequence[f"over_{name}"] = terms.count(terms.flag(torch.gt, exact, criterion.upper))
            # Valid statistics are not negative, invalid ones 0.
            out.sequence_max[name] = block.max(exact)
    if criterion.aggregation != "token":
        return
    if kind != "k1":
        out.batch_max[f"token_{name}"], out.batch_max[f"-token_{name}"] = terms.extremes(statistic)
    out.batch[f"high_{name}"] = terms.total_count(terms.flag(torch.gt, statistic, criterion.upper))
    clamped = terms.clamp(statistic, criterion.floor, criterion.upper)
    accepted = terms.inside(statistic, clamped)
    out.sequence[f"accepted_{name}"] = terms.count(accepted)
    kept.logical_and_(accepted)
    out.batch[f"clamped_{name}"] = terms.total(terms.hold(clamped, out=clamped))
    out.batch[f"clamped_squared_{name}"] = terms.total(clamped.square_())


def _kept_terms(
    terms: Terms, kept: Tensor, tokens: BlockTokens, config: RolloutCorrectionConfig, out: BlockTerms
) -> None:
    """Tokens and weights that the token-level criteria leave, of all and of those with a negative advantage."""
    subsets = {"kept": kept}
    if tokens.negative is not None and any(criterion.name == OPSM for criterion in config.criteria):
        subsets["kept_negative"] = kept & tokens.negative
        out.sequence["negative"] = terms.count(terms.valid & tokens.negative)
    single = [criterion.name for criterion in config.criteria if criterion.aggregation == "token"]
    for name, chosen in subsets.items():
        # What a single criterion leaves has been counted.
        known = f"accepted_{single[0]}" if len(single) == 1 else "" if single else "valid"
        out.sequence[name] = out.sequence[known] if name == "kept" and known else terms.count(chosen)
        if tokens.weights is not None and config.rollout_is_batch_normalize_scope == "accepted":
            out.sequence[f"{name}_weight"] = terms.sum(torch.where(chosen, tokens.weights, 0))
