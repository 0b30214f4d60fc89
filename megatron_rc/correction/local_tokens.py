"""What one rank knows of its own tokens: the pass over them, and what verdicts on whole sequences make of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.correction.batch_sums import sequence_log_weights, token_staleness
from megatron_rc.correction.header import Columns, HeaderFields
from megatron_rc.correction.header_records import Source
from megatron_rc.correction.inputs import AgreedCounts
from megatron_rc.correction.rejection import Verdicts, threshold_scale
from megatron_rc.correction.shards import Part, Shards
from megatron_rc.correction.token_pass.accumulator import Accumulator, ShardSums
from megatron_rc.correction.token_pass.dispatch import BlockPass
from megatron_rc.correction.token_pass.operations import BlockTokens, TokenResults
from megatron_rc.correction.token_pass.terms import Sums, term_names
from megatron_rc.correction.weights import bounded_weights
from megatron_rc.numerics import is_log_prob
from megatron_rc.parallel.blocks import Block
from megatron_rc.settings.config import RolloutCorrectionConfig, check_config

Pair = tuple[Tensor, Tensor]
# Tokens of one block, at least and at most: a sixth of the shard, so that the scratch stays below a tensor of its
# size, and no more than stays in a CPU's cache.
MIN_BLOCK, MAX_BLOCK = 2**16, 2**18
GPU_BLOCK = 2**22  # tokens that keep a GPU busy for as long as the host takes to ask for the next operation


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


def sequence_sums(shards: Shards, config: RolloutCorrectionConfig, *, compile: bool = False) -> LocalSums:
    """The pass over the local tokens. Collectives: none.

    Args:
        shards: the local tokens.
        config: what to correct.
        compile: run the pass over padded tokens through ``torch.compile``.

    Raises:
        ValueError: a criterion needs advantages or group ids that are not there, or ``config`` is no config.
    """
    check_config(config)
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
    if part.mask.device.type != "cpu":
        return part.layout.blocks(GPU_BLOCK)
    # A compiled pass has less scratch, and more to do for each call.
    most = part.mask.numel() // (4 if compile else 6)
    return part.layout.blocks(min(max(most, MIN_BLOCK), MAX_BLOCK * (4 if compile else 1)))


def accept_part(part: Part, kept: Tensor, verdicts: Verdicts) -> None:
    """Turn ``kept`` of one micro-batch into the accepted mask, in place."""
    for block in _blocks(part):
        here, rows = block.take(kept), _rows(part, block)
        here &= block.expand(verdicts.accept[rows])
        if part.advantages is not None and verdicts.accept_negative is not None:
            here &= block.expand(verdicts.accept_negative[rows]) | ~(block.take(part.advantages) < 0)


def token_sides(local: LocalSums, fields: HeaderFields) -> Columns:
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


def finish_weights(local: LocalSums, named: Sums, factor: Tensor | None) -> None:
    """Spread the weights of sequences over their tokens, and normalise, in place."""
    per_sequence = _shared_weights(local, named)
    if per_sequence is not None and factor is not None:
        per_sequence = per_sequence * factor
    for part, weights in zip(local.shards.parts, local.weights or (), strict=True):
        if per_sequence is None:
            if factor is not None:
                weights *= factor
            continue
        for block in _blocks(part):
            block.take(weights).mul_(block.expand(per_sequence[_rows(part, block)].to(weights.dtype)))


def weighed_tokens(local: LocalSums, named: Sums) -> Tensor:
    """[n] float64: the accepted tokens of the local parts of sequences whose weight is not 0."""
    shared = _shared_weights(local, named)
    parts = zip(local.shards.parts, local.kept, local.weights or (), strict=True)
    counts = torch.cat([part.layout.sum_sequences(kept & (weights != 0)) for part, kept, weights in parts])
    return counts if shared is None else counts * (shared != 0)


def _shared_weights(local: LocalSums, named: Sums) -> Tensor | None:
    """[n] float64: the bounded weight that all tokens of a sequence share; None at token level, and without weights."""
    config = local.config
    if config.rollout_is not in ("sequence", "geometric"):
        return None
    return bounded_weights(sequence_log_weights(named, config), config, scale=threshold_scale(named, config))
