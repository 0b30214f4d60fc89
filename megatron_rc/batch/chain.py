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
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.batch.compiled import BlockResult, compiled_block
from megatron_rc.correction.history import history_values
from megatron_rc.correction.inputs import AgreedCounts, PlanInputs, Shards, Tensors, check_needs, collect_shards
from megatron_rc.correction.sequences import (
    BlockReductions,
    SequenceDecisions,
    SequenceSums,
    accepted_masks,
    decide_sequences,
    join_blocks,
    prompt_columns,
    sum_block,
)
from megatron_rc.correction.tokens import Tokens, decide_tokens, token_blocks
from megatron_rc.correction.weights import normalization
from megatron_rc.measures.data import check_data, first_bad_keys, key_ids
from megatron_rc.measures.distributions import derive_distributions
from megatron_rc.measures.header import BatchHeader, LocalSums, measure_batch
from megatron_rc.measures.histogram import NUM_BINS, Distribution, add_to_bins
from megatron_rc.measures.shift import distances
from megatron_rc.measures.table import derive_metrics, sequence_eff_sample_size
from megatron_rc.measures.tokens import measure_tokens, measured_tokens
from megatron_rc.parallel.collectives import Pair, on_host, pack, reduce_columns, reduce_pair, unpack
from megatron_rc.parallel.groups import Group, ParallelGroups
from megatron_rc.parallel.layout import Block, Layouts, SequenceLayout
from megatron_rc.settings.config import RolloutCorrectionConfig, wrong_config


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
    inputs = PlanInputs(
        train_log_probs=train_log_probs,
        rollout_log_probs=rollout_log_probs,
        response_mask=response_mask,
        layout=layout,
        advantages=advantages,
        rewards=rewards,
        group_ids=group_ids,
        sequence_ids=sequence_ids,
        policy_versions=policy_versions,
        mini_batch_ids=mini_batch_ids,
        turn_ids=turn_ids,
    )
    shards = collect_shards(inputs, counts, groups)
    local = sequence_sums(shards, config, cp=groups.cp, compile=compile)
    sequences = reduce_sequences(local.pair, groups, [part.layout for part in shards.parts])
    prompts = None
    if config.needs_prompts:
        prompts = reduce_groups(group_sums(local, sequences), groups)
    batch = batch_sums(local, sequences, prompts)
    return finish(batch, reduce_batch(batch.pair, groups), allow_zero_log_probs=allow_zero_log_probs)


@dataclass(frozen=True, eq=False)
class CorrectionResult:
    """Weights and mask of the local tokens, and the numbers of the whole batch.

    Weights, mask and lengths are None on pipeline stages without log-probs.

    Attributes:
        config: the correction.
        header: the numbers of the whole batch, on the device; equal on every rank.
        weights: like ``response_mask`` (a list if that was one): the importance weights of the loss, detached, 0
            outside of the mask. None if the config applies none (also bypass ``ppo_clip``, whose ratio holds them).
        measured_weights: like ``weights``, also if the config measures weights and applies them to nothing.
        mask: like ``response_mask``, bool: the accepted tokens m'.
        sequence_lengths: [n] float64: tokens of each local sequence in the loss's denominator.
        allow_zero_log_probs: ``check()`` takes sequences whose rollout log-probs sum to exactly 0.
    """

    config: RolloutCorrectionConfig
    header: BatchHeader[Tensor]
    weights: Tensor | list[Tensor] | None = None
    measured_weights: Tensor | list[Tensor] | None = None
    mask: Tensor | list[Tensor] | None = None
    sequence_lengths: Tensor | None = None
    allow_zero_log_probs: bool = False

    @property
    def denominators(self) -> Tensor:
        """[num_mini_batches, 4] float64: tokens and sequences under the response mask, then under m'."""
        counts: Tensor = self.header.denominators.counts
        return counts

    @property
    def accepted_tokens(self) -> Tensor:
        """[num_mini_batches] float64: tokens under m'."""
        return self.denominators[:, 2]

    @property
    def skip(self) -> Tensor:
        """[num_mini_batches] bool: no token is accepted, the optimizer step must not be made."""
        return self.accepted_tokens == 0

    def check(self) -> None:
        """Raise the same error on every rank if any rank held data that cannot be right.

        Host synchronisations: one, shared with ``metrics()``.

        Raises:
            ValueError: an unusable log-prob at a trained position (unless ``bad_log_probs`` rejects it): names the
                policy, the lowest sample and position, and how many there are. Ids, versions, rewards or advantages out
                of range. Rollout log-probs that are 0 in a whole sequence, or shifted by one position. A configuration
                that differs between ranks.
        """
        header = self.on_host
        check_data(header.data, header.tokens, self.config, allow_zero_log_probs=self.allow_zero_log_probs)

    def metrics(self) -> dict[str, float]:
        """Metrics of the whole batch, equal on every rank; see ``docs/metrics.md``. Raises no data error."""
        return derive_metrics(self.on_host, self.config)

    def distributions(self) -> dict[str, Distribution]:
        """Histograms of log ρ and of the weights over the whole batch, equal on every rank. Raises no data error."""
        return derive_distributions(self.on_host, self.config)

    @property
    def sequence_eff_sample_size(self) -> float:
        """Share of the sequences that unbounded sequence weights leave, equal on every rank. Raises no data error."""
        return sequence_eff_sample_size(self.on_host)

    @functools.cached_property
    def on_host(self) -> BatchHeader[float]:
        """The header on the host: the one synchronisation, made once."""
        header: BatchHeader[float] = on_host(self.header)
        return header


