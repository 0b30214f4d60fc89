"""The decisions: on each token alone, over the tokens of each sequence, and on whole sequences and prompts.

Tokens give valid tokens, log ρ, verdicts and weights; their sums give verdicts and weights of whole sequences. The same
expressions run on a CPU, on a GPU and inside ``torch.compile``, on one block of tokens after the other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_rc.correction.history import HistoryValues
from megatron_rc.correction.inputs import Part, Shards
from megatron_rc.correction.weights import Weights, bounded_weights
from megatron_rc.numerics import cleared, exp_ratio, exp_weight, numbers, off_log_prob
from megatron_rc.parallel.collectives import largest, map_record, smallest
from megatron_rc.parallel.layout import Block
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.criterion import Criterion, SequenceValues
from megatron_rc.settings.staleness import StalenessScale

# Tokens of a block: a twelfth of the shard, so that the scratch stays below a tensor of its size, within a CPU's cache;
# on a GPU as many as keep it busy while the host asks for the next operation.
MIN_BLOCK, MAX_BLOCK, GPU_BLOCK = 2**16, 2**18, 2**22


@dataclass(frozen=True)
class Tokens:
    """A block of tokens as it was given; every tensor has the same shape: [n, length], or flat."""

    train: Tensor  # log π_train, float32 or float64
    rollout: Tensor  # log π_rollout, of the same dtype
    mask: Tensor  # the response mask, bool
    negative: Tensor | None = None  # bool, the advantage is below 0; None unless advantages are one a token
    level: Tensor | None = None  # int64, the token's place in the staleness scale; None without one
    log_weight: Tensor | None = None  # float64, log w, unbounded; None: it is log ρ, or weights are of sequences
    statistics: dict[str, Tensor] = field(default_factory=dict)  # float64, by the name of each criterion on turns


def blocks_of(part: Part, *, compile: bool = False) -> list[Block]:
    """The blocks that bound the memory of the arithmetic on one micro-batch."""
    device, num_tokens = part.mask.device, GPU_BLOCK
    if device.type == "cpu":
        # A compiled block has less scratch, and more to do for each call.
        wider = 6 if compile else 1
        num_tokens = min(max(part.mask.numel() * wider // 12, MIN_BLOCK), MAX_BLOCK * wider)
    return part.layout.blocks(num_tokens, device)


def token_blocks(
    shards: Shards,
    config: RolloutCorrectionConfig,
    history: Sequence[HistoryValues] | None = None,
    *,
    compile: bool = False,
) -> Iterator[tuple[int, Block, Tokens]]:
    """(number of the micro-batch, block, its tokens), one after the other; at least one."""
    scale = config.staleness_scale
    for number, part in enumerate(shards.parts):
        for block in blocks_of(part, compile=compile):
            train, rollout = (block.take(values).to(shards.dtype) for values in (part.train, part.rollout))
            negative = None if part.advantages is None else block.take(part.advantages) < 0
            level = None if scale is None else _levels(part, block, shards, scale)
            tokens = Tokens(train, rollout, block.take(part.mask), negative, level)
            yield number, block, tokens if history is None else _with_history(tokens, block, history[number])


def _with_history(tokens: Tokens, block: Block, history: HistoryValues) -> Tokens:
    log_weight = None if history.log_weight is None else block.take(history.log_weight)
    statistics = {name: block.take(values) for name, values in history.statistics.items()}
    return dataclasses.replace(tokens, log_weight=log_weight, statistics=statistics)


def _levels(part: Part, block: Block, shards: Shards, scale: StalenessScale) -> Tensor:
    """The place of each token in the staleness scale."""
    if part.versions is not None:
        return scale.levels(shards.counts.staleness(block.take(part.versions)))
    return scale.levels(shards.counts.staleness(block.expand(shards.policy_versions[part.sequences])))  # type: ignore[index]


@dataclass(frozen=True)
class TokenTest:
    """The test of each token by one criterion on tokens or turns."""

    tested: Tensor  # the number that it tests
    accepted: Tensor  # bool: the valid tokens that it accepts


@dataclass(frozen=True)
class TokenDecisions:
    """Decisions on each token alone; every tensor has the tokens' shape."""

    valid: Tensor  # bool: in the response mask, with two usable log-probs
    one: Tensor  # 1 if valid, else 0, in the log-probs' dtype: for a CPU a product is cheaper than ``torch.where``
    absent: Tensor  # 0 if valid, else inf, of the same dtype
    train: Tensor  # log π_train, 0 if invalid
    rollout: Tensor  # log π_rollout, 0 if invalid
    log_ratio: Tensor  # log ρ, 0 if invalid
    ratio: Tensor  # ρ, clamped, 1 if invalid
    scale: Tensor | None  # the factor of the token's bounds, in nats; None without a staleness scale
    values: dict[str, Tensor]  # x of each divergence that a criterion needs, float64 (log ρ in its own dtype)
    tests: dict[str, TokenTest]  # of each criterion on tokens or turns
    kept: Tensor  # bool: the valid tokens that all criteria on tokens and turns accept
    # Of an invalid token bounded 0, log 0, raw 1. Float64 for weights of several tokens. None unless token-level.
    weights: Weights | None


