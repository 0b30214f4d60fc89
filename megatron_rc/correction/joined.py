"""The micro-batches of one optimizer step as one batch, whose sums are made once."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.correction.local_tokens import Pair
from megatron_rc.correction.shards import Shards
from megatron_rc.correction.stages import AcceptedTokens, add_up, judge


@dataclass(frozen=True)
class KeptTokens:
    """A micro-batch that waits for the end of its step: by reference, so that a step holds nothing twice.

    Attributes:
        tokens: what the sums are made of. They hold the tensors that the loss was given.
        versions: how often each of those had been written to then, as torch counts it for a tensor and its views; not
            for tensors of the inference mode, nor for what is written past torch.
    """

    tokens: AcceptedTokens
    versions: tuple[int, ...]

    @classmethod
    def of(cls, tokens: AcceptedTokens) -> KeptTokens:
        """The micro-batch as it is now."""
        return cls(tokens, _versions(tokens))

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing has been written to its tensors since."""
        return self.versions == _versions(self.tokens)


def _versions(tokens: AcceptedTokens) -> tuple[int, ...]:
    local = tokens.local
    parts = [value for part in local.shards.parts for value in vars(part).values()]
    tensors = [value for value in (*parts, *(local.weights or ()), *local.kept) if isinstance(value, Tensor)]
    return tuple(-1 if tensor.is_inference() else tensor._version for tensor in tensors)


def step_sums(micro_batches: Sequence[KeptTokens]) -> Pair:
    """([sums], [maxima]) float64 of a step's header that these micro-batches add up to. Collectives: none.

    Sequences without ids are counted from the first micro-batch on.
    """
    kinds: dict[Hashable, list[AcceptedTokens]] = {}
    for kept in micro_batches:
        kinds.setdefault(_kind(kept.tokens), []).append(kept.tokens)
    pairs, first = [], 0
    for alike in kinds.values():
        tokens = _joined(alike, first)
        first += tokens.local.shards.num_sequences
        pairs.append(add_up(tokens).pair)
    sums, maxima = zip(*pairs, strict=True)
    return torch.stack(sums).sum(0), torch.stack(maxima).amax(0)


def _kind(tokens: AcceptedTokens) -> Hashable:
    """What must be alike in micro-batches that become one batch."""
    shards = tokens.local.shards
    part = shards.parts[0]
    sides = (shards.advantages, shards.versions, part.advantages, part.versions)
    return tokens.local.sums.names, shards.dtype, shards.default_ids, tuple(side is None for side in sides)


def _joined(alike: Sequence[AcceptedTokens], first_id: int) -> AcceptedTokens:
    passes = [tokens.local for tokens in alike]
    sums = [local.sums for local in passes]
    whole = [tokens.sequences for tokens in alike]
    sequences = torch.cat([pair[0] for pair in whole], 1), torch.cat([pair[1] for pair in whole], 1)
    local = dataclasses.replace(
        passes[0],
        shards=_joined_shards([local.shards for local in passes], first_id),
        sums=dataclasses.replace(
            sums[0],
            sequences=sequences[0],
            sequence_max=sequences[1],
            batch=torch.stack([one.batch for one in sums]).sum(0),
            batch_max=torch.stack([one.batch_max for one in sums]).amax(0),
            bins=torch.stack([one.bins for one in sums]).sum(0),
        ),
        weights=None if passes[0].weights is None else tuple(w for local in passes for w in local.weights or ()),
        kept=tuple(mask for local in passes for mask in local.kept),
    )
    return judge(local, sequences)


def _joined_shards(shards: Sequence[Shards], first_id: int) -> Shards:
    parts, first = [], 0
    for one in shards:
        parts += [dataclasses.replace(part, first=first + part.first) for part in one.parts]
        first += one.num_sequences
    ids = torch.cat([one.sequence_ids for one in shards])
    if shards[0].default_ids:
        ids = torch.arange(first_id, first_id + first, device=ids.device)
    return dataclasses.replace(
        shards[0],
        parts=tuple(parts),
        sequence_ids=ids,
        mini_batch_ids=torch.cat([one.mini_batch_ids for one in shards]),
        advantages=_cat([one.advantages for one in shards]),
        versions=_cat([one.versions for one in shards]),
        bad={name: torch.cat([one.bad[name] for one in shards]) for name in shards[0].bad},
    )


def _cat(values: Sequence[Tensor | None]) -> Tensor | None:
    given = [value for value in values if value is not None]
    return torch.cat(given) if given else None
