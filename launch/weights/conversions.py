"""How one Megatron parameter, cut over the tensor-parallel ranks, holds one or more Hugging Face tensors; both ways."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class Conversion:
    """Both directions; the tensors' values are only moved.

    Attributes:
        join: from the shards of all TP ranks, in rank order, to the Hugging Face tensors.
        cut: from those to the shards of so many ranks.
    """

    join: Callable[[Tensors, argparse.Namespace], list[Tensor]]
    cut: Callable[[Tensors, argparse.Namespace, int], list[Tensor]]


def _join_rows(shards: Tensors, args: argparse.Namespace) -> list[Tensor]:
    return [torch.cat(list(shards), dim=0)]


def _cut_rows(tensors: Tensors, args: argparse.Namespace, size: int) -> list[Tensor]:
    return list(tensors[0].chunk(size, dim=0))


def _join_columns(shards: Tensors, args: argparse.Namespace) -> list[Tensor]:
    return [torch.cat(list(shards), dim=1)]


def _cut_columns(tensors: Tensors, args: argparse.Namespace, size: int) -> list[Tensor]:
    return list(tensors[0].chunk(size, dim=1))


def _join_vocabulary(shards: Tensors, args: argparse.Namespace) -> list[Tensor]:
    return [torch.cat(list(shards), dim=0)[: args.vocab_size]]


def _cut_vocabulary(tensors: Tensors, args: argparse.Namespace, size: int) -> list[Tensor]:
    """Rows that only pad the vocabulary are 0; no label and no probability refers to them."""
    rows = args.padded_vocab_size - tensors[0].shape[0]
    padded = torch.nn.functional.pad(tensors[0], (0, 0, 0, rows)) if rows else tensors[0]
    return list(padded.chunk(size, dim=0))


def _join_gate_and_up(shards: Tensors, args: argparse.Namespace) -> list[Tensor]:
    halves = [shard.chunk(2, dim=0) for shard in shards]
    return [torch.cat([half[index] for half in halves], dim=0) for index in range(2)]


def _cut_gate_and_up(tensors: Tensors, args: argparse.Namespace, size: int) -> list[Tensor]:
    gates, ups = (tensor.chunk(size, dim=0) for tensor in tensors)
    return [torch.cat(pair, dim=0) for pair in zip(gates, ups, strict=True)]


def _join_query_key_value(shards: Tensors, args: argparse.Namespace) -> list[Tensor]:
    """Megatron interleaves by group: the query heads of a group, its key head, its value head."""
    heads = args.num_attention_heads // args.num_query_groups
    grouped = torch.cat(list(shards), dim=0).unflatten(0, (args.num_query_groups, heads + 2, args.kv_channels))
    return [part.flatten(0, 2) for part in grouped.split([heads, 1, 1], dim=1)]


def _cut_query_key_value(tensors: Tensors, args: argparse.Namespace, size: int) -> list[Tensor]:
    grouped = [tensor.unflatten(0, (args.num_query_groups, -1, args.kv_channels)) for tensor in tensors]
    return list(torch.cat(grouped, dim=1).flatten(0, 2).chunk(size, dim=0))


def _join_stacked(shards: Tensors, args: argparse.Namespace) -> list[Tensor]:
    return [torch.cat(_join_query_key_value(shards, args), dim=0)]


def _cut_stacked(tensors: Tensors, args: argparse.Namespace, size: int) -> list[Tensor]:
    queries, keys = (number * args.kv_channels for number in (args.num_attention_heads, args.num_query_groups))
    return _cut_query_key_value(tensors[0].split([queries, keys, keys], dim=0), args, size)


WHOLE = Conversion(lambda shards, _: [shards[0]], lambda tensors, _, size: [tensors[0]] * size)
ROWS = Conversion(_join_rows, _cut_rows)
COLUMNS = Conversion(_join_columns, _cut_columns)
VOCABULARY = Conversion(_join_vocabulary, _cut_vocabulary)
GATE_AND_UP = Conversion(_join_gate_and_up, _cut_gate_and_up)
QUERY_KEY_VALUE = Conversion(_join_query_key_value, _cut_query_key_value)
STACKED_QUERY_KEY_VALUE = Conversion(_join_stacked, _cut_stacked)


def transposed(conversion: Conversion) -> Conversion:
    """The same for Hugging Face tensors that are stored as [in, out]."""

    def join(shards: Tensors, args: argparse.Namespace) -> list[Tensor]:
        return [tensor.t() for tensor in conversion.join(shards, args)]

    def cut(tensors: Tensors, args: argparse.Namespace, size: int) -> list[Tensor]:
        return conversion.cut([tensor.t() for tensor in tensors], args, size)

    return Conversion(join, cut)