def decide_tokens(tokens: Tokens, config: RolloutCorrectionConfig) -> TokenDecisions:
    """Everything that a token decides alone.

    log ρ_t = log π_train - log π_rollout        w_t = exp(log ρ_t) within its bounds        k_t = Π criteria of tokens
    """
    valid = tokens.mask & (off_log_prob(tokens.train) + off_log_prob(tokens.rollout) == 0)
    one = numbers(valid).to(tokens.train.dtype)
    train, rollout = cleared(tokens.train, one), cleared(tokens.rollout, one)
    log_ratio = train - rollout
    ratio = exp_ratio(log_ratio)
    scale = None if tokens.level is None else config.staleness_scale.of(tokens.level, log_ratio.dtype)  # type: ignore[union-attr]
    values = {x.name: x.values(train, rollout, log_ratio) for x in config.divergences}
    tests, kept, weights = {}, valid, None
    for criterion in config.criteria:
        if criterion.of_tokens:
            number = tokens.statistics[criterion.name] if criterion.tested is None else values[criterion.tested.name]
            number = number.to(log_ratio.dtype)
            test = TokenTest(number, valid & criterion.within_bounds(number, scale))
            tests[criterion.name], kept = test, test.accepted if kept is valid else kept & test.accepted
    if config.weighs_tokens:
        if tokens.log_weight is None:
            weights = bounded_weights(log_ratio, ratio, config, scale)
        else:
            # A sum over many tokens: float32 would make 0 of weights below e⁻¹⁰³.
            log_weight = torch.where(valid, tokens.log_weight, 0)
            weights = bounded_weights(log_weight, exp_weight(log_weight), config, scale)
        weights = dataclasses.replace(weights, bounded=weights.bounded * one)
    absent = 1 / one - 1
    return TokenDecisions(valid, one, absent, train, rollout, log_ratio, ratio, scale, values, tests, kept, weights)


@dataclass(frozen=True)
class BlockSequences:
    """The sequences of a block, over which its tokens are added up: [n] each, as wide as the tokens or wider."""

    lengths: Tensor | None = None  # [n] int64, tokens of each sequence of a flat block; None for a block [n, length]

    def sum(self, values: Tensor) -> Tensor:
        """Sums to a relative 1e-6: torch adds float32 numbers pairwise, and in vectors if compiled."""
        return values.sum(1) if self.lengths is None else self._segments(values, "sum")

    def exact_sum(self, values: Tensor) -> Tensor:
        """Sums with every addition in float64."""
        return values.sum(1, dtype=torch.float64) if self.lengths is None else self._segments(values, "sum")

    def count(self, flags: Tensor) -> Tensor:
        """How many flags are True."""
        return numbers(flags).sum(1, dtype=torch.int32) if self.lengths is None else self._segments(flags, "sum")

    def largest(self, values: Tensor, absent: Tensor) -> Tensor:
        """The largest value that is not absent; -inf without one."""
        values = values - absent
        return values.amax(1) if self.lengths is None else self._segments(values, "max")

    def smallest(self, values: Tensor, absent: Tensor) -> Tensor:
        """The smallest value that is not absent; +inf without one."""
        values = values + absent
        return values.amin(1) if self.lengths is None else self._segments(values, "min")

    def _segments(self, values: Tensor, how: str) -> Tensor:
        if not values.numel() and self.lengths is not None:
            return values.new_full(self.lengths.shape, {"sum": 0.0, "max": -torch.inf, "min": torch.inf}[how]).double()
        return torch.segment_reduce(values.double(), how, lengths=self.lengths, unsafe=True)


@dataclass(frozen=True)
class KeptSums:
    """Sums over the tokens of each sequence that all criteria on tokens and turns accept, [n] float64."""

    tokens: Tensor  # their number
    weight: Tensor | None  # Σ w; None unless weights are token-level


@dataclass(frozen=True)
class NegativeSums:
    """Sums over the tokens of each sequence with A < 0, if advantages are one a token."""

    valid: Tensor  # [n] float64, valid tokens
    kept: KeptSums  # kept tokens


