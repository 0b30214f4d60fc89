"""The correction for a trainer of another project that holds whole sequences, each of its own length.

The trainer keeps its layout and its loss: sequences go in, and weights, masks and denominators come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_rc.batch.chain import correct_rollouts
from megatron_rc.batch.result import CorrectionResult
from megatron_rc.parallel.groups import ParallelGroups
from megatron_rc.parallel.layout import SequenceLayout
from megatron_rc.settings.config import RolloutCorrectionConfig

Sequences = Sequence[Tensor] | Tensor  # one [length] tensor a sequence, or a nested tensor of them
# Arguments of correct_rollouts that may have one value for each token.
_OF_TOKENS = ("advantages", "policy_versions", "turn_ids")


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
        train_log_probs: log π_train of each sequence of this rank, [length], nats; or a nested tensor of all.
        rollout_log_probs: log π_rollout of the same tokens.
        response_masks: bool, True for the tokens that count.
        config: the correction.
        groups: ``dp_cp`` has the other sequences; without a ``cp``, because each rank holds whole sequences.
        more: arguments of :func:`~megatron_rc.correct_rollouts`; ``advantages``, ``policy_versions`` and ``turn_ids``
            of tokens are sequences too.

    Returns:
        The correction, whose data were checked. The caller divides its summed loss by a number of ``denominators``.

    Collectives and errors: those of :func:`~megatron_rc.correct_rollouts` and of its result's ``check()``; besides,
    ValueError if two arguments differ in the number or the lengths of their sequences.
    """
    masks = _listed("response_masks", response_masks)
    lengths = [len(mask) for mask in masks]
    given = {"train_log_probs": train_log_probs, "rollout_log_probs": rollout_log_probs}
    given |= {name: more[name] for name in _OF_TOKENS if _has_sequences(more.get(name))}
    flat = {name: _joined(name, values, lengths) for name, values in given.items()}
    result = correct_rollouts(
        response_mask=torch.cat(masks) if masks else torch.zeros(0, dtype=torch.bool),
        config=config,
        layout=SequenceLayout.packed([0, *accumulate(lengths)]),
        groups=groups,
        **more | flat,
    )
    result.check()

    def like_masks(values: Tensor) -> Sequences:
        if isinstance(response_masks, Tensor):
            return torch.nested.nested_tensor_from_jagged(values, response_masks.offsets())  # type: ignore[attr-defined]
        return list(values.split(lengths))

    assert isinstance(result.mask, Tensor)
    assert result.weights is None or isinstance(result.weights, Tensor)
    weights = None if result.weights is None else like_masks(result.weights)
    return CorrectedSequences(weights, like_masks(result.mask), result.denominators, result)


def _has_sequences(values: object) -> bool:
    return values is not None and (not isinstance(values, Tensor) or values.is_nested)


def _listed(name: str, values: Sequences) -> list[Tensor]:
    """One tensor a sequence, each of one dimension."""
    if isinstance(values, Tensor) and not values.is_nested:
        raise ValueError(f"{name} has shape {tuple(values.shape)}: pass a list of [length] tensors, or a nested tensor")
    found = list(values.unbind()) if isinstance(values, Tensor) else list(values)
    wrong = next((number for number, each in enumerate(found) if not isinstance(each, Tensor) or each.dim() != 1), None)
    if wrong is not None:
        raise ValueError(f"{name}[{wrong}] is {found[wrong]!r:.80}: expected a tensor [length]")
    return found


def _joined(name: str, values: Sequences, lengths: Sequence[int]) -> Tensor:
    """The tokens of all sequences, one after the other; ValueError unless they are as many as in the masks."""
    found = _listed(name, values)
    got = [len(each) for each in found]
    if got != list(lengths):
        number = next((i for i, (one, two) in enumerate(zip(got, lengths, strict=False)) if one != two), None)
        differs = f"{len(got)} sequences" if number is None else f"{got[number]} tokens in sequence {number}"
        expected = len(lengths) if number is None else lengths[number]
        raise ValueError(f"{name} has {differs}, response_masks {expected}: pass tensors of the same tokens")
    return torch.cat(found) if found else torch.zeros(0)
