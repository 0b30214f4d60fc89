"""Rotary position embeddings of packed tokens by one gather of angles.

Megatron applies them sequence by sequence: a few operations for each sequence, for queries and keys, in every layer and
pass, and each call reads the sequences' lengths from the device. Here the angles of all tokens of a micro-batch are
gathered by the tokens' positions, and the form for padded tokens is applied to all of them at once.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# Megatron's functions, under the names that both 0.16 and 0.19 give them.
_BY_SEQUENCE = "_apply_rotary_pos_emb_thd"
_PADDED = "_apply_rotary_pos_emb_bshd"


class PackedAngles:
    """The angles of one micro-batch's packed tokens."""

    def __init__(self, positions: Tensor) -> None:
        """``positions``, [t/cp] int64 on the tokens' device: the position of each local token in its sequence."""
        self._positions = positions
        self._of_positions: Tensor | None = None
        self._of_tokens: Tensor | None = None

    def of(self, angles: Tensor) -> Tensor:
        """[t/cp, 1, 1, d]: the angles of each local token, from those of each position, [longest sequence, 1, 1, d].

        All layers of a model share one tensor of angles, so that they are gathered once.
        """
        if self._of_tokens is None or self._of_positions is not angles:
            self._of_positions = angles
            self._of_tokens = angles[self._positions]
        return self._of_tokens


# By ``cu_seqlens``, the only description of the packed tokens that Megatron hands to the function.
_ANGLES = WeakTensorKeyDictionary()


def register(cu_seqlens: Tensor, positions: Tensor) -> None:
    """Gather the angles of packed tokens with these ``cu_seqlens`` by their positions, as long as the tensor lives."""
    _ANGLES[cu_seqlens] = PackedAngles(positions)


def use_gathered_angles() -> None:
    """Let Megatron's attention apply rotary embeddings to registered packed tokens by one gather."""
    by_sequence = getattr(rope_utils, _BY_SEQUENCE)
    if getattr(by_sequence, "is_gathered", False):
        return

    def gathered(
        t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *args: Any, cp_group: Any = None, **kwargs: Any
    ) -> Tensor:
        """[t/cp, heads, d]: the rotated queries or keys; arguments as of Megatron's function."""
        angles = _ANGLES.get(cu_seqlens)
        if angles is None:
            rotated: Tensor = by_sequence(t, cu_seqlens, freqs, *args, cp_group=cp_group, **kwargs)
            return rotated
        padded = getattr(rope_utils, _PADDED)
        rotated = padded(t.unsqueeze(1), angles.of(freqs), *args, **kwargs)
        return rotated.squeeze(1)

    gathered.is_gathered = True  # type: ignore[attr-defined]
    setattr(rope_utils, _BY_SEQUENCE, gathered)