@dataclass(frozen=True)
class NeedSums:
    """Sums and extremes over the valid tokens of each sequence that criteria need, by the name of the need."""

    sums: dict[str, Tensor]  # Σ x, every addition in float64
    maxima: dict[str, Tensor] = largest()  # the largest x
    minima: dict[str, Tensor] = smallest()  # the smallest x


@dataclass(frozen=True)
class SequenceSums:
    """Sums over the tokens of each sequence, [n] float64."""

    response: Tensor  # tokens of the response mask
    valid: Tensor  # valid tokens
    train: Tensor  # Σ log π_train over valid tokens, every addition in float64
    rollout: Tensor  # Σ log π_rollout over valid tokens, every addition in float64
    weight: Tensor | None  # Σ w over valid tokens; None unless weights are token-level
    kept: KeptSums  # kept tokens
    negative: NegativeSums | None  # tokens with A < 0; None unless a criterion spares the others
    vetoed: Tensor | None  # tokens below the veto's threshold; None without a veto
    older: tuple[Tensor, ...]  # for each step of the staleness scale, the valid tokens that reach it
    needs: NeedSums | None  # x of criteria; None if they need none beside log ρ

    @property
    def num_tokens(self) -> Tensor:
        """Valid tokens, at least 1."""
        return self.valid.clamp(min=1)

    @property
    def log_ratio(self) -> Tensor:
        """Σ log ρ_t over valid tokens."""
        return self.train - self.rollout

    @property
    def mean_log_ratio(self) -> Tensor:
        """The mean of log ρ_t over valid tokens."""
        return self.log_ratio / self.num_tokens


def sum_tokens(
    tokens: Tokens, decisions: TokenDecisions, sequences: BlockSequences, config: RolloutCorrectionConfig
) -> SequenceSums:
    """The sums over the sequences of a block."""
    valid, level = decisions.valid, tokens.level
    weights = None if decisions.weights is None else decisions.weights.bounded
    veto, steps = config.rollout_token_veto_threshold, config.staleness_scale.steps if config.staleness_scale else ()
    negative = tokens.negative if any(criterion.only_negative for criterion in config.criteria) else None

    def kept_sums(flags: Tensor) -> KeptSums:
        weight = None if weights is None else sequences.sum(weights * numbers(flags))
        return KeptSums(sequences.count(flags), weight)

    return SequenceSums(
        response=sequences.count(tokens.mask),
        valid=sequences.count(valid),
        train=sequences.exact_sum(decisions.train),
        rollout=sequences.exact_sum(decisions.rollout),
        weight=None if weights is None else sequences.sum(weights),
        kept=kept_sums(decisions.kept),
        negative=None
        if negative is None
        else NegativeSums(sequences.count(valid & negative), kept_sums(decisions.kept & negative)),
        vetoed=None if veto is None else sequences.count(valid & (decisions.log_ratio < math.log(veto))),
        older=tuple(sequences.count(valid & (level > i)) for i in range(len(steps)) if level is not None),
        needs=_need_sums(decisions, sequences, config) if config.needs else None,
    )


def _need_sums(decisions: TokenDecisions, sequences: BlockSequences, config: RolloutCorrectionConfig) -> NeedSums:
    needed = [(need, decisions.values[need.divergence.name].double()) for need in config.needs]
    return NeedSums(
        sums={need.name: sequences.exact_sum(x) for need, x in needed if need.how == "sum"},
        maxima={need.name: sequences.largest(x, decisions.absent) for need, x in needed if need.how == "max"},
        minima={need.name: sequences.smallest(x, decisions.absent) for need, x in needed if need.how == "min"},
    )


def statistics_of(sums: SequenceSums) -> SequenceValues:
    """The statistics of whole sequences."""
    values = {"log_ratio": sums.log_ratio}
    if sums.needs is not None:
        values |= sums.needs.sums | sums.needs.maxima | sums.needs.minima
    return SequenceValues(sums.num_tokens, torch.zeros_like(sums.valid), values)


@dataclass(frozen=True)
class SequenceDecisions:
    """Decisions on whole sequences, [n] each, equal on all ranks of a CP group."""

    scale: Tensor | None  # float64, the factor of the bounds, in nats: the one of the oldest valid token
    weights: Weights | None  # float64, the weights that all tokens of a sequence share; None unless they share one
    tokens: Tensor  # tokens under m, float64
    accept: Tensor  # bool: no criterion rejects the whole sequence
    accept_negative: Tensor | None  # bool: False if its tokens with A < 0 are rejected; None unless A is one a token
    accepted: KeptSums  # the tokens under m'
    by_criterion: dict[str, Tensor]  # bool: for each criterion on sequences or prompts, the sequences it accepts


