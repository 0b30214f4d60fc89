"""The correction as pure functions between collectives, on the local shard of one rank.

    sequence_sums → reduce_sequences (cp) → [group_sums → reduce_groups (dp_cp)] → batch_sums → reduce_batch (dp_cp) →
    finish

Each ``reduce_*`` takes and returns one pair (sum, max) of float64 tensors, so that a controller with another transport
can carry the pairs itself: add the sums, take the maxima.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.correction.batch_sums import (
    breakdown_totals,
    data_totals,
    mini_batch_counts,
    sequence_log_weights,
    sequence_totals,
    token_staleness,
    weighed_counts,
)
from megatron_rc.correction.checks.bad_tokens import first_bad_key
from megatron_rc.correction.checks.shift import shift_sums
from megatron_rc.correction.header import Columns, HeaderFields, header_fields, normalization_sums
from megatron_rc.correction.header_records import Source
from megatron_rc.correction.inputs import AgreedCounts, Part, PlanInputs, Shards, collect_shards
from megatron_rc.correction.rejection import Verdicts, decide, local_prompt_sums, threshold_scale
from megatron_rc.correction.result import CorrectionResult
from megatron_rc.correction.token_pass.accumulator import Accumulator, ShardSums
from megatron_rc.correction.token_pass.blocks import BlockPass
from megatron_rc.correction.token_pass.terms import Sums, term_names
from megatron_rc.correction.token_pass.token_block import BlockTokens, TokenResults
from megatron_rc.correction.weights import bounded_weights, normalization
from megatron_rc.numerics import is_log_prob
from megatron_rc.parallel.blocks import Block
from megatron_rc.parallel.collectives import all_reduce_max, all_reduce_sum
from megatron_rc.parallel.groups import Group, ParallelGroups
from megatron_rc.settings.config import RolloutCorrectionConfig

Pair = tuple[Tensor, Tensor]
# Tokens of one block, at least and at most: a sixth of the shard, so that the scratch stays below a tensor of its
# size, and no more than stays in a CPU's cache.
MIN_BLOCK, MAX_BLOCK = 2**16, 2**18


@dataclass(frozen=True)
class LocalSums:
    """What this rank knows of its own tokens.

    Attributes:
        shards: the input.
        config: what to correct.
        sums: over the local parts of whole sequences, and over the local tokens.
        weights: for each micro-batch, like its tokens: bounded at token level, else 1 where valid; None without
            weights.
        kept: for each micro-batch the valid tokens that the token-level criteria accept.
    """

    shards: Shards
    config: RolloutCorrectionConfig
    sums: ShardSums
    weights: tuple[Tensor, ...] | None
    kept: tuple[Tensor, ...]

    @property
    def pair(self) -> Pair:
        """([sums, n], [maxima, n]) float64: what ``cp`` adds up."""
        return self.sums.sequences, self.sums.sequence_max

    def named(self, pair: Pair) -> Sums:
        """What is known of whole sequences, [n] float64 by name, from the reduced pair; maxima as ``max_<name>``.

        ``num_tokens`` is the number of valid tokens, at least 1, ``log_ratio`` the sum of log ρ over them and
        ``mean_log_ratio`` its mean.
        """
        named = dict(zip(self.sums.names, [*pair[0].unbind(), *pair[1].unbind()], strict=True))
        named["num_tokens"] = named["valid"].clamp(min=1)
        named["log_ratio"] = named["train"] - named["rollout"]
        named["mean_log_ratio"] = named["log_ratio"] / named["num_tokens"]
        return named


@dataclass(frozen=True)
class AcceptedTokens:
    """The verdicts on whole sequences and tokens: all that a loss needs.

    Attributes:
        local: of the first pass; ``kept`` is by now the accepted mask m'.
        sequences: what is known of whole sequences, reduced over ``cp``.
        named: the same by name, [n] float64 each.
        verdicts: on whole sequences.
    """

    local: LocalSums
    sequences: Pair
    named: Sums
    verdicts: Verdicts

    def spread(self, factor: Tensor | None) -> tuple[list[Tensor] | None, list[Tensor], Tensor]:
        """(weights, mask, n_i) of the local micro-batches; the weights are multiplied by the factor, in place."""
        local, verdicts, weights = self.local, self.verdicts, None
        if local.weights is not None and local.config.rollout_is_apply:
            _finish_weights(local, self.named, factor)
            weights = list(local.weights)
        accepted = local.config.rejection_denominator == "accepted"
        return weights, list(local.kept), verdicts.accepted if accepted else verdicts.tokens


@dataclass(frozen=True)
class BatchSums:
    """What this rank adds to the whole batch.

    Attributes:
        tokens: the local tokens, with their verdicts.
        fields: of the header.
        sums: its columns, float64.
        maxima: likewise.
    """

    tokens: AcceptedTokens
    fields: HeaderFields
    sums: Columns
    maxima: Columns

    @property
    def pair(self) -> Pair:
        """([sums], [maxima]): what ``dp_cp`` adds up."""
        return self.fields.pack(self.sums, self.maxima)


def sequence_sums(shards: Shards, config: RolloutCorrectionConfig, *, compile: bool = False) -> LocalSums:
    """The pass over the local tokens. Collectives: none.

    Args:
        shards: the local tokens.
        config: what to correct.
        compile: run the pass over padded tokens through ``torch.compile``.

    Raises:
        ValueError: a criterion needs advantages or group ids that are not there.
    """
    _check_needs(shards, config)
    weights: list[Tensor] | None = None
    if config.rollout_is is not None:
        weights = [torch.empty(part.layout.shape, dtype=shards.dtype, device=shards.device) for part in shards.parts]
    kept = [torch.empty_like(part.mask, memory_format=torch.contiguous_format) for part in shards.parts]
    names = term_names(config, any(part.advantages is not None for part in shards.parts))
    total, values_of = Accumulator(shards, names), BlockPass(config, names, compile)
    for index, part in enumerate(shards.parts):
        for block in _blocks(part, compile):
            tokens = BlockTokens(
                *_log_probs(part, block, shards.dtype),
                block.take(part.mask),
                None if part.advantages is None else block.take(part.advantages) < 0,
                _levels(part, block, shards, config),
            )
            results = TokenResults(None if weights is None else block.take(weights[index]), block.take(kept[index]))
            total.add(values_of(tokens, results, block), _rows(part, block))
    return LocalSums(
        shards=shards,
        config=config,
        sums=total.sums(),
        weights=None if weights is None else tuple(weights),
        kept=tuple(kept),
    )


def reduce_sequences(pair: Pair, groups: ParallelGroups) -> Pair:
    """The pair over whole sequences. Collectives: one SUM over ``cp``, and one MAX where there are maxima."""
    return _reduce(pair, groups.cp)


def group_sums(local: LocalSums, sequences: Pair) -> Pair:
    """([num_groups, k], [0]) float64 of this rank's responses, counted on the first CP rank. Collectives: none."""
    sums = local_prompt_sums(local.named(sequences), local.shards, local.config)
    return sums * local.shards.is_first_cp_rank, sums.new_empty(0)


