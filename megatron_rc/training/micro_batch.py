"""One micro-batch on its way through the loss: its inputs and its correction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from megatron_rc.batch.chain import BatchSums
from megatron_rc.correction.inputs import OneMicroBatch
from megatron_rc.parallel.layout import SequenceLayout
from megatron_rc.training.step_sums import StepSums


@dataclass(frozen=True)
class MicroBatch(OneMicroBatch):
    """The inputs of the loss of one micro-batch, on the last pipeline stage: the plan's inputs and its results.

    ``plan.micro_batches()`` makes them.

    Attributes:
        train_log_probs: log π_old; must be None if π_old is π_rollout or interpolated.
        layout: which tokens these are; must be given, and so must advantages.
        advantages: [n], or per token.
        sequence_ids: the ids that the plan was given, if it was given any. The end of a step recognises sequences by
            them, and error messages name them if the correction is made in the loss.
        policy_versions: for staleness in the loss; only if the plan was given the current version.
        ref_log_probs: log π_ref; needed for a KL penalty.
        weights: importance weights of the plan; must be None if the config applies none or the loss finds them.
        mask: bool, the accepted tokens of the plan; must be None if the loss finds them.
        sequence_lengths: [n] float64, n_i of the plan; must be None if the loss finds them.
        plan_ids: [n] int64, the index of each sequence in this rank's part of the rollout batch: the end of a step
            recognises sequences by it if the plan was given no ``sequence_ids``. None: they are not recognised.
    """

    layout: SequenceLayout = field()
    advantages: Tensor = field()
    ref_log_probs: Tensor | None = None
    weights: Tensor | None = None
    mask: Tensor | None = None
    sequence_lengths: Tensor | None = None
    plan_ids: Tensor | None = None


@dataclass(frozen=True)
class CorrectedMicroBatch:
    """The correction of one micro-batch; unpacks as ``weights, mask, sequence_lengths``."""

    weights: Tensor | None  # detached; None if none are applied; bounded, and in decoupled mode normalised
    mask: Tensor  # bool: the accepted tokens m'
    sequence_lengths: Tensor  # [n] float64, n_i: tokens of each whole sequence in the denominator
    old_log_probs: Tensor  # log π_old, detached: of the plan, of the rollout in bypass mode, or interpolated
    sums: StepSums[Tensor]  # what the end of the step compares with the plan
    mean_log_ratio: Tensor | None = None  # [n] float64, the mean of log π_θ/π_old over each sequence; None: not known
    batch: BatchSums | None = None  # the decisions, to be measured for the step; None: the plan has measured them

    def __iter__(self) -> Iterator[Tensor | None]:
        return iter((self.weights, self.mask, self.sequence_lengths))