def decide_sequences(
    sums: SequenceSums, shards: Shards, config: RolloutCorrectionConfig, prompts: Tensor | None = None
) -> SequenceDecisions:
    """The decisions on sequences, and on prompts if ``prompts``, the reduced :func:`prompt_columns`, are given."""
    scale = weights = None
    if config.staleness_scale is not None:
        reached = torch.stack([tokens > 0 for tokens in sums.older]).sum(0)
        scale = config.staleness_scale.of(reached, sums.valid.dtype)
    if config.level is not None and config.level.unit == "sequence":
        log_weight = sums.mean_log_ratio if config.level.mean else sums.log_ratio
        weights = bounded_weights(log_weight, exp_weight(log_weight), config, scale)
    accept, accept_negative, by_criterion = torch.ones_like(sums.valid, dtype=torch.bool), None, {}
    for criterion in config.criteria:
        if criterion.unit == "prompt" and prompts is not None:
            verdict = _prompt_verdict(criterion, prompts, config)[shards.group_ids]
        elif criterion.unit == "sequence":
            # Without a valid token there is nothing to test.
            verdict = criterion.within_bounds(criterion.statistic(statistics_of(sums)), scale) | (sums.valid == 0)
        else:
            continue
        if criterion.only_negative and shards.advantages is not None:
            verdict = verdict | ~(shards.advantages < 0)
        by_criterion[criterion.name] = verdict
        if criterion.only_negative and shards.advantages is None:
            accept_negative = verdict if accept_negative is None else accept_negative & verdict
        else:
            accept = accept & verdict
    if sums.vetoed is not None and config.rejecting_veto is not None:
        accept = accept & (sums.vetoed == 0)
    if config.bad_log_probs == "reject_sequence":
        accept = accept & (sums.response == sums.valid)
    tokens = sums.valid if config.bad_log_probs == "reject_token" else sums.response
    accepted: KeptSums = map_record(sums.kept, lambda kept: torch.where(accept, kept, 0))
    if accept_negative is not None and sums.negative is not None:
        lost: KeptSums = map_record(sums.negative.kept, lambda kept: torch.where(accept & ~accept_negative, kept, 0))
        weight = None if accepted.weight is None or lost.weight is None else accepted.weight - lost.weight
        accepted = KeptSums(accepted.tokens - lost.tokens, weight)
    return SequenceDecisions(scale, weights, tokens, accept, accept_negative, accepted, by_criterion)


def accepted_masks(kept: Sequence[Tensor], shards: Shards, decisions: SequenceDecisions) -> list[Tensor]:
    """M' of each micro-batch: the kept tokens of accepted sequences."""
    masks = [mask & accept for mask, accept in zip(kept, shards.expand(decisions.accept), strict=True)]
    if decisions.accept_negative is not None:
        spared = [~(part.advantages < 0) for part in shards.parts]  # type: ignore[operator]
        accepts = shards.expand(decisions.accept_negative)
        masks = [mask & (accept | other) for mask, accept, other in zip(masks, accepts, spared, strict=True)]
    return masks


def prompt_columns(sums: SequenceSums, shards: Shards, config: RolloutCorrectionConfig) -> Tensor:
    """[num_groups, k] float64: valid tokens, lost responses, then each needed sum, of responses that count here."""
    lost = ((sums.response > 0) & (decide_sequences(sums, shards, config).accepted.tokens == 0)).double()
    values = statistics_of(sums).values
    columns = torch.stack([sums.valid, lost, *(values[name] for name in prompt_needs(config))], dim=1)
    prompts = columns.new_zeros(shards.counts.num_groups or 0, columns.shape[1])
    return prompts.index_add_(0, shards.group_ids, columns * shards.counts_here.unsqueeze(1))  # type: ignore[arg-type]


def prompt_needs(config: RolloutCorrectionConfig) -> list[str]:
    """The names of the sums over the responses of a prompt that criteria on prompts need, each once."""
    criteria = [criterion for criterion in config.criteria if criterion.unit == "prompt"]
    return list(dict.fromkeys(need.name for criterion in criteria for need in criterion.needs))


def _prompt_verdict(criterion: Criterion, prompts: Tensor, config: RolloutCorrectionConfig) -> Tensor:
    """[num_groups] bool: the prompts that a criterion accepts."""
    valid, lost, *sums = prompts.unbind(1)
    statistics = SequenceValues(valid.clamp(min=1), lost, dict(zip(prompt_needs(config), sums, strict=True)))
    verdict = criterion.within_bounds(criterion.statistic(statistics))
    if criterion.follows_others:
        # Another criterion on prompts that rejects one rejects all of its responses.
        for other in config.criteria:
            if other.unit == "prompt" and not other.follows_others:
                verdict = verdict & _prompt_verdict(other, prompts, config)
    return verdict
