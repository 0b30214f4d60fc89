"""Which sums the correction needs of its tokens, in one pass: for each sequence, for the batch, and what it writes.

    log ρ_t = log π_train - log π_rollout        ρ_t = exp(log ρ_t)        w_t: ρ_t within the bounds of the weights

Everything here is local arithmetic on one block of tokens at a time, so that the memory it needs does not grow with the
batch. A block's sums are those of its runs, which are short enough for the log-probs' dtype where that is exact enough;
from there on they are added up in float64, over blocks, micro-batches and ranks in any order.

The pass is written once, in the operations of a :class:`TokenBlock`. ``expressions`` has them as they are written in a
formula; ``cpu_buffers`` has them in the form that is fast on a CPU; ``dispatch`` chooses.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rc.correction.header import check_names
from megatron_rc.correction.header_fields import header_fields
from megatron_rc.correction.header_records import Source
from megatron_rc.correction.inputs import AgreedCounts
from megatron_rc.correction.token_pass.operations import BlockTokens, How, TokenBlock
from megatron_rc.correction.weights import apply_bounds, log_bounds
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.criterion import Criterion, Need

Sums = dict[str, Tensor]
HOW: tuple[How, ...] = ("sum", "sum", "max", "sum", "max")  # of each kind of :class:`BlockTerms`


@dataclass
class BlockTerms:
    """What one block contributes, by name, for each of its runs.

    Attributes:
        exact: [runs] float64 sums, every addition in float64.
        sequence: [runs] sums as wide as the log-probs, or float64, and counts.
        sequence_max: [runs] maxima.
        batch: [runs] sums that no sequence asks for.
        batch_max: [runs] maxima likewise; a minimum is the largest negative.
        codes: the histogram's code of each log ρ, int64, of the block's shape.
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

    def unnamed(self, names: TermNames) -> BlockValues:
        """The values alone, in the order of their names.

        Raises:
            KeyError: terms that are not those that were declared.
        """
        for declared, kind in zip(names, self.kinds, strict=True):
            check_names("terms of a block", declared, kind)
        kinds = (tuple(kind[name] for name in declared) for declared, kind in zip(names, self.kinds, strict=True))
        return BlockValues(tuple(kinds), self.codes)


TermNames = tuple[tuple[str, ...], ...]  # of each kind of :class:`BlockTerms`


@functools.lru_cache(maxsize=64)
def term_names(config: RolloutCorrectionConfig, token_advantages: bool) -> TermNames:
    """The terms of every block.

    Args:
        config: what to correct.
        token_advantages: advantages are given for each token.
    """
    sums = [need.name for need in config.needs if need.how == "sum" and need.name != "log_ratio"]
    with_weights = config.rollout_is is not None and config.rollout_is_batch_normalize_scope == "accepted"
    by_token, masks = config.rollout_is == "token", config.is_mode == "mask"
    steps = () if config.staleness_scale is None else config.staleness_scale.steps
    negative = token_advantages and any(criterion.only_negative for criterion in config.criteria)
    sequence = [
        *("response", "valid", "excess", "kept"),
        *(f"older_{step}" for step in steps),
        *(("weight",) * by_token),
        *(("outside_above", "outside_below") * (by_token and masks)),
        *(f"accepted_{criterion.name}" for criterion in config.criteria if criterion.tested is not None),
        *(("catastrophic",) * (config.rollout_token_veto_threshold is not None)),
        *(("kept_weight",) * with_weights),
        *(("negative", "kept_negative") * negative),
        *(("kept_negative_weight",) * (negative and with_weights)),
    ]
    extremes = tuple(need.name for need in config.needs if need.how != "sum")
    header = header_fields(config, AgreedCounts())
    batch, batch_max = header.names(Source.TOKENS), header.names(Source.TOKEN_MAXIMA)
    return ("train", "rollout", *sums), tuple(sequence), extremes, batch, batch_max


class BlockValues(NamedTuple):
    """:class:`BlockTerms` without the names: the values of each kind, and the codes."""

    kinds: tuple[tuple[Tensor, ...], ...]
    codes: Tensor


def block_terms(block: TokenBlock, tokens: BlockTokens, config: RolloutCorrectionConfig) -> BlockTerms:
    """All that is known of a block before anything is known of whole sequences; sets its weights and kept tokens.

    Args:
        block: the tokens and their arithmetic.
        tokens: what the block was made of.
        config: decides which terms there are.
    """
    out = BlockTerms()
    out.sequence |= {"response": block.response, "valid": block.count(block.valid)}
    scale = _staleness_terms(block, tokens, config, out)
    ratio = _policy_terms(block, out)
    if config.rollout_is == "token":
        _weight_terms(block, ratio, config, scale, out)
    elif config.rollout_is is not None:
        block.set_unit_weights()
    log_ratio = block.log_ratio
    values = _values_of(block, config)
    for need in config.needs:
        _sequence_terms(need, values[need.divergence.name], block, out)
    for criterion in config.criteria:
        if criterion.tested is not None:
            _test_terms(criterion, values[criterion.tested.name].to(log_ratio.dtype), block, scale, out)
    if config.rollout_token_veto_threshold is not None:
        out.sequence["catastrophic"] = block.count_below(log_ratio, math.log(config.rollout_token_veto_threshold))
    _kept_terms(block, tokens, config, out)
    out.codes = block.codes()
    return out