def reduce_groups(pair: Pair, groups: ParallelGroups) -> Pair:
    """The pair over all responses of each prompt. Collectives: one SUM over ``dp_cp``."""
    return _reduce(pair, groups.dp_cp)


def batch_sums(local: LocalSums, sequences: Pair, prompts: Pair | None = None) -> BatchSums:
    """Verdicts on whole sequences, the accepted mask, and the local part of the batch's sums. Collectives: none.

    Args:
        local: of this rank; its ``kept`` becomes the accepted mask.
        sequences: reduced over ``cp``.
        prompts: reduced over ``dp_cp``; needed with criteria of prompts.
    """
    return add_up(accept(local, sequences, prompts))


def accept(local: LocalSums, sequences: Pair, prompts: Pair | None = None) -> AcceptedTokens:
    """The first half of ``batch_sums``: the verdicts, and the accepted mask in the place of ``kept``."""
    tokens = judge(local, sequences, prompts)
    if local.config.rejects_sequences:
        for part, mask in zip(local.shards.parts, local.kept, strict=True):
            _accept_part(part, mask, tokens.verdicts)
    return tokens


def judge(local: LocalSums, sequences: Pair, prompts: Pair | None = None) -> AcceptedTokens:
    """The verdicts on whole sequences; ``kept`` stays as it is."""
    named = local.named(sequences)
    verdicts = decide(named, local.shards, local.config, None if prompts is None else prompts[0])
    return AcceptedTokens(local, sequences, named, verdicts)


