"""One micro-batch on its way through the loss: what is given of it, and what the correction makes of that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from megatron_rc.correction.joined import KeptTokens
from megatron_rc.parallel.layout import SequenceLayout


@dataclass(frozen=True)
class MicroBatch:
    """What the loss of one micro-batch needs, on the last pipeline stage; per token: the layout's local shape.

    Attributes:
        layout: which tokens these are.
        response_mask: bool: the tokens that were sampled.
        advantages: [n], or per token.
        rollout_log_probs: log π_rollout.
        sequence_ids: [n] int64; error messages name them where the correction is made in the loss.
        policy_versions: int64, of the weights that sampled: for metrics by staleness, bounds by staleness and the
            interpolation that are made in the loss; where the plan was given the current version.
        old_log_probs: log π_old; None in bypass mode, where π_rollout takes its place, and where it is interpolated.
        ref_log_probs: log π_ref, where there is a KL penalty.
        weights: importance weights of the plan; None where the config applies none, and where the loss finds them.
        mask: the accepted tokens of the plan; None where the loss finds them.
        lengths: [n] float64, n_i of the plan; likewise.
    """

    layout: SequenceLayout
    response_mask: Tensor
    advantages: Tensor
    rollout_log_probs: Tensor
    sequence_ids: Tensor | None = None
    policy_versions: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    weights: Tensor | None = None
    mask: Tensor | None = None
    lengths: Tensor | None = None


@dataclass(frozen=True)
class CorrectedMicroBatch:
    """What the loss is made from; unpacks as ``weights, mask, lengths``.

    Attributes:
        weights: detached, like the tokens; None where none are applied. Bounded; normalised in decoupled mode alone.
        mask: bool: the accepted tokens m'.
        lengths: [n] float64, n_i: tokens of each whole sequence in the denominator.
        old_log_probs: log π_old, detached: of the plan, of the rollout in bypass mode, or interpolated.
        mean_log_ratio: [n] float64, the mean of log π_θ/π_old over each whole sequence; None where it is not known yet.
        tokens: what the micro-batch adds to its step follows from these; None where the plan has it.
    """

    weights: Tensor | None
    mask: Tensor
    lengths: Tensor
    old_log_probs: Tensor
    mean_log_ratio: Tensor | None = None
    tokens: KeptTokens | None = None

    def __iter__(self) -> Iterator[Tensor | None]:
        return iter((self.weights, self.mask, self.lengths))
