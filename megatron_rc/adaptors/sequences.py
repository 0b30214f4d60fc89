"""The correction for a trainer of another project that holds whole sequences, each of its own length.

The trainer keeps its layout and its loss: sequences go in, and weights, masks and denominators come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_rc.batch.chain import CorrectionResult, correct_rollouts
from megatron_rc.parallel.groups import ParallelGroups, group_device
from megatron_rc.settings.config import RolloutCorrectionConfig

Sequences = Sequence[Tensor] | Tensor  # one [length] tensor a sequence, or a jagged nested tensor
# Optional arguments of correct_rollouts that may have one value for each token.
_TOKEN_ARGUMENTS = ("advantages", "policy_versions", "turn_ids")
# Dtypes of arguments without a sequence; those of the others are float32.
_DTYPES_OF_EMPTY = {"response_mask": torch.bool, "policy_versions": torch.int64, "turn_ids": torch.int64}


@dataclass(frozen=True, eq=False)
class CorrectedSequences:
    """The correction of sequences; ``weights`` and ``masks`` are a list, or nested if the masks were."""

    weights: Sequences | None  # [length] each, detached, 0 outside of the mask; None if the config applies none
    masks: Sequences  # [length] each, bool: the accepted tokens
    denominators: Tensor  # [num_mini_batches, 4] float64: tokens and sequences under the masks, before and after
    result: CorrectionResult  # metrics of the whole batch, equal on every rank


@torch.no_grad()
def correct_sequences(
    train_log_probs: Sequences,
    rollout_log_probs: Sequences,
    response_masks: Sequences,
    config: RolloutCorrectionConfig,
    groups: ParallelGroups | None = None,
    **more: Any,
) -> CorrectedSequences:
    """Importance weights, accepted masks and denominators of a rollout batch, for a loss of the caller's.

    Args:
        train_log_probs: log π_train of each sequence of this rank, [length], nats; or a jagged nested tensor.
        rollout_log_probs: log π_rollout of the same tokens.
        response_masks: bool, True for the tokens that count.
        config: the correction.
        groups: ``dp_cp`` has the other sequences; without a ``cp``, because each rank holds whole sequences.
        more: arguments of :func:`~megatron_rc.correct_rollouts`; ``advantages``, ``policy_versions`` and ``turn_ids``
            of tokens are sequences too.

    Returns:
        The correction, whose data were checked. The caller sums its loss over the batch and divides it once, by a
        number of ``denominators``.

    Collectives and errors: those of :func:`~megatron_rc.correct_rollouts` and of its result's ``check()``; besides,
    ValueError if two arguments differ in the number or the lengths of their sequences, on their rank alone.
    """
    masks = _listed("response_masks", response_masks)
    lengths = [len(mask) for mask in masks]
    sequences = {"train_log_probs": train_log_probs, "rollout_log_probs": rollout_log_probs, "response_mask": masks}
    for name in _TOKEN_ARGUMENTS:
        if _has_sequences(more.get(name)):
            sequences[name] = more[name]

    # A rank without sequences has no tensor that would show the device of its collectives.
    device = group_device(ParallelGroups.given(groups).dp_cp)
    rows = {name: _padded_rows(name, values, lengths, device) for name, values in sequences.items()}
    result = correct_rollouts(config=config, groups=groups, **more | rows)
    result.check()

    def like_masks(values: Tensor) -> Sequences:
        """The sequences of padded rows, [n, longest], in the form of the caller's masks."""
        unpadded = [row[:length] for row, length in zip(values, lengths, strict=True)]
        if isinstance(response_masks, Tensor):
            return torch.nested.as_nested_tensor(unpadded, layout=torch.jagged)
        return unpadded

    # One tensor, not a list of micro-batches, because one was passed.
    assert isinstance(result.mask, Tensor)
    assert result.weights is None or isinstance(result.weights, Tensor)
    weights = None if result.weights is None else like_masks(result.weights)
    return CorrectedSequences(weights, like_masks(result.mask), result.denominators, result)


def _has_sequences(values: object) -> bool:
    """Return whether an argument has a tensor for each sequence: a list, or a nested tensor. A plain tensor has not."""
    return values is not None and (not isinstance(values, Tensor) or values.is_nested)


def _listed(name: str, values: Sequences) -> list[Tensor]:
    """A tensor [length] for each sequence; ValueError, with the argument's name, for another form."""
    is_jagged = isinstance(values, Tensor) and values.is_nested and values.layout == torch.jagged
    if not is_jagged and (isinstance(values, Tensor) or not isinstance(values, Sequence)):
        raise ValueError(
            f"{name} is a {type(values).__name__}: pass a list of tensors [length], or a nested tensor with the layout "
            "torch.jagged"
        )
    sequences = list(values.unbind()) if isinstance(values, Tensor) else list(values)
    for number, sequence in enumerate(sequences):
        if not isinstance(sequence, Tensor) or sequence.dim() != 1:
            is_tensor = isinstance(sequence, Tensor)
            received = f"a tensor {[*sequence.shape]}" if is_tensor else f"{sequence!r:.80}"
            raise ValueError(f"{name}[{number}] is {received}: expected a tensor [length]")
    return sequences


def _padded_rows(name: str, values: Sequences, lengths: Sequence[int], device: torch.device) -> Tensor:
    """The sequences as rows [n, longest], padded with 0; without sequences an empty tensor on ``device``.

    ``lengths`` are those of the masks. ValueError, with the argument's name, unless the sequences have them too.
    """
    sequences = _listed(name, values)
    if len(sequences) != len(lengths):
        raise ValueError(
            f"{name} has {len(sequences)} sequences, response_masks {len(lengths)}: pass the same sequences"
        )
    for number, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        if len(sequence) != length:
            raise ValueError(f"{name}[{number}] has {len(sequence)} tokens, response_masks[{number}] {length}")
    if not sequences:
        return torch.zeros(0, 0, dtype=_DTYPES_OF_EMPTY.get(name, torch.float32), device=device)
    return pad_sequence(sequences, batch_first=True)
