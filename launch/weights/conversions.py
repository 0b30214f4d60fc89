"""Conversions between a Megatron parameter, sharded over TP ranks, and one or more Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.launch.run_config import RunConfig

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class Conversion:
    """Pair of functions for both directions; values are only moved."""

    # Makes the Hugging Face tensors, one after the other, from the shards of all TP ranks ``[tp, ...]``; they may be
    # views of the shards.
    join: Callable[[Tensor, RunConfig], Iterable[Tensor]]
    # Makes the shard of one TP rank (third argument; fourth: number of ranks) from the Hugging Face tensors.
    cut: Callable[[Tensors, RunConfig, int, int], Tensor]


def _cut_vocabulary(tensors: Tensors, config: RunConfig, rank: int, size: int) -> Tensor:
    """Cut the vocabulary; padding rows are 0, because no label and no probability uses them."""
    if tensors[0].shape[0] != config.model.vocab_size:
        raise IndexError("another vocabulary")
    rows = config.model.padded_vocab_size // size
    shard = tensors[0][rank * rows : (rank + 1) * rows]
    missing = rows - shard.shape[0]
    return torch.nn.functional.pad(shard, (0, 0, 0, missing)) if missing else shard


def _join_query_key_value(shards: Tensor, config: RunConfig) -> Iterator[Tensor]:
    """Split Megatron's interleaved groups: the query heads of a group, then its key head and its value head."""
    layers = config.transformer
    heads = layers.num_attention_heads // layers.num_query_groups
    grouped = shards.flatten(0, 1).unflatten(0, (layers.num_query_groups, heads + 2, layers.kv_channels))
    for part in grouped.split([heads, 1, 1], dim=1):
        yield part.flatten(0, 2)


def _cut_query_key_value(tensors: Tensors, config: RunConfig, rank: int, size: int) -> Tensor:
    layers = config.transformer
    grouped = [tensor.unflatten(0, (layers.num_query_groups, -1, layers.kv_channels)) for tensor in tensors]
    return torch.cat([part.chunk(size, dim=0)[rank] for part in grouped], dim=1).flatten(0, 2)


def _cut_stacked(tensors: Tensors, config: RunConfig, rank: int, size: int) -> Tensor:
    layers = config.transformer
    queries, keys = (number * layers.kv_channels for number in (layers.num_attention_heads, layers.num_query_groups))
    return _cut_query_key_value(tensors[0].split([queries, keys, keys], dim=0), config, rank, size)


WHOLE = Conversion(lambda shards, config: [shards[0]], lambda tensors, config, rank, size: tensors[0])
ROWS = Conversion(
    lambda shards, config: [shards.flatten(0, 1)],
    lambda tensors, config, rank, size: tensors[0].chunk(size, dim=0)[rank],
)
COLUMNS = Conversion(
    lambda shards, config: [shards.movedim(0, 1).flatten(1, 2)],
    lambda tensors, config, rank, size: tensors[0].chunk(size, dim=1)[rank],
)
VOCABULARY = Conversion(lambda shards, config: [shards.flatten(0, 1)[: config.model.vocab_size]], _cut_vocabulary)
GATE_AND_UP = Conversion(
    lambda shards, config: (half.flatten(0, 1) for half in shards.unflatten(1, (2, -1)).unbind(1)),
    lambda tensors, config, rank, size: torch.cat([tensor.chunk(size, dim=0)[rank] for tensor in tensors], dim=0),
)
QUERY_KEY_VALUE = Conversion(_join_query_key_value, _cut_query_key_value)
STACKED_QUERY_KEY_VALUE = Conversion(
    lambda shards, config: [torch.cat(list(_join_query_key_value(shards, config)), dim=0)], _cut_stacked
)
STACKED_GATE_AND_UP = Conversion(
    lambda shards, config: [torch.cat(list(GATE_AND_UP.join(shards, config)), dim=0)],
    lambda tensors, config, rank, size: GATE_AND_UP.cut(tensors[0].chunk(2, dim=0), config, rank, size),
)
# The rows of gate and up projection alternate.
INTERLEAVED_GATE_AND_UP = Conversion(
    lambda shards, config: [torch.stack(list(GATE_AND_UP.join(shards, config)), dim=1).flatten(0, 1)],
    lambda tensors, config, rank, size: GATE_AND_UP.cut([tensors[0][::2], tensors[0][1::2]], config, rank, size),
)


def transposed(conversion: Conversion) -> Conversion:
    """A conversion for Hugging Face tensors that are stored as [in, out]."""
    return Conversion(
        lambda shards, config: (tensor.t() for tensor in conversion.join(shards, config)),
        lambda tensors, config, *place: conversion.cut([tensor.t() for tensor in tensors], config, *place),
    )
