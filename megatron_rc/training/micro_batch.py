"""One micro-batch on its way through the loss: its inputs and its correction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from megatron_rc.correction.inputs import OneMicroBatch
from megatron_rc.measures.header import BatchHeader
from megatron_rc.parallel.layout import SequenceLayout


@dataclass(frozen=True)
class MicroBatch(OneMicroBatch):
    """The inputs of the loss of one micro-batch, on the last pipeline stage: the plan's inputs and its results.

    Attributes:
        train_log_probs: log π_old; must be None if π_old is π_rollout or interpolated.
        layout: which tokens these are; must be given, and so must advantages.
        advantages: [n], or per token.
        sequence_ids: error messages name them if the correction is made in the loss.
        policy_versions: for metrics by staleness, bounds by staleness and the interpolation that are made in the loss;
            only if the plan was given the current version.
        ref_log_probs: log π_ref; needed for a KL penalty.
        weights: importance weights of the plan; must be None if the config applies none or the loss finds
            them.
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
    """The correction of one micro-batch; unpacks as ``weights, mask, sequence_lengths``.

    Attributes:
        weights: detached, like the tokens; None if none are applied. Bounded; normalised in decoupled mode alone.
        mask: bool: the accepted tokens m'.
        sequence_lengths: [n] float64, n_i: tokens of each whole sequence in the denominator.
        old_log_probs: log π_old, detached: of the plan, of the rollout in bypass mode, or interpolated.
        mean_log_ratio: [n] float64, the mean of log π_θ/π_old over each whole sequence; None if it is not known yet.
        header: this rank's part of the numbers of the step; None if the plan has them.
    """

    weights: Tensor | None
    mask: Tensor
    sequence_lengths: Tensor
    old_log_probs: Tensor
    mean_log_ratio: Tensor | None = None
    header: BatchHeader[Tensor] | None = None

    def __iter__(self) -> Iterator[Tensor | None]:
        return iter((self.weights, self.mask, self.sequence_lengths))
