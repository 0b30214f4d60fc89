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
    sequence_totals,
    weighed_counts,
)
from megatron_rc.correction.checks.bad_tokens import first_bad_key
from megatron_rc.correction.checks.shift import shift_sums
from megatron_rc.correction.header import Columns, HeaderFields, normalization_sums
from megatron_rc.correction.header_fields import header_fields
from megatron_rc.correction.header_records import Source
from megatron_rc.correction.inputs import AgreedCounts, AnyInputs
from megatron_rc.correction.local_tokens import (
    LocalSums,
    Pair,
    accept_part,
    finish_weights,
    sequence_sums,
    token_sides,
    weighed_tokens,
)
from megatron_rc.correction.rejection import Verdicts, decide, local_prompt_sums
from megatron_rc.correction.result import CorrectionResult
from megatron_rc.correction.shards import collect_shards
from megatron_rc.correction.token_pass.terms import Sums
from megatron_rc.correction.weights import normalization
from megatron_rc.parallel.collectives import all_reduce_max, all_reduce_sum
from megatron_rc.parallel.groups import Group, ParallelGroups
from megatron_rc.settings.config import RolloutCorrectionConfig


@dataclass(frozen=True)
class AcceptedTokens:
    """The verdicts on whole sequences, and the tokens that they are about: all that a loss needs.

    Attributes:
        local: of the first pass. After :func:`accept` its ``kept`` is the accepted mask m'; after :func:`judge` it is
            as it was.
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
            finish_weights(local, self.named, factor)
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
            accept_part(part, mask, tokens.verdicts)
    return tokens


def judge(local: LocalSums, sequences: Pair, prompts: Pair | None = None) -> AcceptedTokens:
    """The verdicts on whole sequences alone, for tokens whose accepted mask is known already."""
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
    sums |= {Source.TOKENS: local.sums.batch, "shift": shift_sums(shards.parts)}
    sums["bins_until"] = local.sums.bins.cumsum(0)
    sums["weighed"] = extremes.new_zeros(0)
    if config.may_weigh_nothing:
        sums["weighed"] = weighed_counts(weighed_tokens(local, named), shards)
    for column, value in token_sides(local, fields).items():
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
    inputs: AnyInputs,
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
    inputs: AnyInputs,
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


def _reduce(pair: Pair, group: Group | None) -> Pair:
    sums, maxima = pair
    return all_reduce_sum(sums, group), all_reduce_max(maxima, group) if len(maxima) else maxima
