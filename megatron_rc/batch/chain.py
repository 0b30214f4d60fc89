"""``correct_rollouts``, as a chain of pure functions between collectives, on the local shard of one rank.

    sequence_sums → reduce_sequences (cp) → [group_sums → reduce_groups (dp_cp)]
    → batch_sums → reduce_batch (dp_cp) → finish

Each ``reduce_*`` takes and returns one pair (sums, maxima) of float64 tensors. A controller with another transport can
carry the pairs itself: add the sums, take the maxima. No function writes into what it is given; the arithmetic on a
block alone fills its part of the new tensors.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rc.batch.result import CorrectionResult
from megatron_rc.correction.decisions import (
    BlockSequences,
    SequenceDecisions,
    SequenceSums,
    Tokens,
    accepted_masks,
    decide_sequences,
    decide_tokens,
    prompt_columns,
    sum_tokens,
    token_blocks,
)
from megatron_rc.correction.history import history_values
from megatron_rc.correction.inputs import (
    AgreedCounts,
    AnyInputs,
    PlanInputs,
    Shards,
    Tensors,
    check_needs,
    collect_shards,
)
from megatron_rc.correction.weights import normalization
from megatron_rc.measures.header import BatchHeader, SequenceMeasures, TokenSums
from megatron_rc.measures.histogram import CodeCounter, bins_from_codes, codes_of
from megatron_rc.measures.measure import LocalSums, measure_batch, measure_block
from megatron_rc.numerics import stored
from megatron_rc.parallel.collectives import Pair, concatenated, pack, reduce_columns, reduce_pair, unpack
from megatron_rc.parallel.groups import Group, ParallelGroups
from megatron_rc.parallel.layout import Layouts, SequenceLayout
from megatron_rc.settings.config import RolloutCorrectionConfig, wrong_config

# By default the compiler for CPUs makes several loops that read the tokens anew and pass results through memory; with
# these limits out of the way it makes one.
_ONE_LOOP: dict[str, Any] = dict.fromkeys(
    ("realize_opcount_threshold", "realize_reads_threshold", "max_fusion_size", "cpp.max_horizontal_fusion_size"), 10**4
)
# The histogram's code of each token. Of each sequence: sums and measures.
Found = tuple[Tensor, tuple[SequenceSums, SequenceMeasures, TokenSums[Tensor]]]


@torch.no_grad()
def correct_rollouts(
    train_log_probs: Tensors,
    rollout_log_probs: Tensors,
    response_mask: Tensors,
    config: RolloutCorrectionConfig,
    layout: Layouts | None = None,
    groups: ParallelGroups | None = None,
    *,
    advantages: Tensors | None = None,
    rewards: Tensors | None = None,
    group_ids: Tensors | None = None,
    num_groups: int | None = None,
    sequence_ids: Tensors | None = None,
    policy_versions: Tensors | None = None,
    current_version: int | None = None,
    max_staleness: int = 0,
    mini_batch_ids: Tensors | None = None,
    num_mini_batches: int = 1,
    turn_ids: Tensors | None = None,
    allow_zero_log_probs: bool = False,
    compile: bool = False,
) -> CorrectionResult:
    """Importance weights, accepted mask, denominators and metrics of a whole rollout batch.

    Every tensor argument and the layout may be lists with one entry a micro-batch; weights and mask then are lists too.

    Args:
        train_log_probs: log π_train, the layout's local shape, nats, float32 or float64; detached.
        rollout_log_probs: log π_rollout of the same tokens, of the same shape.
        response_mask: bool, of the same shape; values elsewhere change no bit of any result.
        config: the correction.
        layout: which tokens these are. Default: padded ``[b, s]``, whole sequences.
        groups: ``cp`` and ``dp_cp`` hold the other tokens. Default: this process alone.
        advantages: [n], or like the log-probs; ``opsm`` needs them.
        rewards: [n]; rejected shares are reported by their sign.
        group_ids: [n] int64 in [0, num_groups): the prompt of each sequence; group criteria need them.
        num_groups: prompts of the whole batch.
        sequence_ids: [n] int64, unique over DP, below 2²¹; error messages name them. Default: the local index.
        policy_versions: [n] or like the log-probs, int64: the version of the weights that sampled.
        current_version: of the weights that train; staleness is its distance from ``policy_versions``.
        max_staleness: the last bucket of staleness holds this one and all above.
        mini_batch_ids: [n] int64 in [0, num_mini_batches); may be left out with one mini-batch.
        num_mini_batches: optimizer steps that share the batch.
        turn_ids: int64, like the log-probs: consecutive tokens with one id are a turn. Default: each run of trained
            tokens is one.
        allow_zero_log_probs: ``check()`` takes sequences of more than 8 trained tokens whose rollout log-probs sum to
            exactly 0, which only greedy sampling gives. Without it they are an error: the engine returned no log-probs.
        compile: run the pass over padded tokens through ``torch.compile``: seconds for the first call of each shape and
            configuration, then less time. After eight of them (torch's ``recompile_limit``) others run as they are.

    The counts ``num_*``, ``current_version`` and ``max_staleness`` are the same on every rank.

    Returns:
        The result; call its ``check()`` before any optimizer step.

    Collectives: one SUM over ``cp`` (and one MAX with a ``seq_max`` criterion), one SUM and one MAX over ``dp_cp`` (and
    one SUM of ``[num_groups, k]`` with a group criterion); none for a group of size 1. Weights of prefixes add one SUM
    over ``cp``, turns two. The sizes do not depend on the number of tokens.

    Raises:
        ValueError: shapes, dtypes or settings that do not fit together (alike on all ranks).
    """
    groups = ParallelGroups.given(groups)
    counts = AgreedCounts(num_mini_batches, num_groups, current_version, max_staleness)
    per_sequence = (advantages, rewards, group_ids, sequence_ids, policy_versions, mini_batch_ids)
    inputs = PlanInputs(train_log_probs, rollout_log_probs, response_mask, layout, *per_sequence, turn_ids)
    batch = local_batch(inputs, config, counts, groups, compile=compile)
    return finish(batch, reduce_batch(batch.pair, groups), allow_zero_log_probs=allow_zero_log_probs)


@dataclass(frozen=True)
class BatchSums:
    """The decisions on this rank's tokens, and its part of the whole batch."""

    local: LocalSums  # the local tokens
    sums: SequenceSums  # over whole sequences, reduced over ``cp``
    measures: SequenceMeasures  # of the same
    decisions: SequenceDecisions  # on whole sequences
    mask: list[Tensor]  # m' of each micro-batch

    @functools.cached_property
    def header(self) -> BatchHeader[Tensor]:
        """This rank's part of the numbers of the whole batch, measured when it is first asked for."""
        return measure_batch(self.local, self.sums, self.measures, self.decisions, self.mask)

    @property
    def pair(self) -> Pair:
        """([sums], [maxima]), to be reduced over ``dp_cp``."""
        return pack(self.header)

    @property
    def sequence_lengths(self) -> Tensor:
        """[n] float64: n_i, the tokens of each local sequence under D."""
        accepted = self.local.config.rejection_denominator == "accepted"
        return self.decisions.accepted.tokens if accepted else self.decisions.tokens

    def weights(self, factor: Tensor | None = None) -> list[Tensor] | None:
        """The bounded weights of each micro-batch, times 1 / w̄; None without weights."""
        local, shared = self.local, self.decisions.weights
        dtype = local.shards.dtype
        if shared is None:
            if local.weights is None:
                return None
            token_weights = local.weights
            if factor is not None:
                token_weights = [weights * factor.to(weights.dtype) for weights in token_weights]
            return [weights.to(dtype) for weights in token_weights]
        weights = (shared.bounded if factor is None else shared.bounded * factor).to(dtype)
        # Written over the spread weights: a second tensor of their size would be the largest part of the memory.
        pairs = zip(local.valid, local.shards.expand(weights), strict=True)
        return [torch.where(valid, weight, weight.new_zeros(()), out=weight) for valid, weight in pairs]


def sequence_sums(
    shards: Shards, config: RolloutCorrectionConfig, *, cp: Group | None = None, compile: bool = False
) -> LocalSums:
    """Decide and measure the local tokens, block by block.

    Args:
        shards: the local tokens.
        config: the correction.
        cp: the group of the other slices of the sequences, which weights of prefixes and turns, and criteria on turns,
            need alone.
        compile: run blocks of equally long sequences through ``torch.compile``.

    Collectives: none; over ``cp`` one SUM for weights of prefixes, two for turns.

    Raises:
        ValueError: the config needs advantages, prompts or versions that are not there, or other slices without
            ``cp``, or is no config.
    """
    if not isinstance(config, RolloutCorrectionConfig):
        raise wrong_config(config)
    has_advantages = shards.advantages is not None or shards.parts[0].advantages is not None
    check_needs(config, shards.counts, has_advantages=has_advantages)
    shape, records, counter = None, [], CodeCounter(shards.device)
    valid, kept = _room(shards, torch.bool), _room(shards, torch.bool)
    weights = None
    if config.weighs_tokens:
        # Weights of several tokens are rounded to the log-probs' dtype after their normalisation.
        weights = _room(shards, shards.dtype if config.weighs_single_tokens else torch.float64)
    history = history_values(shards, config, cp) if config.needs_history else None
    for number, block, tokens in token_blocks(shards, config, history, compile=compile):
        places = [block.take(room[number]) for room in (valid, kept, weights) if room is not None]
        if compile and block.lengths is None and shape in (None, tokens.mask.shape):
            shape = tokens.mask.shape
            codes, record = _find_compiled(tokens, config, places)
        else:
            codes, record = _find(tokens, BlockSequences(block.lengths), config, places)
        counter.add(codes)
        records.append(record)
        del codes  # before the next block needs room
    sums, measures, per_token = concatenated(records)
    bins = bins_from_codes(counter.counts, sums.valid.sum())
    return LocalSums(shards, config, sums, measures, per_token, bins, valid, kept, weights)


def reduce_sequences(pair: Pair, groups: ParallelGroups, layouts: Sequence[SequenceLayout] = ()) -> Pair:
    """The pair over whole sequences.

    ``layouts``: the layouts of the micro-batches, in order: needed if one has a CP group of its own. Without them all
    sequences are reduced over ``groups.cp``.

    Collectives: one SUM over each CP group, and one MAX if there are maxima.
    """
    own = [layout.cp(groups.cp) for layout in layouts] or [groups.cp]
    return reduce_columns(pair, [layout.num_sequences for layout in layouts], own)


def group_sums(local: LocalSums, sequences: Pair) -> Pair:
    """([num_groups, k], [0]) float64 of this rank's responses, each counted on its first CP rank. Collectives: none."""
    sums, _ = unpack((local.sums, local.measures), sequences)
    columns = prompt_columns(sums, local.shards, local.config)
    return columns, columns.new_empty(0)


def reduce_groups(pair: Pair, groups: ParallelGroups) -> Pair:
    """The pair over all responses of each prompt. Collectives: one SUM over ``dp_cp``."""
    return reduce_pair(pair, groups.dp_cp)


def batch_sums(local: LocalSums, sequences: Pair, prompts: Pair | None = None) -> BatchSums:
    """Verdicts, accepted mask, and the local part of the batch's numbers, from reduced pairs. Collectives: none."""
    sums, measures = unpack((local.sums, local.measures), sequences)
    shards, config = local.shards, local.config
    decisions = decide_sequences(sums, shards, config, None if prompts is None else prompts[0])
    return BatchSums(local, sums, measures, decisions, accepted_masks(local.kept, shards, decisions))


def joined(every: Sequence[BatchSums]) -> BatchSums:
    """Batches of one micro-batch each, of one rank, as one batch. Collectives: none."""
    parts = [one.local for one in every]
    sums, measures, tokens = concatenated([(one.sums, one.measures, one.local.tokens) for one in every])
    bins = torch.stack([one.bins for one in parts]).sum(0)
    valid, kept = ([room for one in parts for room in getattr(one, name)] for name in ("valid", "kept"))
    shards = Shards.joined([one.shards for one in parts])
    local = LocalSums(shards, parts[0].config, sums, measures, tokens, bins, valid, kept, None)
    return batch_sums(local, local.pair)


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
    inputs: AnyInputs, config: RolloutCorrectionConfig, counts: AgreedCounts, groups: ParallelGroups, *, compile: bool
) -> BatchSums:
    """The chain up to this rank's part of the batch. Collectives: those over ``cp``, and over prompts."""
    shards = collect_shards(inputs, counts, groups)
    local = sequence_sums(shards, config, cp=groups.cp, compile=compile)
    sequences = reduce_sequences(local.pair, groups, [part.layout for part in shards.parts])
    prompts = reduce_groups(group_sums(local, sequences), groups) if config.needs_prompts else None
    return batch_sums(local, sequences, prompts)