def _policy_terms(block: TokenBlock, out: BlockTerms) -> Tensor:
    """How far the two policies are apart; returns ρ."""
    out.exact |= {"train": block.train_sum, "rollout": block.rollout_sum}
    _set_extremes(out, "policy.log_ratio", block.extremes(block.log_ratio))
    ratio = block.ratio()
    excess = block.minus_one(ratio)
    out.sequence["excess"] = block.sum(excess)
    out.batch["policy.excess_squared"] = block.sum(block.square(excess))
    return ratio


def _set_extremes(out: BlockTerms, name: str, extremes: tuple[Tensor, Tensor]) -> None:
    out.batch_max[f"{name}_max"], out.batch_max[f"{name}_min"] = extremes


def _staleness_terms(
    block: TokenBlock, tokens: BlockTokens, config: RolloutCorrectionConfig, out: BlockTerms
) -> Tensor | None:
    """What the bounds of each token are multiplied by, in nats; how many tokens of a sequence reach each level."""
    if config.staleness_scale is None or tokens.level is None:
        return None
    for level, step in enumerate(config.staleness_scale.steps, start=1):
        out.sequence[f"older_{step}"] = block.count((tokens.level >= level) & block.valid)
    return config.staleness_scale.of(tokens.level, block.log_ratio.dtype)


def _weight_terms(
    block: TokenBlock, ratio: Tensor, config: RolloutCorrectionConfig, scale: Tensor | None, out: BlockTerms
) -> None:
    """Token-level weights; the bounds are compared in log space."""
    lower, upper = log_bounds(config)
    bounded = apply_bounds(ratio, block.log_ratio, config, scale)
    excess = block.minus_one(bounded)
    # At an invalid position ρ is 1: only bounds that exclude it leave anything there.
    if not lower <= 0 <= upper:
        excess = block.hold(excess)
    out.batch["weights.weight_excess_squared"] = block.sum(block.square(excess))
    weights = block.set_weights(bounded)
    out.sequence["weight"] = block.sum(weights)
    if scale is not None or config.is_mode == "mask":
        # Without these the extremes of the weights follow from those of ρ.
        _set_extremes(out, "extremes.weight", block.extremes(weights))
    tested = block.log_ratio if scale is None else block.log_ratio / scale
    outside = {"above": block.count_above(tested, upper), "below": block.count_below(tested, lower)}
    out.batch |= {f"weights.{name}": count for name, count in outside.items()}
    if config.is_mode == "mask":
        out.sequence |= {f"outside_{name}": count for name, count in outside.items()}


def _values_of(block: TokenBlock, config: RolloutCorrectionConfig) -> dict[str, Tensor]:
    """What the criteria look at in each token, in float64, and 0 where invalid; log ρ as it is."""
    wide = block.log_ratio.double() if any(divergence.of for divergence in config.divergences) else block.log_ratio
    return {
        divergence.name: torch.where(block.valid, divergence.of(wide), 0) if divergence.of else block.log_ratio
        for divergence in config.divergences
    }


def _sequence_terms(need: Need, values: Tensor, block: TokenBlock, out: BlockTerms) -> None:
    """What a criterion needs of the tokens of each sequence."""
    if need.how == "sum":
        if need.name != "log_ratio":  # which follows from the sums of both policies
            out.exact[need.name] = block.exact_sum(values)
        return
    signed = values.double() if need.how == "max" else -values.double()
    # Invalid tokens hold 0, which must not be the extreme; as a largest value it is harmless where none is below 0.
    if need.how == "min" or need.divergence.least < 0:
        signed = torch.where(block.valid, signed, -torch.inf)
    out.sequence_max[need.name] = block.max(signed)


def _test_terms(
    criterion: Criterion, statistic: Tensor, block: TokenBlock, scale: Tensor | None, out: BlockTerms
) -> None:
    """A test of each token: takes what it rejects out of those that are kept."""
    name = criterion.name
    if not criterion.bounds.on_ratio:
        _set_extremes(out, f"{name}.tested", block.extremes(statistic))
    tested = statistic if scale is None else statistic / scale
    out.batch[f"{name}.high"] = block.count_above(tested, criterion.upper)
    clamped = block.clamp(tested, criterion.least, criterion.upper)
    accepted = block.unchanged(tested, clamped)
    block.keep(accepted)
    out.sequence[f"accepted_{name}"] = block.count(accepted)
    clamped = clamped if scale is None else clamped * scale
    out.batch[f"{name}.clamped"] = block.sum(clamped)
    out.batch[f"{name}.clamped_squared"] = block.sum(block.square(clamped))


def _kept_terms(block: TokenBlock, tokens: BlockTokens, config: RolloutCorrectionConfig, out: BlockTerms) -> None:
    """Tokens and weights that the token-level criteria leave, of all and of those with a negative advantage."""
    subsets = {"kept": block.kept}
    if tokens.negative is not None and any(criterion.only_negative for criterion in config.criteria):
        subsets["kept_negative"] = block.kept & tokens.negative
        out.sequence["negative"] = block.count(block.valid & tokens.negative)
    single = [criterion.name for criterion in config.criteria if criterion.unit == "token"]
    for name, chosen in subsets.items():
        # With a single token-level criterion, or none, this number has been counted already.
        known = f"accepted_{single[0]}" if len(single) == 1 else "" if single else "valid"
        out.sequence[name] = out.sequence[known] if name == "kept" and known else block.count(chosen)
        if block.weights is not None and config.rollout_is_batch_normalize_scope == "accepted":
            out.sequence[f"{name}_weight"] = block.sum(torch.where(chosen, block.weights, 0))


def largest(rows: Tensor) -> Tensor:
    """[k] of [k, n]: the largest of each row; -inf of nothing."""
    return rows.amax(1) if rows.shape[1] else rows.new_full((len(rows),), -torch.inf)