@dataclass(frozen=True)
class BatchSums:
    """The decisions on this rank's tokens, and its part of the whole batch."""

    local: LocalSums  # the local tokens
    sums: SequenceSums  # over whole sequences, reduced over ``cp``
    decisions: SequenceDecisions  # on whole sequences
    mask: list[Tensor]  # m' of each micro-batch

    @functools.cached_property
    def header(self) -> BatchHeader[Tensor]:
        """This rank's part of the numbers of the whole batch, measured when it is first asked for."""
        return measure_batch(self.local, self.sums, self.decisions, self.mask)

    @property
    def pair(self) -> Pair:
        """([sums], [maxima]), to be reduced over ``dp_cp``."""
        return pack(self.header)

    @property
    def sequence_lengths(self) -> Tensor:
        """[n] float64: n_i, the tokens of each local sequence under D."""
        accepted = self.local.config.rejection_denominator == "accepted"
        return self.decisions.accepted_tokens if accepted else self.decisions.tokens

    def weights(self, factor: Tensor | None = None) -> list[Tensor] | None:
        """Return the bounded weights of each micro-batch, times ``factor`` = 1 / w̄; None without weights."""
        shards = self.local.shards
        shared = self.decisions.weights
        if shared is not None:
            per_sequence = shared.bounded if factor is None else shared.bounded * factor
            per_sequence = per_sequence.to(shards.dtype)
            return [
                torch.where(valid, part.expand(per_sequence), 0)
                for part, valid in zip(shards.parts, self.local.valid, strict=True)
            ]
        if self.local.weights is None:
            return None
        weights = self.local.weights
        if factor is not None:
            weights = [part_weights * factor.to(part_weights.dtype) for part_weights in weights]
        return [part_weights.to(shards.dtype) for part_weights in weights]