def empty_header(
    config: RolloutCorrectionConfig, counts: AgreedCounts, device: torch.device | None = None
) -> BatchHeader[Tensor]:
    """The header of a rank without a sequence: its form is the one of every rank. Collectives: none."""
    # The form depends on whether there is a version, not on its number, which changes in each step.
    version = None if counts.current_version is None else 0
    return _empty_header(config, dataclasses.replace(counts, current_version=version), device)


@functools.lru_cache(maxsize=16)
def _empty_header(
    config: RolloutCorrectionConfig, counts: AgreedCounts, device: torch.device | None
) -> BatchHeader[Tensor]:
    floats, ids = torch.zeros(0, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    log_probs = floats.view(0, 1)
    inputs = AnyInputs(
        *(log_probs, log_probs, log_probs.bool()),
        advantages=floats,
        group_ids=None if counts.num_groups is None else ids,
        policy_versions=None if counts.current_version is None else ids,
        mini_batch_ids=ids,
    )
    return local_batch(inputs, config, counts, ParallelGroups(), compile=False).header


def _find(
    tokens: Tokens, sequences: BlockSequences, config: RolloutCorrectionConfig, places: Sequence[Tensor]
) -> Found:
    """The arithmetic on one block: plain expressions, also inside ``torch.compile``.

    ``places`` are filled: with valid tokens, with kept tokens, and with weights if these are token-level.
    """
    decisions = decide_tokens(tokens, config)
    sums = sum_tokens(tokens, decisions, sequences, config)
    measures = measure_block(decisions, sequences, config)
    weights = [] if decisions.weights is None else [decisions.weights.bounded]
    for place, values in zip(places, [stored(decisions.valid), stored(decisions.kept), *weights], strict=True):
        place.copy_(values)
    return codes_of(decisions.log_ratio), (sums, *measures)  # invalid tokens have the code of 0


def _find_compiled(tokens: Tokens, config: RolloutCorrectionConfig, places: Sequence[Tensor]) -> Found:
    """``_find`` through ``torch.compile``, which makes a program for one shape: for all blocks of the first shape."""
    zero = torch.zeros(len(tokens.mask), 1, dtype=torch.float32, device=tokens.mask.device)
    places = [place.view(torch.uint8) if place.dtype == torch.bool else place for place in places]
    given = vars(tokens) | {"mask": tokens.mask.view(torch.uint8)}
    found: Found = _compiled(config, zero.device.type)(zero, places, *given.values())
    return found


@functools.lru_cache(maxsize=64)
def _compiled(config: RolloutCorrectionConfig, device: str) -> Callable[..., Any]:
    """The program as a function of tensors alone: fields of records would be looked at before every call.

    A compiler vectorises reads and writes of uint8, not of bool. It makes one loop of everything only if each token's
    result depends on the sequence, as the sums do: so ``zero``, [n, 1], is in the mask.
    """

    def program(
        zero: Tensor, places: Sequence[Tensor], train: Tensor, rollout: Tensor, mask: Tensor, *others: Any
    ) -> Found:
        tokens = Tokens(train, rollout, mask.float() + zero != 0, *others)
        return _find(tokens, BlockSequences(), config, places)

    compiled: Callable[..., Any] = torch.compile(program, dynamic=False, options=_ONE_LOOP if device == "cpu" else None)
    return compiled


def _room(shards: Shards, dtype: torch.dtype) -> list[Tensor]:
    """An empty tensor for a result of each token, one a micro-batch."""
    return [torch.empty(part.layout.shape, dtype=dtype, device=part.mask.device) for part in shards.parts]