def add_up(tokens: AcceptedTokens) -> BatchSums:
    """The second half of ``batch_sums``: the local part of the batch's sums. Collectives: none."""
    local, named, verdicts = tokens.local, tokens.named, tokens.verdicts
    shards, config = local.shards, local.config
    fields = header_fields(config, shards.counts)
    sums, extremes = sequence_totals(named, verdicts, config, fields)
    sums |= breakdown_totals(named, verdicts, shards)
    sums |= {Source.DATA: data_totals(named, shards, fields), "mini_batches": mini_batch_counts(verdicts, shards)}
    # Whole sequences are counted once: on the first CP rank.
    if not shards.is_first_cp_rank:
        sums = {column: torch.zeros_like(value) for column, value in sums.items()}
    sums |= {Source.TOKENS: local.sums.batch, "bins": local.sums.bins, Source.SHIFT: shift_sums(shards.parts)}
    sums["weighed"] = weighed_counts(_weighed(tokens), shards) if config.may_weigh_nothing else extremes.new_zeros(0)
    for column, value in _token_sides(local, fields).items():
        sums[column] = sums[column] + value
    maxima: Columns = {
        Source.SEQUENCE_MAXIMA: extremes,
        Source.TOKEN_MAXIMA: local.sums.batch_max,
        Source.KEY: -first_bad_key(shards, named["response"] - named["valid"]),
    }
    return BatchSums(tokens, fields, sums, maxima)


def reduce_batch(pair: Pair, groups: ParallelGroups) -> Pair:
    """The pair over the whole batch. Collectives: one SUM and one MAX over ``dp_cp``."""
    return _reduce(pair, groups.dp_cp)


def finish(batch: BatchSums, pair: Pair, *, allow_zero_log_probs: bool = False) -> CorrectionResult:
    """Normalise and lay out the weights, once: they are finished in place. Collectives: none.

    Args:
        batch: of this rank.
        pair: reduced over ``dp_cp``.
        allow_zero_log_probs: as :func:`correct_rollouts` has it.
    """
    config, header, factor = batch.tokens.local.config, torch.cat(pair), None
    if config.rollout_is_batch_normalize:
        factor = normalization(*normalization_sums(batch.fields, header))
    weights, mask, lengths = batch.tokens.spread(factor)
    is_list = batch.tokens.local.shards.is_list
    return CorrectionResult(
        config,
        batch.fields,
        header,
        weights=weights if weights is None or is_list else weights[0],
        mask=mask if is_list else mask[0],
        sequence_lengths=lengths,
        allow_zero_log_probs=allow_zero_log_probs,
    )


def accepted_tokens(
    inputs: PlanInputs,
    config: RolloutCorrectionConfig,
    counts: AgreedCounts,
    groups: ParallelGroups,
    *,
    compile: bool = False,
) -> AcceptedTokens:
    """The chain up to the verdicts. Collectives: those over ``cp``, and over prompts."""
    local = sequence_sums(collect_shards(inputs, counts, groups), config, compile=compile)
    sequences = reduce_sequences(local.pair, groups)
    prompts = reduce_groups(group_sums(local, sequences), groups) if config.needs_prompts else None
    return accept(local, sequences, prompts)


def corrected_batch(
    inputs: PlanInputs,
    config: RolloutCorrectionConfig,
    counts: AgreedCounts,
    groups: ParallelGroups,
    *,
    compile: bool = False,
    allow_zero_log_probs: bool = False,
) -> CorrectionResult:
    """The whole chain; see :func:`correct_rollouts`."""
    batch = add_up(accepted_tokens(inputs, config, counts, groups, compile=compile))
    return finish(batch, reduce_batch(batch.pair, groups), allow_zero_log_probs=allow_zero_log_probs)


def _check_needs(shards: Shards, config: RolloutCorrectionConfig) -> None:
    has_advantages = shards.advantages is not None or all(part.advantages is not None for part in shards.parts)
    for criterion in config.criteria:
        if criterion.only_negative and not has_advantages:
            raise ValueError(
                f"rollout_rs={criterion.name} needs advantages: pass advantages=, one a sequence or one a token"
            )
    if config.needs_prompts and shards.prompt_ids is None:
        needed = ", ".join(criterion.name for criterion in config.criteria if criterion.unit == "prompt")
        raise ValueError(f"rollout_rs={needed} needs the prompt of each sequence: pass group_ids= and num_groups=")
    check_version_given(config, shards.counts)


def check_version_given(config: RolloutCorrectionConfig, counts: AgreedCounts) -> None:
    """Raise ValueError where the config looks at staleness and nobody knows it; sees what every stage can see."""
    if counts.current_version is not None:
        return
    for name in ("rollout_staleness_scale", "proximal_interpolation"):
        if not getattr(config, name):
            continue
        raise ValueError(
            f"{name}={getattr(config, name)!r} needs the versions of the weights: pass "
            "policy_versions= and current_version="
        )


def _blocks(part: Part, compile: bool = False) -> list[Block]:
    # A compiled pass has less scratch, and more to do for each call.
    most = part.mask.numel() // (4 if compile else 6)
    return part.layout.blocks(min(max(most, MIN_BLOCK), MAX_BLOCK * (4 if compile else 1)))


