"""A rollout batch in pure functions between collectives, on the local shard of one rank.

    sequence_sums → reduce_sequences (cp) → [group_sums → reduce_groups (dp_cp)]
    → batch_sums → reduce_batch (dp_cp) → finish

Each ``reduce_*`` takes and returns one pair (sums, maxima) of float64 tensors. A controller with another transport can
carry the pairs itself: add the sums, take the maxima. No function writes into its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.batch.local import sequence_sums
from megatron_rc.batch.result import CorrectionResult
from megatron_rc.correction.inputs import AgreedCounts, AnyInputs, collect_shards
from megatron_rc.correction.sequences import SequenceSums, sequence_weights
from megatron_rc.correction.verdicts import Verdicts, accepted_masks, decide_sequences, prompt_columns
from megatron_rc.correction.weights import normalization
from megatron_rc.measures.header import BatchHeader
from megatron_rc.measures.sequence_measures import measure_batch
from megatron_rc.measures.token_measures import LocalSums
from megatron_rc.parallel.collectives import Pair, pack, reduce_pair, unpack
from megatron_rc.parallel.groups import ParallelGroups
from megatron_rc.settings.config import RolloutCorrectionConfig


@dataclass(frozen=True)
class BatchSums:
    """The decisions on this rank's tokens, and its part of the whole batch."""

    local: LocalSums  # the local tokens
    sums: SequenceSums  # over whole sequences, reduced over ``cp``
    verdicts: Verdicts  # on whole sequences
    mask: list[Tensor]  # m' of each micro-batch
    header: BatchHeader[Tensor]  # this rank's part of the numbers of the whole batch

    @property
    def pair(self) -> Pair:
        """([sums], [maxima]), to be reduced over ``dp_cp``."""
        return pack(self.header)

    @property
    def sequence_lengths(self) -> Tensor:
        """[n] float64: n_i, the tokens of each local sequence under D."""
        return self.verdicts.accepted if self.local.config.rejection_denominator == "accepted" else self.verdicts.tokens

    def weights(self, factor: Tensor | None = None) -> list[Tensor] | None:
        """The bounded weights of each micro-batch, times 1 / w̄; None without weights."""
        local, shared = self.local, sequence_weights(self.sums, self.local.config)
        if shared is None:
            if local.weights is None or factor is None:
                return local.weights
            return [weights * factor.to(weights.dtype) for weights in local.weights]
        spread = local.shards.expand((shared if factor is None else shared * factor).to(local.shards.dtype))
        return [torch.where(valid, weight, 0) for valid, weight in zip(local.valid, spread, strict=True)]


def reduce_sequences(pair: Pair, groups: ParallelGroups) -> Pair:
    """The pair over whole sequences. Collectives: one SUM over ``cp``, and one MAX if there are maxima."""
    return reduce_pair(pair, groups.cp)


def group_sums(local: LocalSums, sequences: Pair) -> Pair:
    """([num_groups, k], [0]) float64 of this rank's responses, counted on the first CP rank. Collectives: none."""
    sums, _ = unpack((local.sums, local.measures), sequences)
    columns = prompt_columns(sums, local.shards, local.config) * local.shards.is_first_cp_rank
    return columns, columns.new_empty(0)


def reduce_groups(pair: Pair, groups: ParallelGroups) -> Pair:
    """The pair over all responses of each prompt. Collectives: one SUM over ``dp_cp``."""
    return reduce_pair(pair, groups.dp_cp)


def batch_sums(local: LocalSums, sequences: Pair, prompts: Pair | None = None) -> BatchSums:
    """Verdicts, accepted mask, and the local part of the batch's numbers, from reduced pairs. Collectives: none."""
    sums, measures = unpack((local.sums, local.measures), sequences)
    verdicts = decide_sequences(sums, local.shards, local.config, None if prompts is None else prompts[0])
    mask = accepted_masks(local.kept, local.shards, verdicts)
    return BatchSums(local, sums, verdicts, mask, measure_batch(local, sums, measures, verdicts, mask))


def reduce_batch(pair: Pair, groups: ParallelGroups) -> Pair:
    """The pair over the whole batch. Collectives: one SUM and one MAX over ``dp_cp``."""
    return reduce_pair(pair, groups.dp_cp)


def finish(batch: BatchSums, pair: Pair, *, allow_zero_log_probs: bool = False) -> CorrectionResult:
    """The result, from the reduced pair; ``allow_zero_log_probs`` as in :func:`correct_rollouts`. Collectives: none."""
    config, header, factor = batch.local.config, unpack(batch.header, pair), None
    if config.rollout_is_batch_normalize:
        factor = normalization(header.denominators.total_weight, header.denominators.weight_count)
    weights, is_list = batch.weights(factor), batch.local.shards.is_list
    measured = weights if weights is None or is_list else weights[0]
    applied, mask = measured if config.applies_weights else None, batch.mask if is_list else batch.mask[0]
    return CorrectionResult(config, header, applied, measured, mask, batch.sequence_lengths, allow_zero_log_probs)


def local_batch(
    inputs: AnyInputs,
    config: RolloutCorrectionConfig,
    counts: AgreedCounts,
    groups: ParallelGroups,
    *,
    compile: bool = False,
    first_sequence: int = 0,
) -> BatchSums:
    """The chain up to this rank's part of the batch. Collectives: those over ``cp``, and over prompts."""
    shards = collect_shards(inputs, counts, groups, first_sequence=first_sequence)
    local = sequence_sums(shards, config, compile=compile)
    sequences = reduce_sequences(local.pair, groups)
    prompts = reduce_groups(group_sums(local, sequences), groups) if config.needs_prompts else None
    return batch_sums(local, sequences, prompts)


def correct_batch(
    inputs: AnyInputs,
    config: RolloutCorrectionConfig,
    counts: AgreedCounts,
    groups: ParallelGroups,
    *,
    compile: bool = False,
    allow_zero_log_probs: bool = False,
) -> CorrectionResult:
    """The whole chain; arguments as in :func:`correct_rollouts`."""
    batch = local_batch(inputs, config, counts, groups, compile=compile)
    return finish(batch, reduce_batch(batch.pair, groups), allow_zero_log_probs=allow_zero_log_probs)


def empty_header(
    config: RolloutCorrectionConfig, counts: AgreedCounts, device: torch.device | None = None
) -> BatchHeader[Tensor]:
    """The header of a rank without a sequence: its form is the one of every rank. Collectives: none."""
    floats, ids = torch.zeros(0, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    log_probs = floats.view(0, 1)
    inputs = AnyInputs(
        *(log_probs, log_probs, log_probs.bool()),
        advantages=floats,
        group_ids=None if counts.num_groups is None else ids,
        policy_versions=None if counts.current_version is None else ids,
        mini_batch_ids=ids,
    )
    return local_batch(inputs, config, counts, ParallelGroups()).header