def sequence_sums(
    shards: Shards, config: RolloutCorrectionConfig, *, cp: Group | None = None, compile: bool = False
) -> LocalSums:
    """Decide on each local token by itself, and sum up what whole sequences and metrics need of the tokens.

    The first link of the chain. It works block by block, so that its scratch memory does not grow with their number.

    Args:
        shards: the local tokens.
        config: the correction.
        cp: the group of ranks that hold the other slices of the sequences. Needed for weights of prefixes or turns, and
            for criteria on turns; all else is decided without it.
        compile: run blocks of equally long sequences through ``torch.compile``.

    Returns:
        The sums over the local tokens of each sequence, whose ``pair`` is to be reduced over ``cp``; with the masks and
        weights of the tokens, and measures of all local tokens, for the next links.

    Collectives: none; over ``cp`` one SUM for weights of prefixes, two for turns.

    Raises:
        ValueError: the config is not a RolloutCorrectionConfig; it needs advantages, prompts or versions that are not
            given; or it needs other slices, and ``cp`` is not given.
    """
    if not isinstance(config, RolloutCorrectionConfig):
        raise wrong_config(config)
    has_advantages = shards.advantages is not None or shards.parts[0].advantages is not None
    check_needs(config, shards.counts, has_advantages=has_advantages)

    has_token_criteria = any(criterion.of_tokens for criterion in config.criteria)
    valid = _TokenResults(shards)
    passed = _TokenResults(shards)
    weights = _TokenResults(shards)
    history = history_values(shards, config, cp) if config.needs_history else None
    ids = key_ids(shards)
    compiled_shape = None
    bins = torch.zeros(NUM_BINS, dtype=torch.float64, device=shards.device)
    sums_of_blocks = []
    distances_of_blocks = []
    bad_keys = []  # for each block the two keys of its first unusable token
    for index, block, tokens in token_blocks(shards, config, history, compile=compile):
        if compile and block.lengths is None and compiled_shape in (None, tokens.mask.shape):
            # A program is made for one shape: for all blocks of the first shape.
            compiled_shape = tokens.mask.shape
            result = compiled_block(_decide_block, config, tokens.mask.device.type)(tokens)
        else:
            result = _decide_block(tokens, BlockReductions(block.lengths), config)
        valid.put(index, block, result.valid)
        if has_token_criteria:
            passed.put(index, block, result.passed)
        if result.weights is not None:
            weights.put(index, block, result.weights)
        add_to_bins(bins, result.log_ratio)
        bad_keys.append(first_bad_keys(tokens, result.bad, shards.parts[index], block, shards, ids))
        sums_of_blocks.append(result.sums)
        distances_of_blocks.append(result.distances)

    sums = join_blocks(sums_of_blocks)
    one_block = len(sums_of_blocks) == 1
    measures = measure_tokens(
        sums,
        bins=bins,
        distances=distances_of_blocks[0] if one_block else torch.stack(distances_of_blocks).sum(0),
        first_bad_keys=bad_keys[0] if one_block else torch.stack(bad_keys).amin(0),
    )
    return LocalSums(
        shards=shards,
        config=config,
        sums=sums.of_sequences(),
        tokens=measures,
        valid=valid.tensors,
        passed=passed.tensors if has_token_criteria else valid.tensors,
        weights=weights.tensors if config.weighs_tokens else None,
    )


class _TokenResults:
    """A result of each token, one tensor a micro-batch, from the results of its blocks.

    Attributes:
        tensors: in the micro-batches' shapes.
    """

    def __init__(self, shards: Shards) -> None:
        self._layouts = [part.layout for part in shards.parts]
        self.tensors: list[Tensor] = []

    def put(self, index: int, block: Block, values: Tensor) -> None:
        """Add the results of the next block, of the micro-batch with this index."""
        shape = self._layouts[index].shape
        if values.numel() == math.prod(shape):
            self.tensors.append(values.view(shape))
            return
        if index == len(self.tensors):
            self.tensors.append(torch.empty(shape, dtype=values.dtype, device=values.device))
        block.take(self.tensors[index]).copy_(values)


def reduce_sequences(pair: Pair, groups: ParallelGroups, layouts: Sequence[SequenceLayout] = ()) -> Pair:
    """Reduce the pair over whole sequences.

    ``layouts``: the layouts of the micro-batches, in order: needed if one has a CP group of its own. Without them all
    sequences are reduced over ``groups.cp``.

    Collectives: one SUM over each CP group, and one MAX if there are maxima.
    """
    cp_groups = [layout.cp(groups.cp) for layout in layouts] or [groups.cp]
    return reduce_columns(pair, [layout.num_sequences for layout in layouts], cp_groups)