def _accept_part(part: Part, kept: Tensor, verdicts: Verdicts) -> None:
    """Turn ``kept`` of one micro-batch into the accepted mask, in place."""
    for block in _blocks(part):
        here, rows = block.take(kept), _rows(part, block)
        here &= block.expand(verdicts.accept[rows])
        if part.advantages is not None and verdicts.accept_negative is not None:
            here &= block.expand(verdicts.accept_negative[rows]) | ~(block.take(part.advantages) < 0)


def _token_sides(local: LocalSums, fields: HeaderFields) -> Columns:
    """What is to be added where tokens have advantages or versions of their own."""
    sums: Columns = {}
    parts = local.shards.parts
    if all(part.versions is None and part.advantages is None for part in parts):
        return sums
    nothing = torch.zeros((), dtype=torch.float64, device=local.shards.device)
    bad = dict.fromkeys(fields.names(Source.DATA), nothing)
    for part, mask in zip(parts, local.kept, strict=True):
        for block in _blocks(part):
            if part.advantages is not None:
                infinite = ~block.take(part.advantages).isfinite()
                bad["data.advantages"] = bad["data.advantages"] + (block.take(part.mask) & infinite).sum()
            if part.versions is not None:
                valid, log_ratio = _valid_log_ratio(part, block, local.shards.dtype)
                accepted, versions = block.take(mask), block.take(part.versions)
                table, newer = token_staleness(valid, log_ratio, accepted, versions, local.shards)
                sums["by_staleness"] = sums["by_staleness"] + table if "by_staleness" in sums else table
                bad["data.policy_versions"] = bad["data.policy_versions"] + newer
    return sums | {Source.DATA: fields.stack(Source.DATA, bad)}


def _rows(part: Part, block: Block) -> slice:
    """The sequences of a block among those of all micro-batches."""
    return slice(part.first + block.first, part.first + block.first + block.rows)


def _valid_log_ratio(part: Part, block: Block, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(valid tokens, log ρ, 0 elsewhere)."""
    train, rollout = _log_probs(part, block, dtype)
    valid = block.take(part.mask) & is_log_prob(train) & is_log_prob(rollout)
    return valid, torch.where(valid, train - rollout, 0)


def _log_probs(part: Part, block: Block, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return block.take(part.train).to(dtype), block.take(part.rollout).to(dtype)


def _levels(part: Part, block: Block, shards: Shards, config: RolloutCorrectionConfig) -> Tensor | None:
    """int64, of the block's shape: which factor of the staleness scale is each token's."""
    if config.staleness_scale is None:
        return None
    if part.versions is not None:
        versions = block.take(part.versions)
    elif shards.versions is not None:
        versions = block.expand(shards.versions[_rows(part, block)]).expand(block.shape)
    else:
        raise ValueError("a staleness scale needs versions")
    return config.staleness_scale.levels((shards.counts.current_version or 0) - versions)


def _finish_weights(local: LocalSums, named: Sums, factor: Tensor | None) -> None:
    """Spread the weights of sequences over their tokens, and normalise, in place."""
    per_sequence = shared_weights(local, named)
    if per_sequence is not None and factor is not None:
        per_sequence = per_sequence * factor
    for part, weights in zip(local.shards.parts, local.weights or (), strict=True):
        if per_sequence is None:
            if factor is not None:
                weights *= factor
            continue
        for block in _blocks(part):
            block.take(weights).mul_(block.expand(per_sequence[_rows(part, block)].to(weights.dtype)))


def _weighed(tokens: AcceptedTokens) -> Tensor:
    """[n] float64: the accepted tokens of the local parts of sequences whose weight is not 0."""
    local = tokens.local
    shared = shared_weights(local, tokens.named)
    parts = zip(local.shards.parts, local.kept, local.weights or (), strict=True)
    counts = torch.cat([part.layout.sum_sequences(kept & (weights != 0)) for part, kept, weights in parts])
    return counts if shared is None else counts * (shared != 0)


def shared_weights(local: LocalSums, named: Sums) -> Tensor | None:
    """[n] float64: the bounded weight that all tokens of a sequence share; None at token level, and without weights."""
    config = local.config
    if config.rollout_is not in ("sequence", "geometric"):
        return None
    return bounded_weights(sequence_log_weights(named, config), config, scale=threshold_scale(named, config))


def _reduce(pair: Pair, group: Group | None) -> Pair:
    sums, maxima = pair
    return all_reduce_sum(sums, group), all_reduce_max(maxima, group) if len(maxima) else maxima
