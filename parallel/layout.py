"""The tokens of each sequence that a local shard holds.

A local shard is a flat run of tokens, each of which belongs to a sequence. Only this module knows how the shard was
cut: padded or packed batches, zigzag or contiguous context parallelism.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from megatron_rc.parallel.arguments import check_integer, check_kind, one_of
from megatron_rc.parallel.groups import Group, ParallelGroups, group_rank, group_size

Split = Literal["zigzag", "contiguous"]
LAYOUT_REMEDY = "SequenceLayout.padded(...) or .packed(...)"


def _sent(indices: Tensor, device: torch.device) -> Tensor:
    """The indices on a device, without waiting for a GPU's earlier work."""
    return indices.to(device, non_blocking=True)


def shard_positions(length: int, cp_rank: int, cp_size: int, split: Split = "zigzag") -> Tensor:
    """Positions in a sequence of ``length`` tokens that one context-parallel rank holds, in its order.

    ``zigzag`` is Megatron's and Transformer Engine's cut: of 2·cp equal chunks rank r holds chunks r and 2·cp-1-r,
    which balances causal attention. ``contiguous`` gives rank r the r-th of cp equal chunks.

    Returns [length/cp], int64. ValueError if the length does not divide, or the rank lies outside the group.
    """
    _check_cut(cp_rank, cp_size, split)
    chunks = _num_chunks(length, cp_size, split)
    grid = torch.arange(length).view(chunks, length // chunks)
    held = [cp_rank, chunks - 1 - cp_rank] if chunks > cp_size else [cp_rank]
    return grid[held].reshape(-1)


def _check_cut(cp_rank: int, cp_size: int, split: Split) -> None:
    check_integer("cp_size", cp_size, least=1)
    check_integer("cp_rank", cp_rank)
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank={cp_rank} is not in [0, {cp_size}): pass the rank inside the CP group")
    one_of("split", split, ("zigzag", "contiguous"))


def _place(cp_rank: int, cp_size: int, split: Split, cp_group: Group | None) -> tuple[int, int]:
    """(rank, size) of a cut: with a group those in it; ValueError if others are given, or the cut cannot be."""
    if cp_group is not None:
        check_kind("cp_group", cp_group, Group, "the process group of this rank; new_group() gives an int to others")
        place = group_rank(cp_group), group_size(cp_group)
        for name, given, default, found in zip(("cp_rank", "cp_size"), (cp_rank, cp_size), (0, 1), place, strict=True):
            if given not in (default, found):
                raise ValueError(f"{name}={given}: this process has {found} in cp_group; leave {name} out")
        cp_rank, cp_size = place
    _check_cut(cp_rank, cp_size, split)
    return cp_rank, cp_size


def _num_chunks(length: int, cp_size: int, split: Split) -> int:
    """Number of equal chunks that a sequence is cut into; raises ValueError if its length does not divide."""
    chunks = 2 * cp_size if split == "zigzag" and cp_size > 1 else cp_size
    if length % chunks:
        raise ValueError(f"a sequence of {length} tokens does not divide into {chunks} chunks: pad it to a multiple")
    return chunks


@dataclass(frozen=True)
class Block:
    """Neighbouring whole sequences of a local shard, as one tensor of shape :attr:`shape`."""

    sequences: slice  # their indices in the layout
    index: slice  # of the shard's first dimension: their tokens
    lengths: Tensor | None  # [n] int64, local tokens of each sequence, if the values are flat; None if [n, length]
    shape: tuple[int, ...]  # [n, length] for sequences of equal local length, else flat [t]

    def take(self, tensor: Tensor) -> Tensor:
        """The block's part of a tensor of the shard's shape: a view of shape :attr:`shape`."""
        return tensor[self.index].view(self.shape)

    def expand(self, per_sequence: Tensor) -> Tensor:
        """For each token of the block the value of its sequence, of shape :attr:`shape`; from ``[n]`` of the layout."""
        values = per_sequence[self.sequences]
        if self.lengths is None:
            return values.unsqueeze(1).expand(self.shape)
        return torch.repeat_interleave(values, self.lengths, output_size=self.shape[0])


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """The cut of one batch of sequences over context-parallel ranks.

    Build it with :meth:`padded` or :meth:`packed`. Every CP rank lists the same sequences in the same order.

    Attributes:
        full_lengths: tokens of each whole sequence, padding included.
        shape: shape of the local per-token tensors: ``(b, s/cp)`` padded, ``(t/cp,)`` packed.
        cp_rank: this rank inside the CP group.
        cp_size: number of CP ranks.
        split: how a sequence is cut.
        cp_group: the CP group of these sequences; None: ``groups.cp`` of a function that the layout is passed to.
    """

    full_lengths: tuple[int, ...]
    shape: tuple[int, ...]
    cp_rank: int
    cp_size: int
    split: Split
    cp_group: Group | None = None

    @classmethod
    def padded(
        cls,
        batch_size: int,
        local_length: int,
        *,
        cp_rank: int = 0,
        cp_size: int = 1,
        split: Split = "zigzag",
        cp_group: Group | None = None,
    ) -> SequenceLayout:
        """A layout of local tensors ``[b, s/cp]``: all sequences are padded to the same length.

        Args:
            batch_size: b, the number of sequences.
            local_length: s/cp, the tokens of each sequence on this rank.
            cp_rank: this rank inside the CP group; with ``cp_group`` it follows from that.
            cp_size: number of CP ranks; with ``cp_group`` it follows from that.
            split: how a sequence is cut.
            cp_group: the CP group of these sequences, if micro-batches have groups of their own. Default: ``groups.cp``
                of a function that the layout is passed to.

        Raises:
            ValueError: a length that does not divide, or a rank or size that is not this process's in the group.
        """
        for name, value in (("batch_size", batch_size), ("local_length", local_length)):
            check_integer(name, value, least=0)
        rank, size = _place(cp_rank, cp_size, split, cp_group)
        return cls._rows(batch_size, local_length, rank, size, split, cp_group)

    @classmethod
    def _rows(
        cls, batch_size: int, local_length: int, cp_rank: int, cp_size: int, split: Split, cp_group: Group | None = None
    ) -> SequenceLayout:
        _num_chunks(local_length * cp_size, cp_size, split)
        shape = batch_size, local_length
        return cls((local_length * cp_size,) * batch_size, shape, cp_rank, cp_size, split, cp_group)

    @classmethod
    def packed(
        cls,
        local_cu_seqlens: Tensor | Sequence[int],
        *,
        cp_rank: int = 0,
        cp_size: int = 1,
        split: Split = "zigzag",
        cp_group: Group | None = None,
    ) -> SequenceLayout:
        """A layout of local tensors ``[t/cp]``: sequences one after the other, each cut by itself.

        Args:
            local_cu_seqlens: [n + 1], cumulative local lengths, starting with 0; on the host.
            cp_rank: this rank inside the CP group; with ``cp_group`` it follows from that.
            cp_size: number of CP ranks; with ``cp_group`` it follows from that.
            split: how a sequence is cut.
            cp_group: the CP group of these sequences, if micro-batches have groups of their own. Default: ``groups.cp``
                of a function that the layout is passed to.

        Raises:
            ValueError: not a cumulative sum, a length that does not divide, or a rank or size that is not this
                process's in the group.
        """
        # tolist: of tensors and of NumPy's arrays
        bounds = local_cu_seqlens.tolist() if hasattr(local_cu_seqlens, "tolist") else local_cu_seqlens
        if not isinstance(bounds, Sequence) or not all(
            issubclass(each, numbers.Integral) for each in set(map(type, bounds))
        ):
            raise ValueError(f"local_cu_seqlens={local_cu_seqlens!r} must be whole numbers, one more than sequences")
        bounds = [int(bound) for bound in bounds]
        rank, size = _place(cp_rank, cp_size, split, cp_group)
        local = [after - before for before, after in pairwise(bounds)]
        if not bounds or bounds[0] != 0 or min(local, default=0) < 0:
            raise ValueError(f"local_cu_seqlens={bounds} must start with 0 and never fall")
        for length in set(local):
            _num_chunks(length * size, size, split)
        return cls(tuple(length * size for length in local), (bounds[-1],), rank, size, split, cp_group)

    @classmethod
    def given(
        cls, layout: SequenceLayout | None, name: str, tensor: Tensor, groups: ParallelGroups | None
    ) -> SequenceLayout:
        """The layout that a caller passed for the tensor ``name``; for None, padded rows cut over ``groups.cp``.

        Without groups, a layout may be of any rank, and rows without a layout are whole sequences. ValueError if
        ``layout`` is no layout, or is not for this tensor, or has no ``cp_group`` and is not for ``groups.cp``.
        """
        if layout is None:
            if tensor.dim() != 2:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}: without a layout it must be [b, s]")
            cp = None if groups is None else groups.cp
            return cls._rows(tensor.shape[0], tensor.shape[1], group_rank(cp), group_size(cp), "zigzag")
        check_kind("layout", layout, cls, LAYOUT_REMEDY)
        if tuple(tensor.shape) != layout.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: the layout's local shape is {layout.shape}")
        if groups is not None and layout.cp_group is None:
            groups.check_cut(layout.cp_rank, layout.cp_size)
        return layout

    def cp(self, default: Group | None) -> Group | None:
        """The group with the other slices of these sequences: :attr:`cp_group`, or the default without one."""
        return default if self.cp_group is None else self.cp_group

    @property
    def num_sequences(self) -> int:
        """Number of sequences, equal on all CP ranks."""
        return len(self.full_lengths)

    @cached_property
    def sequence_index(self) -> Tensor:
        """The sequence of each local token: int64, flat ``[t/cp]``, on the CPU."""
        return torch.repeat_interleave(torch.arange(self.num_sequences), self.local_lengths)

    def positions(self) -> Tensor:
        """Position of each local token in its whole sequence: int64, of the local shape, on the CPU."""
        return torch.cat(self._positions(self.cp_rank) or [torch.empty(0, dtype=torch.int64)]).view(self.shape)

    @property
    def longest(self) -> int:
        """Tokens of the longest whole sequence, at least 1: the columns of rows that hold whole sequences."""
        return max((*self.full_lengths, 1))

    @cached_property
    def row_places(self) -> Tensor:
        """The index of each local token in ``[n, longest]`` rows of whole sequences: int64, flat, on the CPU."""
        return self.sequence_index * self.longest + self.positions().flatten()

    def cut(self, full: Tensor) -> Tensor:
        """This rank's shard of a tensor that holds whole sequences.

        Args:
            full: ``[b, s, ...]`` padded or ``[t, ...]`` packed.

        Returns:
            ``[b, s/cp, ...]`` or ``[t/cp, ...]``, a copy.

        Raises:
            ValueError: the shape is not the whole batch's.
        """
        rest = self._check(full, self._full_shape, "whole sequences")
        flat = full.reshape(sum(self.full_lengths), *rest)
        return flat[_sent(self._flat_index(self.cp_rank), full.device)].view(*self.shape, *rest)

    def restore(self, shards: Sequence[Tensor]) -> Tensor:
        """The whole tensor from the shards of all CP ranks, in rank order: the inverse of :meth:`cut`.

        Raises:
            ValueError: a number of shards other than the CP ranks', or a shard of another shape.
        """
        if len(shards) != self.cp_size:
            raise ValueError(f"{len(shards)} shards given: expected one for each of the {self.cp_size} CP ranks")
        rest = self._check(shards[0], self.shape, "a shard")
        full = shards[0].new_empty(sum(self.full_lengths), *rest)
        for rank, shard in enumerate(shards):
            self._check(shard, self.shape, "a shard")
            full[_sent(self._flat_index(rank), full.device)] = shard.reshape(-1, *rest)
        return full.view(*self._full_shape, *rest)

    def sum_sequences(self, values: Tensor) -> Tensor:
        """This rank's part of each sequence's sum, [n] float64, of ``values`` of the local shape, added in float64.

        The CP group holds the other parts. ValueError for another shape.
        """
        self._check(values, self.shape, "a shard")
        if len(self.shape) == 2:
            return values.sum(1, dtype=torch.float64)
        return torch.segment_reduce(values.double(), "sum", lengths=self._lengths_on(values.device), unsafe=True)

    def expand(self, per_sequence: Tensor) -> Tensor:
        """For each local token the value of its sequence: from ``[n]`` to the local shape, else ValueError."""
        if per_sequence.shape != (self.num_sequences,):
            raise ValueError(f"got {tuple(per_sequence.shape)}, expected one value for each of {self.num_sequences}")
        if len(self.shape) == 2:
            return per_sequence.unsqueeze(1).repeat(1, self.shape[1])
        lengths = self._lengths_on(per_sequence.device)
        return torch.repeat_interleave(per_sequence, lengths, output_size=self.shape[0])

    @property
    def num_chunks(self) -> int:
        """Number of runs of consecutive positions that each sequence is cut into, over all CP ranks."""
        return _num_chunks(0, self.cp_size, self.split)

    @cached_property
    def chunk_index(self) -> Tensor:
        """The chunk of each local token, sequence · num_chunks + chunk: int64, flat ``[t/cp]``, on the CPU."""
        chunk_lengths = torch.tensor(self.full_lengths, dtype=torch.int64) // self.num_chunks
        place = self.positions().flatten() // chunk_lengths[self.sequence_index]
        return self.sequence_index * self.num_chunks + place

    def blocks(self, num_tokens: int, device: torch.device) -> list[Block]:
        """The shard in blocks of whole sequences: at most ``num_tokens`` tokens, or one longer sequence."""
        local = [length // self.cp_size for length in self.full_lengths]
        starts, cuts = [0, *accumulate(local)], [0]
        for number in range(1, len(local)):
            if starts[number + 1] - starts[cuts[-1]] > num_tokens:
                cuts.append(number)
        return [self._block(slice(*pair), local, starts, device) for pair in pairwise([*cuts, len(local)])]

    def _block(self, sequences: slice, local: list[int], starts: list[int], device: torch.device) -> Block:
        lengths, tokens = local[sequences], slice(starts[sequences.start], starts[sequences.stop])
        index = sequences if len(self.shape) == 2 else tokens
        if len(set(lengths)) == 1 and lengths[0] > 0:
            return Block(sequences, index, None, (len(lengths), lengths[0]))
        return Block(
            sequences, index, _sent(torch.tensor(lengths, dtype=torch.int64), device), (tokens.stop - tokens.start,)
        )

    def block_positions(self, block: Block, device: torch.device) -> Tensor:
        """Return the position of each token of a block in its whole sequence.

        Returns:
            int64, [length] for a block of equally long sequences, which share it, else flat [t].
        """
        length: int | Tensor = block.shape[-1]
        offsets = torch.arange(block.shape[-1], device=device)
        if block.lengths is not None:
            starts = block.lengths.cumsum(0) - block.lengths
            offsets = offsets - torch.repeat_interleave(starts, block.lengths, output_size=block.shape[0])
            length = torch.repeat_interleave(block.lengths, block.lengths, output_size=block.shape[0])
        if self.cp_size == 1:
            return offsets
        if self.split == "contiguous":
            return offsets + length * self.cp_rank
        chunk = length // 2
        second_chunk = offsets >= chunk
        return offsets + chunk * torch.where(second_chunk, 2 * self.cp_size - 2 - self.cp_rank, self.cp_rank)

    @cached_property
    def local_lengths(self) -> Tensor:
        """Local tokens of each sequence: [n], int64, on the CPU."""
        if len(self.shape) == 2:
            return torch.full((self.num_sequences,), self.shape[1], dtype=torch.int64)
        return torch.tensor(self.full_lengths, dtype=torch.int64) // self.cp_size

    def _lengths_on(self, device: torch.device) -> Tensor:
        """:attr:`local_lengths` on a device, sent there once."""
        if device not in self._sent_lengths:
            self._sent_lengths[device] = _sent(self.local_lengths, device)
        return self._sent_lengths[device]

    @cached_property
    def _sent_lengths(self) -> dict[torch.device, Tensor]:
        return {}

    @property
    def _full_shape(self) -> tuple[int, ...]:
        return (self.shape[0], self.shape[1] * self.cp_size) if len(self.shape) == 2 else (sum(self.full_lengths),)

    def _check(self, tensor: Tensor, leading: tuple[int, ...], what: str) -> tuple[int, ...]:
        check_kind(what, tensor, Tensor, "a torch.Tensor")
        if tuple(tensor.shape[: len(leading)]) != leading:
            raise ValueError(
                f"got a tensor of shape {tuple(tensor.shape)}, expected {what} of this layout, {leading} in front: "
                f"the layout has {self.shape[-1]} tokens on each of {self.cp_size} context-parallel ranks"
            )
        return tuple(tensor.shape[len(leading) :])

    def _positions(self, rank: int) -> list[Tensor]:
        cuts = {n: shard_positions(n, rank, self.cp_size, self.split) for n in set(self.full_lengths)}
        return [cuts[length] for length in self.full_lengths]

    def _flat_index(self, rank: int) -> Tensor:
        """[t/cp] int64: index of each token of ``rank`` among all tokens of the whole sequences, on the CPU."""
        lengths = torch.tensor(self.full_lengths, dtype=torch.int64)
        starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths // self.cp_size)
        return torch.cat([starts.new_empty(0), *self._positions(rank)]) + starts


Layouts = SequenceLayout | Sequence[SequenceLayout]  # of one micro-batch, or of several
