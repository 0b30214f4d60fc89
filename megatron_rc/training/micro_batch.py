"""One micro-batch on its way through the loss: its inputs and its correction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic

import torch
from torch import Tensor

from megatron_rc.batch.chain import BatchSums
from megatron_rc.correction.denominators import N
from megatron_rc.correction.inputs import OneMicroBatch
from megatron_rc.parallel.collectives import largest, smallest
from megatron_rc.parallel.layout import SequenceLayout


@dataclass(frozen=True)
class MicroBatch(OneMicroBatch):
    """The inputs of the loss of one micro-batch, on the last pipeline stage: the plan's inputs and its results.

    Attributes:
        train_log_probs: log π_old; must be None if π_old is π_rollout or interpolated.
        layout: which tokens these are; must be given, and so must advantages.
        advantages: [n], or per token.
        sequence_ids: error messages name them if the correction is made in the loss.
        policy_versions: for staleness in the loss; only if the plan was given the current version.
        ref_log_probs: log π_ref; needed for a KL penalty.
        weights: importance weights of the plan; must be None if the config applies none or the loss finds them.
        mask: bool, the accepted tokens of the plan; must be None if the loss finds them.
        sequence_lengths: [n] float64, n_i of the plan; must be None if the loss finds them.
    """

    layout: SequenceLayout = field()
    advantages: Tensor = field()
    ref_log_probs: Tensor | None = None
    weights: Tensor | None = None
    mask: Tensor | None = None
    sequence_lengths: Tensor | None = None


@dataclass(frozen=True)
class CorrectedMicroBatch:
    """The correction of one micro-batch; unpacks as ``weights, mask, sequence_lengths``."""

    weights: Tensor | None  # detached; None if none are applied; bounded, and in decoupled mode normalised
    mask: Tensor  # bool: the accepted tokens m'
    sequence_lengths: Tensor  # [n] float64, n_i: tokens of each whole sequence in the denominator
    old_log_probs: Tensor  # log π_old, detached: of the plan, of the rollout in bypass mode, or interpolated
    mean_log_ratio: Tensor | None = None  # [n] float64, the mean of log π_θ/π_old over each sequence; None: not known
    batch: BatchSums | None = None  # the numbers of the micro-batch, to be measured; None: the plan has them

    def __iter__(self) -> Iterator[Tensor | None]:
        return iter((self.weights, self.mask, self.sequence_lengths))


@dataclass(frozen=True)
class Counted(Generic[N]):
    """The tokens that the losses of a step were made from, to be compared with the plan's."""

    tokens: N  # accepted tokens
    weights: N  # the sum of their weights; 0 if none are applied
    outside: N  # accepted tokens that are not in the response mask
    strangers: N  # sequences with trained tokens of another mini-batch than the step's
    most: N = largest()  # micro-batches of the rank that counted the most
    fewest: N = smallest()  # micro-batches of the rank that counted the fewest

    @classmethod
    def of(cls, response_mask: Tensor, found: CorrectedMicroBatch, strangers: Tensor | None = None) -> Counted[Tensor]:
        """The counts of one micro-batch, 0-D float64."""
        tokens = found.mask.sum(dtype=torch.float64)
        zero, one = torch.zeros_like(tokens), torch.ones_like(tokens)
        weights = zero
        if found.weights is not None:
            weights = torch.where(found.mask, found.weights, 0).sum(dtype=torch.float64)
        outside = (found.mask & ~response_mask).sum()
        return Counted(tokens, weights, outside, zero if strangers is None else strangers, one, one)