def group_sums(local: LocalSums, sequences: Pair) -> Pair:
    """Return ([num_groups, k], [0]) of this rank's responses, each counted on its first CP rank. Collectives: none."""
    columns = prompt_columns(unpack(local.sums, sequences), local.shards, local.config)
    return columns, columns.new_empty(0)


def reduce_groups(pair: Pair, groups: ParallelGroups) -> Pair:
    """Reduce the pair over all responses of each prompt. Collectives: one SUM over ``dp_cp``."""
    return reduce_pair(pair, groups.dp_cp)


def batch_sums(local: LocalSums, sequences: Pair, prompts: Pair | None = None) -> BatchSums:
    """Return verdicts and accepted masks, and what this rank's part of the batch is measured from. Collectives: none.

    Args:
        local: the local tokens.
        sequences: the pair of ``reduce_sequences``.
        prompts: the pair of ``reduce_groups``; None without criteria on prompts.
    """
    sums = unpack(local.sums, sequences)
    decisions = decide_sequences(sums, local.shards, local.config, None if prompts is None else prompts[0])
    return BatchSums(local, sums, decisions, accepted_masks(local.passed, local.shards, decisions))


def reduce_batch(pair: Pair, groups: ParallelGroups) -> Pair:
    """Reduce the pair over the whole batch. Collectives: one SUM and one MAX over ``dp_cp``."""
    return reduce_pair(pair, groups.dp_cp)


def finish(batch: BatchSums, pair: Pair, *, allow_zero_log_probs: bool = False) -> CorrectionResult:
    """Return the result, from the reduced pair. Collectives: none.

    Args:
        batch: the decisions.
        pair: the pair of ``reduce_batch``.
        allow_zero_log_probs: as in :func:`correct_rollouts`.
    """
    config = batch.local.config
    header = unpack(batch.header, pair)
    factor = None
    if config.rollout_is_batch_normalize:
        factor = normalization(header.denominators.total_weight, header.denominators.weight_count)
    weights = batch.weights(factor)
    is_list = batch.local.shards.is_list
    measured_weights = weights if weights is None or is_list else weights[0]
    return CorrectionResult(
        config=config,
        header=header,
        weights=measured_weights if config.applies_weights else None,
        measured_weights=measured_weights,
        mask=batch.mask if is_list else batch.mask[0],
        sequence_lengths=batch.sequence_lengths,
        allow_zero_log_probs=allow_zero_log_probs,
    )


def empty_header(
    config: RolloutCorrectionConfig, counts: AgreedCounts, device: torch.device | None = None
) -> BatchHeader[Tensor]:
    """Return the header of a rank without a sequence: its form is the one of every rank. Collectives: none."""
    # The form depends on whether there is a version, not on its number, which changes in each step.
    version = None if counts.current_version is None else 0
    return _empty_header(config, dataclasses.replace(counts, current_version=version), device)


@functools.lru_cache(maxsize=16)
def _empty_header(
    config: RolloutCorrectionConfig, counts: AgreedCounts, device: torch.device | None
) -> BatchHeader[Tensor]:
    floats = torch.zeros(0, device=device)
    ids = torch.zeros(0, dtype=torch.int64, device=device)
    log_probs = floats.view(0, 1)
    result = correct_rollouts(
        train_log_probs=log_probs,
        rollout_log_probs=log_probs,
        response_mask=log_probs.bool(),
        config=config,
        advantages=floats,
        group_ids=None if counts.num_groups is None else ids,
        policy_versions=None if counts.current_version is None else ids,
        mini_batch_ids=ids,
        **vars(counts),
    )
    return result.header


def _decide_block(tokens: Tokens, reductions: BlockReductions, config: RolloutCorrectionConfig) -> BlockResult:
    """Decide and measure one block: the arithmetic that may be compiled."""
    decisions = decide_tokens(tokens, config)
    return BlockResult(
        valid=decisions.valid,
        bad=decisions.bad,
        passed=decisions.passed,
        weights=None if decisions.weights is None else decisions.weights.bounded,
        log_ratio=decisions.log_ratio,
        sums=sum_block(tokens, decisions, measured_tokens(decisions, config), reductions, config),
        distances=distances(decisions, reductions),
    )
