"""Which sums the correction needs of its tokens, in one pass: for each sequence, for the batch, and what it writes.

    log ρ_t = log π_train - log π_rollout        ρ_t = exp(log ρ_t)        w_t: ρ_t within the bounds of the weights

Everything here is local arithmetic on one block of tokens at a time, so that the memory it needs does not grow with the
batch. A block's sums are those of its runs, which are short enough for the log-probs' dtype where that is exact enough;
from there on they are added up in float64, over blocks, micro-batches and ranks in any order.

The pass is written once, in the operations of a :class:`TokenBlock`. ``expressions`` has them as they are written in a
formula; ``cpu_buffers`` has them in the form that is fast on a CPU; ``blocks`` chooses.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_rc.correction.header import check_names, header_fields
from megatron_rc.correction.header_records import Source
from megatron_rc.correction.inputs import AgreedCounts
from megatron_rc.correction.weights import apply_bounds, log_bounds
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.criteria import Criterion, Need

MIN_RUN, MAX_RUN = 64, 1024  # so many tokens float32 adds up to a relative 1e-7
Sums = dict[str, Tensor]
How = Literal["sum", "max"]
HOW: tuple[How, ...] = ("sum", "sum", "max", "sum", "max")  # of each kind of :class:`BlockTerms`


@functools.cache
def run_length(length: int) -> int:
    """The length of the equal runs that a row is cut into: at most ``MAX_RUN`` unless that leaves short ones."""
    return next((run for run in range(min(length, MAX_RUN), MIN_RUN - 1, -1) if length % run == 0), length)


def of_segments(values: Tensor, how: How, lengths: Tensor) -> Tensor:
    """[runs] float64: sums or maxima of the runs of a flat block, which have these lengths."""
    return torch.segment_reduce(values.double(), how, lengths=lengths, unsafe=True)


@dataclass(frozen=True)
class BlockTokens:
    """The tokens of one block, as they were given; all of the block's shape.

    Where its sequences have equally many tokens in it, that is ``[runs, run]``: equal runs, each of one sequence. Else
    it is flat, and a run is what the block has of a sequence.

    Attributes:
        train: log π_train, float32 or float64.
        rollout: log π_rollout, alike.
        mask: the response mask, bool.
        negative: bool, where the advantage of the token is below 0; None where ``opsm`` does not test tokens.
        level: int64, which factor of the staleness scale is the token's; None without one.
    """

    train: Tensor
    rollout: Tensor
    mask: Tensor
    negative: Tensor | None = None
    level: Tensor | None = None

    def in_runs(self, run: int) -> BlockTokens:
        """The same tokens as [runs, run]; the length of every row is a multiple of ``run``."""
        return BlockTokens(
            train=self.train.reshape(-1, run),
            rollout=self.rollout.reshape(-1, run),
            mask=self.mask.reshape(-1, run),
            negative=None if self.negative is None else self.negative.reshape(-1, run),
            level=None if self.level is None else self.level.reshape(-1, run),
        )


@dataclass(frozen=True)
class TokenResults:
    """Where a block's part of the results goes; of the block's shape.

    Attributes:
        weights: bounded weights at token level, else 1 where valid, 0 where not; None without weights.
        kept: bool, where valid and accepted by the token-level criteria.
    """

    weights: Tensor | None
    kept: Tensor

    def in_runs(self, run: int) -> TokenResults:
        """The same memory as [runs, run]."""
        return TokenResults(None if self.weights is None else self.weights.view(-1, run), self.kept.view(-1, run))


class TokenBlock(Protocol):
    """One block of tokens and the operations on it.

    Whatever stands at an invalid position of the input, NaN and infinities included, is replaced by 0 before any
    arithmetic. What an operation returns for each token may be overwritten by a later one, and is used at once.

    Attributes:
        valid: bool: in the response mask, with two usable log-probs.
        log_ratio: log ρ where valid, else 0.
        train_sum: [runs] float64, the sum of log π_train over valid tokens.
        rollout_sum: likewise.
        response: [runs], tokens in the response mask.
        weights: the weight of each token, once it is set.
        kept: bool: valid tokens that no criterion has taken out yet.
    """

    valid: Tensor
    log_ratio: Tensor
    train_sum: Tensor
    rollout_sum: Tensor
    response: Tensor
    weights: Tensor | None
    kept: Tensor

    def ratio(self) -> Tensor:
        """ρ."""

    def hold(self, values: Tensor) -> Tensor:
        """The values where valid, else 0."""

    def minus_one(self, values: Tensor) -> Tensor:
        """Values - 1, to 6e-8 of the values in float32, where expm1 of their logarithms would cost six exponentials."""

    def square(self, values: Tensor) -> Tensor:
        """values²."""

    def clamp(self, values: Tensor, lower: float, upper: float) -> Tensor:
        """Values, 0 where invalid, within the bounds; 0 there still."""

    def unchanged(self, values: Tensor, clamped: Tensor) -> Tensor:
        """Valid tokens that clamping left alone."""

    def set_weights(self, values: Tensor) -> Tensor:
        """The weights: values where valid, else 0."""

    def set_unit_weights(self) -> None:
        """The weights: 1 where valid, else 0."""

    def keep(self, flags: Tensor) -> None:
        """Take the others out of ``kept``."""

    def exact_sum(self, values: Tensor) -> Tensor:
        """[runs] float64, every addition in float64."""

    def sum(self, values: Tensor) -> Tensor:
        """[runs], to a relative 1e-7: as many tokens as float32 adds up well are added in their own dtype."""

    def count(self, flags: Tensor) -> Tensor:
        """[runs]: how many flags are set."""

    def count_above(self, values: Tensor, bound: float) -> Tensor:
        """[runs]: how many values, 0 where invalid, are above the bound; invalid ones count nowhere."""

    def count_below(self, values: Tensor, bound: float) -> Tensor:
        """[runs]: likewise below the bound."""

    def max(self, values: Tensor) -> Tensor:
        """[runs]: the largest value of each."""

    def extremes(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """([runs], [runs]): the largest valid value and the largest negative of one; -inf without one."""

    def codes(self) -> Tensor:
        """int64: the histogram's code of log ρ. The last operation."""


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
    excess = block.hold(block.minus_one(bounded))
    out.batch["weights.weight_excess_squared"] = block.sum(block.square(excess))
    weights = block.set_weights(bounded)
    out.sequence["weight"] = block.sum(weights)
    if scale is not None or config.is_mode == "mask":
        # Else they follow from those of the ratio.
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
    # Where no valid value is below 0, the zeros of the invalid ones change nothing.
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
        # What a single criterion leaves has been counted.
        known = f"accepted_{single[0]}" if len(single) == 1 else "" if single else "valid"
        out.sequence[name] = out.sequence[known] if name == "kept" and known else block.count(chosen)
        if block.weights is not None and config.rollout_is_batch_normalize_scope == "accepted":
            out.sequence[f"{name}_weight"] = block.sum(torch.where(chosen, block.weights, 0))


def largest(rows: Tensor) -> Tensor:
    """[k] of [k, n]: the largest of each row; -inf of nothing."""
    return rows.amax(1) if rows.shape[1] else rows.new_full((len(rows),), -torch.inf)
