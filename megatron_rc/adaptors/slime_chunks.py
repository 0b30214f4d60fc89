"""The tokens of ragged responses that a context-parallel rank holds, as slime cuts them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from megatron_rc.adaptors.shared import checked_tensor
from megatron_rc.parallel.collectives import all_reduce_sum
from megatron_rc.parallel.groups import Group, group_rank, group_size
from megatron_rc.parallel.layout import SequenceLayout


class Chunks:
    """The tokens of responses that a CP rank holds.

    A sequence is padded to 2·cp equal chunks; a rank holds two. The local tokens of a response are the positions in
    these chunks that predict one of its tokens: from the prompt's last position to the sequence's last but one.
    ``layout`` has the local chunks of whole sequences, packed; ``counts`` the local tokens of each response. ValueError
    for impossible lengths.
    """

    def __init__(self, total_lengths: Sequence[int], response_lengths: Sequence[int], cp: Group | None) -> None:
        self.cp, size = cp, group_size(cp)
        for index, (total, response) in enumerate(zip(total_lengths, response_lengths, strict=True)):
            if not 0 <= response < total:
                raise ValueError(
                    f"response_lengths[{index}]={response}: expected 0 or more, below total_lengths {total}"
                )
        self.lengths = list(response_lengths)
        parts = 2 * size if size > 1 else 1
        local = [-(-total // parts) * parts // size for total in total_lengths]
        self.layout = SequenceLayout.packed([0, *accumulate(local)], cp_rank=group_rank(cp), cp_size=size)
        sequence = self.layout.sequence_index
        responses = torch.tensor(self.lengths, dtype=torch.int64)
        token = self.layout.positions() - (torch.tensor(total_lengths, dtype=torch.int64) - responses - 1)[sequence]
        self._held = ((token >= 0) & (token < responses[sequence])).nonzero().squeeze(1)
        self._token = (token + (responses.cumsum(0) - responses)[sequence])[self._held]
        self.counts = torch.bincount(sequence[self._held], minlength=len(self.lengths)).tolist()

    def joined(self, name: str, values: Sequence[Tensor]) -> Tensor:
        """[t]: the local tokens of all responses, one after the other."""
        return torch.cat(self._checked(name, values, self.counts)).detach()

    def cut(self, name: str, values: Sequence[Tensor]) -> Tensor:
        """[t]: the local tokens, from tensors of whole responses."""
        whole = torch.cat(self._checked(name, values, self.lengths))
        return whole[self._token.to(whole.device)]

    def spread(self, values: Tensor) -> Tensor:
        """Values of the layout's shape from [t], with 0 at prompts and padding."""
        out = values.new_zeros(self.layout.shape)
        out[self._held.to(values.device)] = values
        return out

    def local(self, values: Tensor) -> Tensor:
        """The inverse of ``spread``."""
        return values[self._held.to(values.device)]

    def whole_masks(self, masks: Sequence[Tensor], accepted: Tensor) -> list[Tensor]:
        """The masks of whole responses, 0 for tokens that the rank which holds them rejects."""
        kept = torch.zeros(sum(self.lengths), dtype=torch.uint8, device=accepted.device)
        kept[self._token.to(accepted.device)] = accepted.to(torch.uint8)
        pieces = all_reduce_sum(kept, self.cp).bool().split(self.lengths)
        return [torch.where(piece, mask, torch.zeros_like(mask)) for piece, mask in zip(pieces, masks, strict=True)]

    def _checked(self, name: str, values: Sequence[Tensor] | None, lengths: Sequence[int]) -> list[Tensor]:
        if values is None:
            raise ValueError(f"{name} is None: make slime keep the log-probs of engine and trainer")
        if len(values) != len(lengths):
            raise ValueError(f"{name} has {len(values)} entries: expected {len(lengths)}, one for every response")
        place = f" on CP rank {self.layout.cp_rank} of {self.layout.cp_size}"
        for index, (value, length) in enumerate(zip(values, lengths, strict=True)):
            checked_tensor(f"{name}[{index}]", value, (length,), place)
        return [*values, *([] if values else [torch.empty(0)])]
