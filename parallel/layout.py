"""Which tokens of which sequences are on this rank, under context parallelism (CP).

A local shard is this rank's part of a batch: some tokens of every sequence, one sequence after the other. Only this
module knows how the shard was cut: padded or packed batches, zigzag or contiguous splits.

A rank's tokens of a sequence are one *chunk* (a run of consecutive positions) or two: with a zigzag split over cp > 1
ranks a sequence has 2·cp equal chunks, and rank r holds chunks r and 2·cp-1-r.
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
    """Copy indices from the host to a device, without waiting for the work that a GPU still has to do."""
    return indices.to(device, non_blocking=True)


def shard_positions(length: int, cp_rank: int, cp_size: int, split: Split = "zigzag") -> Tensor:
    """Positions of the tokens that one CP rank holds of a sequence of ``length`` tokens, in the rank's order.

    ``zigzag`` is Megatron's and Transformer Engine's cut: of 2·cp equal chunks rank r holds chunks r and 2·cp-1-r,
    which balances causal attention. ``contiguous`` gives rank r the r-th of cp equal chunks.

    Returns:
        [length/cp], int64, on the CPU.

    Raises:
        ValueError: the length does not divide into equal chunks, or the rank lies outside the group.
    """
    _check_cut(cp_rank, cp_size, split)
    num_chunks = _num_chunks(length, cp_size, split)
    positions_of_chunks = torch.arange(length).view(num_chunks, length // num_chunks)
    local_chunks = [cp_rank]
    if num_chunks > cp_size:
        local_chunks.append(num_chunks - 1 - cp_rank)
    return positions_of_chunks[local_chunks].reshape(-1)


def _check_cut(cp_rank: int, cp_size: int, split: Split) -> None:
    """Raise ValueError unless rank, size and split are possible."""
    check_integer("cp_size", cp_size, least=1)
    check_integer("cp_rank", cp_rank)
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank={cp_rank} is not in [0, {cp_size}): pass the rank inside the CP group")
    one_of("split", split, ("zigzag", "contiguous"))


def _checked_rank_and_size(cp_rank: int, cp_size: int, split: Split, cp_group: Group | None) -> tuple[int, int]:
    """Return (CP rank, CP size): those of this process in ``cp_group``; without a group, the checked arguments.

    Raises:
        ValueError: arguments that contradict the group, or that are impossible.
    """
    if cp_group is not None:
        check_kind("cp_group", cp_group, Group, "the process group of this rank; new_group() gives an int to others")
        rank_in_group = group_rank(cp_group)
        size_of_group = group_size(cp_group)
        # 0 and 1 are the defaults: the caller has left the argument out.
        if cp_rank not in (0, rank_in_group):
            raise ValueError(f"cp_rank={cp_rank}: this process has {rank_in_group} in cp_group; leave cp_rank out")
        if cp_size not in (1, size_of_group):
            raise ValueError(f"cp_size={cp_size}: this process has {size_of_group} in cp_group; leave cp_size out")
        cp_rank = rank_in_group
        cp_size = size_of_group
    _check_cut(cp_rank, cp_size, split)
    return cp_rank, cp_size


def _num_chunks(length: int, cp_size: int, split: Split) -> int:
    """Number of equal chunks that a sequence is cut into, over all CP ranks; ValueError if that is impossible."""
    chunks_per_rank = 2 if split == "zigzag" and cp_size > 1 else 1
    num_chunks = chunks_per_rank * cp_size
    if length % num_chunks:
        raise ValueError(
            f"a sequence of {length} tokens does not divide into {num_chunks} chunks: pad it to a multiple"
        )
    return num_chunks


@dataclass(frozen=True)
class Block:
    """Neighbouring sequences of a local shard, which are computed together to bound the memory of temporary tensors.

    If all sequences of a block have the same local length, its tensors are rows, [n, length], on which reductions are
    fastest; else they are flat, [t].
    """

    sequences: slice  # indices of the block's sequences in the layout
    index: slice  # the block's part of the first dimension of the shard's tensors
    lengths: Tensor | None  # [n] int64, number of local tokens of each sequence of a flat block; None for rows
    shape: tuple[int, ...]  # shape of the block's per-token tensors: [n, length] or [t]

    def take(self, tensor: Tensor) -> Tensor:
        """Return the block's part of a tensor of the shard's shape: a view of shape ``shape``."""
        return tensor[self.index].view(self.shape)

    def expand(self, per_sequence: Tensor) -> Tensor:
        """Give each token the value of its sequence: from the values of all sequences, [n], to ``shape``."""
        values = per_sequence[self.sequences]
        if self.lengths is None:
            return values.unsqueeze(1).expand(self.shape)
        return torch.repeat_interleave(values, self.lengths, output_size=self.shape[0])


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """How one batch of sequences is cut over context-parallel (CP) ranks, and which part is on this rank.

    Build it with :meth:`padded` or :meth:`packed`. Every CP rank lists the same sequences in the same order. Tensors of
    the *local shape* (``shape``) hold one value for each token on this rank.

    Attributes:
        full_lengths: number of tokens of each whole sequence, padding included.
        shape: shape of the local per-token tensors: ``(b, s/cp)`` padded, ``(t/cp,)`` packed.
        cp_rank: this process's rank in the CP group.
        cp_size: number of CP ranks.
        split: how a sequence is cut.
        cp_group: the CP group of these sequences; None: the functions that take the layout use their ``groups.cp``.
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
        rank, size = _checked_rank_and_size(cp_rank, cp_size, split, cp_group)
        return cls._rows(batch_size, local_length, rank, size, split, cp_group)

    @classmethod
    def _rows(
        cls, batch_size: int, local_length: int, cp_rank: int, cp_size: int, split: Split, cp_group: Group | None = None
    ) -> SequenceLayout:
        """Return a padded layout for a rank and a size that were checked already.

        ValueError for a length that does not divide into equal chunks.
        """
        full_length = local_length * cp_size
        _num_chunks(full_length, cp_size, split)  # checks the length
        return cls(
            full_lengths=(full_length,) * batch_size,
            shape=(batch_size, local_length),
            cp_rank=cp_rank,
            cp_size=cp_size,
            split=split,
            cp_group=cp_group,
        )

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
        # Tensors and NumPy arrays have the method tolist.
        bounds = local_cu_seqlens.tolist() if hasattr(local_cu_seqlens, "tolist") else local_cu_seqlens
        # One check for each distinct type, not for each bound: there may be many sequences.
        if not isinstance(bounds, Sequence) or not all(
            issubclass(kind, numbers.Integral) for kind in {type(bound) for bound in bounds}
        ):
            raise ValueError(f"local_cu_seqlens={local_cu_seqlens!r} must be whole numbers, one more than sequences")
        bounds = [int(bound) for bound in bounds]
        rank, size = _checked_rank_and_size(cp_rank, cp_size, split, cp_group)

        local_lengths = [end - start for start, end in pairwise(bounds)]
        if not bounds or bounds[0] != 0 or min(local_lengths, default=0) < 0:
            raise ValueError(f"local_cu_seqlens={bounds} must start with 0 and never decrease")
        for length in set(local_lengths):
            _num_chunks(length * size, size, split)  # checks the length
        return cls(
            full_lengths=tuple(length * size for length in local_lengths),
            shape=(bounds[-1],),
            cp_rank=rank,
            cp_size=size,
            split=split,
            cp_group=cp_group,
        )

    @classmethod
    def given(
        cls, layout: SequenceLayout | None, name: str, tensor: Tensor, groups: ParallelGroups | None
    ) -> SequenceLayout:
        """Return the layout that a function was given for a tensor, checked; for None the default, padded rows.

        The default layout has the tensor's rows as sequences, cut over ``groups.cp``.

        Args:
            layout: the caller's layout, or None.
            name: the argument name of ``tensor``, for messages.
            tensor: of the layout's local shape; [b, s/cp] without a layout.
            groups: the caller's groups. None: ``layout`` is not compared with this process's CP rank, and the rows of
                the default layout are whole sequences.

        Raises:
            ValueError: ``layout`` is not a layout or not of the tensor's shape, or has another CP rank or size than
                this process has in ``groups.cp`` (if it has no ``cp_group``).
        """
        if layout is None:
            if tensor.dim() != 2:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}: without a layout it must be [b, s]")
            cp = None if groups is None else groups.cp
            batch_size, local_length = tensor.shape
            return cls._rows(batch_size, local_length, group_rank(cp), group_size(cp), "zigzag")
        check_kind("layout", layout, cls, LAYOUT_REMEDY)
        if tuple(tensor.shape) != layout.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: the layout's local shape is {layout.shape}")
        if groups is not None and layout.cp_group is None:
            groups.check_cut(layout.cp_rank, layout.cp_size)
        return layout

    def cp(self, default: Group | None) -> Group | None:
        """Return the CP group of these sequences: ``cp_group``, or ``default`` if that is None."""
        return default if self.cp_group is None else self.cp_group

    @property
    def num_sequences(self) -> int:
        """Number of sequences, equal on all CP ranks."""
        return len(self.full_lengths)

    @cached_property
    def sequence_index(self) -> Tensor:
        """Index of each local token's sequence: int64, flat ``[t/cp]``, on the CPU."""
        return torch.repeat_interleave(torch.arange(self.num_sequences), self.local_lengths)

    def positions(self) -> Tensor:
        """Position of each local token in its whole sequence: int64, of the local shape, on the CPU."""
        no_positions = torch.empty(0, dtype=torch.int64)  # torch.cat needs at least one tensor
        return torch.cat([no_positions, *self._positions(self.cp_rank)]).view(self.shape)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest whole sequence, at least 1."""
        return max([1, *self.full_lengths])

    @cached_property
    def row_places(self) -> Tensor:
        """Index of each local token in a flattened ``[n, longest]`` tensor with one whole sequence a row.

        int64, flat, on the CPU.
        """
        return self.sequence_index * self.longest + self.positions().flatten()

    def cut(self, full: Tensor) -> Tensor:
        """Cut this rank's shard out of a tensor of whole sequences.

        Args:
            full: ``[b, s, ...]`` padded or ``[t, ...]`` packed.

        Returns:
            ``[b, s/cp, ...]`` or ``[t/cp, ...]``, a copy.

        Raises:
            ValueError: the shape is not the whole batch's.
        """
        further_dims = self._check(full, self._full_shape, "whole sequences")
        flat = full.reshape(sum(self.full_lengths), *further_dims)
        local_index = _sent(self._flat_index(self.cp_rank), full.device)
        return flat[local_index].view(*self.shape, *further_dims)

    def restore(self, shards: Sequence[Tensor]) -> Tensor:
        """Join the shards of all CP ranks, in rank order, to the tensor of whole sequences: the inverse of :meth:`cut`.

        Raises:
            ValueError: a number of shards other than the CP ranks', or a shard of another shape.
        """
        if len(shards) != self.cp_size:
            raise ValueError(f"{len(shards)} shards given: expected one for each of the {self.cp_size} CP ranks")
        further_dims = self._check(shards[0], self.shape, "a shard")
        full = shards[0].new_empty(sum(self.full_lengths), *further_dims)
        for rank, shard in enumerate(shards):
            self._check(shard, self.shape, "a shard")
            full[_sent(self._flat_index(rank), full.device)] = shard.reshape(-1, *further_dims)
        return full.view(*self._full_shape, *further_dims)

    def sum_sequences(self, values: Tensor) -> Tensor:
        """Sum the ``values`` of each sequence's local tokens: from the local shape to [n] float64.

        The sum over a whole sequence is the sum of these over the CP group. ValueError for another shape.
        """
        self._check(values, self.shape, "a shard")
        if len(self.shape) == 2:
            return values.sum(1, dtype=torch.float64)
        return torch.segment_reduce(values.double(), "sum", lengths=self._lengths_on(values.device), unsafe=True)

    def expand(self, per_sequence: Tensor) -> Tensor:
        """Give each local token the value of its sequence: from ``[n]`` to the local shape; ValueError for others."""
        if per_sequence.shape != (self.num_sequences,):
            raise ValueError(f"got {tuple(per_sequence.shape)}, expected one value for each of {self.num_sequences}")
        if len(self.shape) == 2:
            return per_sequence.unsqueeze(1).repeat(1, self.shape[1])
        lengths = self._lengths_on(per_sequence.device)
        return torch.repeat_interleave(per_sequence, lengths, output_size=self.shape[0])

    @property
    def num_chunks(self) -> int:
        """Number of chunks that each sequence is cut into, over all CP ranks: cp, or 2·cp with a zigzag split."""
        return _num_chunks(0, self.cp_size, self.split)

    @cached_property
    def chunk_index(self) -> Tensor:
        """Index of each local token's chunk among those of all sequences: int64, flat ``[t/cp]``, on the CPU.

        It is (index of the sequence) · num_chunks + (index of the chunk in the sequence).
        """
        chunk_lengths = torch.tensor(self.full_lengths, dtype=torch.int64) // self.num_chunks
        chunk_in_sequence = self.positions().flatten() // chunk_lengths[self.sequence_index]
        return self.sequence_index * self.num_chunks + chunk_in_sequence

    def blocks(self, num_tokens: int, device: torch.device) -> list[Block]:
        """Divide the shard into blocks of neighbouring sequences, in order; no sequence is divided.

        A block has at most ``num_tokens`` local tokens, except if it is a single sequence with more. Its tensors are on
        ``device``.
        """
        local_lengths = [length // self.cp_size for length in self.full_lengths]
        token_starts = [0, *accumulate(local_lengths)]  # first local token of each sequence, and the end of the last
        first_sequences = [0]  # first sequence of each block
        for sequence in range(1, len(local_lengths)):
            tokens_with_sequence = token_starts[sequence + 1] - token_starts[first_sequences[-1]]
            if tokens_with_sequence > num_tokens:
                first_sequences.append(sequence)

        bounds = pairwise([*first_sequences, len(local_lengths)])
        return [self._block(slice(start, stop), local_lengths, token_starts, device) for start, stop in bounds]

    def _block(
        self, sequences: slice, local_lengths: list[int], token_starts: list[int], device: torch.device
    ) -> Block:
        """Return the block of these sequences.

        Args:
            sequences: the block's sequences.
            local_lengths: local tokens of each sequence of the layout.
            token_starts: the first local token of each, and the end of the last one.
            device: device of the block's tensors.
        """
        lengths = local_lengths[sequences]
        tokens = slice(token_starts[sequences.start], token_starts[sequences.stop])
        is_padded = len(self.shape) == 2
        # Rows without tokens could not be reduced.
        is_table = len(set(lengths)) == 1 and lengths[0] > 0
        return Block(
            sequences=sequences,
            index=sequences if is_padded else tokens,
            lengths=None if is_table else _sent(torch.tensor(lengths, dtype=torch.int64), device),
            shape=(len(lengths), lengths[0]) if is_table else (tokens.stop - tokens.start,),
        )

    def followed(self, places: Tensor) -> Tensor:
        """Return, for some local tokens, whether the next local token is in the same chunk: bool, like ``places``.

        If so, the two tokens are neighbours in their sequence. (The two chunks of the last CP rank are neighbours too;
        the result is False between them, as between those of other ranks.)

        Args:
            places: int64 of any shape: indices of local tokens in the flat shard.
        """
        chunks_per_rank = self.num_chunks // self.cp_size
        if len(self.shape) == 2:
            chunk_length = max(self.shape[1] // chunks_per_rank, 1)
            return (places + 1) % chunk_length != 0

        local_lengths = self._lengths_on(places.device)
        ends = local_lengths.cumsum(0)
        sequences = torch.searchsorted(ends, places, right=True)
        # After the last token of a rank's only or second chunk the sequence has no local token left; after the last
        # token of the first of two chunks it has those of one chunk, half of its local tokens.
        num_left = ends[sequences] - places - 1
        is_not_first_chunk_end = num_left * chunks_per_rank != local_lengths[sequences] * (chunks_per_rank - 1)
        return (num_left != 0) & is_not_first_chunk_end

    def position_of(self, sequences: Tensor, offsets: Tensor) -> Tensor:
        """Return the positions of some local tokens in their whole sequences, [k] int64.

        Args:
            sequences: [k] int64, the index of each token's sequence; or [1], if all tokens are of one sequence.
            offsets: [k] int64, the index of each token among the local tokens of its sequence.
        """
        if self.cp_size == 1:
            return offsets
        local_lengths = self._lengths_on(sequences.device)[sequences]
        if self.split == "contiguous":
            return offsets + local_lengths * self.cp_rank
        # The rank's two chunks are the sequence's chunks r and 2·cp-1-r. An offset in the second one counts the rank's
        # first chunk, so that one chunk less lies before it.
        chunk_length = local_lengths // 2
        is_in_second = offsets >= chunk_length
        num_chunks_before = torch.where(is_in_second, 2 * self.cp_size - 2 - self.cp_rank, self.cp_rank)
        return offsets + chunk_length * num_chunks_before

    def block_positions(self, block: Block, counting: Tensor) -> Tensor:
        """Return the position of each token of a block in its whole sequence.

        Args:
            block: a part of this layout.
            counting: int64, 0, 1, 2, …, on the block's device; not fewer than :attr:`longest`.

        Returns:
            int64, [length] for a block of equally long sequences, which share it, else flat [t].
        """
        length: int | Tensor = block.shape[-1]
        if block.lengths is None:
            offsets = counting[: block.shape[-1]]
        else:
            starts = block.lengths.cumsum(0) - block.lengths
            offsets = torch.arange(block.shape[0], device=counting.device)
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
        """Number of local tokens of each sequence: [n], int64, on the CPU."""
        if len(self.shape) == 2:
            return torch.full((self.num_sequences,), self.shape[1], dtype=torch.int64)
        return torch.tensor(self.full_lengths, dtype=torch.int64) // self.cp_size

    def _lengths_on(self, device: torch.device) -> Tensor:
        """:attr:`local_lengths` on a device, copied there once."""
        if device not in self._sent_lengths:
            self._sent_lengths[device] = _sent(self.local_lengths, device)
        return self._sent_lengths[device]

    @cached_property
    def _sent_lengths(self) -> dict[torch.device, Tensor]:
        """Copies of :attr:`local_lengths` by device, for :meth:`_lengths_on`."""
        return {}

    @property
    def _full_shape(self) -> tuple[int, ...]:
        """Shape of per-token tensors of the whole sequences: (b, s) padded, (t,) packed."""
        if len(self.shape) == 2:
            batch_size, local_length = self.shape
            return batch_size, local_length * self.cp_size
        return (sum(self.full_lengths),)

    def _check(self, tensor: Tensor, leading: tuple[int, ...], name: str) -> tuple[int, ...]:
        """Return the dimensions after the ``leading`` ones; ValueError, with ``name``, if the tensor has other ones."""
        check_kind(name, tensor, Tensor, "a torch.Tensor")
        if tuple(tensor.shape[: len(leading)]) != leading:
            raise ValueError(
                f"got a tensor of shape {tuple(tensor.shape)}, expected {name} of this layout, {leading} in front: "
                f"the layout has {self.shape[-1]} tokens on each of {self.cp_size} context-parallel ranks"
            )
        return tuple(tensor.shape[len(leading) :])

    def _positions(self, rank: int) -> list[Tensor]:
        """Positions of the tokens that a CP rank holds of each sequence: n tensors of int64, on the CPU."""
        # Computed once for each length: sequences of equal length have equal positions.
        positions_by_length = {
            length: shard_positions(length, rank, self.cp_size, self.split) for length in set(self.full_lengths)
        }
        return [positions_by_length[length] for length in self.full_lengths]

    def _flat_index(self, rank: int) -> Tensor:
        """Index of each token of ``rank`` among all tokens of the whole sequences: [t/cp] int64, on the CPU."""
        full_lengths = torch.tensor(self.full_lengths, dtype=torch.int64)
        first_tokens = full_lengths.cumsum(0) - full_lengths
        first_tokens = first_tokens.repeat_interleave(full_lengths // self.cp_size)
        no_positions = first_tokens.new_empty(0)  # torch.cat needs at least one tensor
        return torch.cat([no_positions, *self._positions(rank)]) + first_tokens


Layouts = SequenceLayout | Sequence[SequenceLayout]  # the layout of one micro-batch, or those of several
