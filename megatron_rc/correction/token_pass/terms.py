"""The one pass over the tokens: sums for each sequence, sums for the batch, weights and token-level verdicts.

Everything here is local arithmetic on one block of tokens at a time, so that the scratch it needs does not grow with
the batch. A block's sums are those of its runs, which are short enough for the log-probs' dtype where that is exact
enough; from there on they are added up in float64, over blocks, micro-batches and ranks in any order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron_rc.correction.token_pass.values import FusedTerms, Scratch, TokenTerms
from megatron_rc.correction.weights import apply_bounds, log_bounds
from megatron_rc.numerics import divergence
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.criteria import OPSM, Criterion

Sums = dict[str, Tensor]
# Numbers of the whole batch: a table by its name, or a vector by the names of its elements.
Columns = dict[str | tuple[str, ...], Tensor]
Terms = TokenTerms | FusedTerms
How = Literal["sum", "max"]
HOW: tuple[How, ...] = ("sum", "sum", "max", "sum", "max")  # of each kind of :class:`BlockTerms`


@dataclass
class BlockTerms:
    """What one block contributes, by name: for each of its runs, or in any other parts that add up.

    Attributes:
        exact: [runs] float64 sums, every addition in float64.
        sequence: [runs] sums as wide as the log-probs, or float64, and counts.
        sequence_max: [runs] maxima.
        batch: [parts] sums.
        batch_max: [parts] maxima; a minimum is the largest negative.
        codes: the bin of each log ρ, int64, the block's shape; lives in the scratch.
    """

    exact: Sums = field(default_factory=dict)
    sequence: Sums = field(default_factory=dict)
    sequence_max: Sums = field(default_factory=dict)
    batch: Sums = field(default_factory=dict)
    batch_max: Sums = field(default_factory=dict)
    codes: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def kinds(self) -> tuple[Sums, ...]:
        """All but the codes; what each adds up by is in ``HOW``."""
        return self.exact, self.sequence, self.sequence_max, self.batch, self.batch_max

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """Those of each kind, which all blocks share."""
        return tuple(tuple(kind) for kind in self.kinds)

    def unnamed(self) -> BlockValues:
        """The values alone, in the order of their names."""
        return BlockValues(tuple(tuple(kind.values()) for kind in self.kinds), self.codes)


class BlockValues(NamedTuple):
    """:class:`BlockTerms` without the names: the values of each kind, and the codes."""

    kinds: tuple[tuple[Tensor, ...], ...]
    codes: Tensor


@dataclass(frozen=True)
class BlockTokens:
    """The tokens of one block: three inputs, and where two outputs go; all of the block's shape.

    Attributes:
        train: log π_train, float32 or float64.
        rollout: log π_rollout, alike.
        mask: the response mask, bool (uint8 in a compiled call).
        negative: bool, where the advantage of the token is below 0; None where ``opsm`` does not test tokens.
        weights: takes the bounded weights at token level, else 1 where valid; None without weights.
        kept: bool (uint8 in a compiled call), takes where valid and accepted by the token-level criteria.
        level: int64, which factor of the staleness scale is the token's; None without one.
    """

    train: Tensor
    rollout: Tensor
    mask: Tensor
    negative: Tensor | None
    weights: Tensor | None
    kept: Tensor
    level: Tensor | None = None

    def in_runs(self, run: int) -> BlockTokens:
        """The same tokens, [runs, run]; every row is a multiple of the run."""
        return BlockTokens(
            train=self.train.reshape(-1, run),
            rollout=self.rollout.reshape(-1, run),
            mask=self.mask.reshape(-1, run),
            negative=None if self.negative is None else self.negative.reshape(-1, run),
            weights=None if self.weights is None else self.weights.view(-1, run),
            kept=self.kept.view(-1, run),
            level=None if self.level is None else self.level.reshape(-1, run),
        )


def block_terms(
    tokens: BlockTokens, config: RolloutCorrectionConfig, scratch: Scratch, lengths: Tensor | None = None
) -> BlockTerms:
    """All that is known of a block before anything is known of whole sequences.

    Args:
        tokens: inputs and outputs, [runs, run] each, or flat.
        config: decides which terms there are.
        scratch: buffers of the tokens' shape.
        lengths: [runs] int64, the tokens of each run where they are flat, else None.
    """
    return _terms_of(TokenTerms(tokens.train, tokens.rollout, tokens.mask, scratch, lengths), tokens, config)


def fused_terms(tokens: BlockTokens, zero: Tensor, config: RolloutCorrectionConfig) -> BlockTerms:
    """The same for a compiler.

    Args:
        tokens: inputs and outputs, [runs, run] each; ``mask`` and ``kept`` are uint8.
        zero: as :class:`FusedTerms` has it.
        config: decides which terms there are.
    """
    return _terms_of(FusedTerms(tokens.train, tokens.rollout, tokens.mask, zero), tokens, config)


def _terms_of(terms: Terms, tokens: BlockTokens, config: RolloutCorrectionConfig) -> BlockTerms:
    out = BlockTerms()
    out.sequence |= {"response": terms.response, "valid": terms.count(terms.valid)}
    scale = _staleness_terms(terms, tokens, config, out)
    ratio = _policy_terms(terms, out)
    if config.rollout_is == "token" and tokens.weights is not None:
        _weight_terms(terms, ratio, tokens.weights, config, scale, out)
    elif tokens.weights is not None:
        tokens.weights.copy_(terms.valid)
    kept = terms.begin_mask(tokens.kept)
    wide = terms.log_ratio.double() if any(c.divergence in ("k2", "k3") for c in config.criteria) else terms.log_ratio
    for criterion in config.criteria:
        _criterion_terms(criterion, wide, terms, kept, scale, out)
    if config.rollout_token_veto_threshold is not None:
        limit = math.log(config.rollout_token_veto_threshold)
        out.sequence["catastrophic"] = terms.count_where(torch.lt, terms.log_ratio, limit)
    _kept_terms(terms, kept, tokens, config, out)
    terms.end_mask(kept, tokens.kept)
    out.codes = terms.codes()
    return out


def _policy_terms(terms: Terms, out: BlockTerms) -> Tensor:
    """How far the two policies are apart; returns ρ, which may be overwritten."""
    out.batch_max["log_ratio"], out.batch_max["-log_ratio"] = terms.extremes(terms.log_ratio)
    ratio = terms.ratio()
    excess = terms.excess(ratio)
    out.exact |= {"train": terms.train_sum, "rollout": terms.rollout_sum}
    out.sequence["excess"] = terms.near_sum(excess)
    out.batch["excess_squared"] = terms.near_total(excess.square_())
    return ratio


def _staleness_terms(
    terms: Terms, tokens: BlockTokens, config: RolloutCorrectionConfig, out: BlockTerms
) -> Tensor | None:
    """What the bounds of each token are multiplied by, in nats; how many tokens of a sequence reach each level."""
    if config.staleness_scale is None or tokens.level is None:
        return None
    for level, step in enumerate(config.staleness_scale.steps, start=1):
        out.sequence[f"older_{step}"] = terms.count((tokens.level >= level) & terms.valid)
    return config.staleness_scale.of(tokens.level, terms.log_ratio.dtype)


def _weight_terms(
    terms: Terms,
    ratio: Tensor,
    weights: Tensor,
    config: RolloutCorrectionConfig,
    scale: Tensor | None,
    out: BlockTerms,
) -> None:
    """Token-level weights; the bounds are compared in log space."""
    lower, upper = log_bounds(config)
    tested = terms.log_ratio if scale is None else terms.log_ratio / scale
    bounded = apply_bounds(ratio, terms.log_ratio, config, scale)
    held = terms.hold(bounded, out=weights)
    if scale is not None or config.is_mode == "mask":
        # Else it follows from the largest ratio.
        out.batch_max["weight"] = terms.largest(held)
    out.sequence["weight"] = terms.near_sum(held)
    excess = bounded.sub_(1)
    # At an invalid position ρ is 1: only bounds that exclude it leave anything there.
    if not lower <= 0 <= upper:
        excess = terms.hold(excess, out=excess)
    out.batch["weight_excess_squared"] = terms.near_total(excess.square_())
    for name, compare, bound in (("above", torch.gt, upper), ("below", torch.lt, lower)):
        outside = terms.count_where(compare, tested, bound)
        out.batch[name] = terms.whole(outside)
        if config.is_mode == "mask":
            out.sequence[f"outside_{name}"] = outside
    if scale is not None:
        out.batch_max["-weight"] = terms.extremes(held)[1]


def _criterion_terms(
    criterion: Criterion, wide: Tensor, terms: Terms, kept: Tensor, scale: Tensor | None, out: BlockTerms
) -> None:
    """What a criterion needs of tokens; a token-level one takes what it rejects out of ``kept``."""
    name, kind = criterion.name, criterion.divergence
    statistic = terms.log_ratio
    if kind in ("k2", "k3"):
        exact = torch.where(terms.valid, divergence(kind, wide), 0)
        out.exact[kind] = terms.sum(exact)
        statistic = exact.to(statistic.dtype)
        if criterion.aggregation == "seq_max":
            if scale is None:
                out.sequence[f"over_{name}"] = terms.count_where(torch.gt, exact, criterion.upper)
            # Valid statistics are not negative, invalid ones 0.
            out.sequence_max[name] = terms.max(exact)
    if criterion.aggregation != "token":
        return
    if kind != "k1":
        out.batch_max[f"token_{name}"], out.batch_max[f"-token_{name}"] = terms.extremes(statistic)
    tested = statistic if scale is None else statistic / scale
    out.batch[f"high_{name}"] = terms.whole(terms.count_where(torch.gt, tested, criterion.upper))
    clamped = terms.clamp(tested, criterion.floor, criterion.upper)
    accepted = terms.inside(tested, clamped)
    out.sequence[f"accepted_{name}"] = terms.count(accepted)
    kept.logical_and_(accepted)
    if scale is not None:
        clamped = clamped.mul_(scale)
    if not criterion.floor <= 0 <= criterion.upper:
        clamped = terms.hold(clamped, out=clamped)
    out.batch[f"clamped_{name}"] = terms.near_total(clamped)
    out.batch[f"clamped_squared_{name}"] = terms.near_total(clamped.square_())


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
            out.sequence[f"{name}_weight"] = terms.near_sum(torch.where(chosen, tokens.weights, 0))


def largest(rows: Tensor) -> Tensor:
    """[k] of [k, n]: the largest of each row; -inf of nothing."""
    return rows.amax(1) if rows.shape[1] else rows.new_full((len(rows),), -torch.inf)
