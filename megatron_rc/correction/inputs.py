"""What the correction is given, as the caller hands it over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from megatron_rc.parallel.arguments import check_integer
from megatron_rc.parallel.layout import SequenceLayout

Tensors = Tensor | Sequence[Tensor]
Layouts = SequenceLayout | Sequence[SequenceLayout]


V = TypeVar("V", bound=Tensors, covariant=True)
L = TypeVar("L", bound=Layouts, covariant=True)


@dataclass(frozen=True)
class CorrectionInputs(Generic[V, L]):
    """What is known of sampled tokens on one rank: V and L are tensors and layouts, or lists of them.

    The fields are the arguments of the same names of :func:`correct_rollouts`, which says what each holds. What may be
    given one a sequence or one a token is read as one a sequence where both shapes are the same.

    Attributes:
        train_log_probs: must be None where the correction is made in the loss: π_θ comes later.
    """

    train_log_probs: V | None
    rollout_log_probs: V
    response_mask: V
    layout: L | None = None
    advantages: V | None = None
    rewards: V | None = None
    group_ids: V | None = None
    sequence_ids: V | None = None
    policy_versions: V | None = None
    mini_batch_ids: V | None = None


AnyInputs = CorrectionInputs[Tensors, Layouts]
OneMicroBatch = CorrectionInputs[Tensor, SequenceLayout]


class PlanInputs(AnyInputs):
    """One rank's part of a rollout batch: one tensor each, or lists with one a micro-batch."""


@dataclass(frozen=True)
class AgreedCounts:
    """The counts that all ranks agree on before any of them looks at data, so that no shape depends on data.

    Attributes:
        num_mini_batches: optimizer steps that share the batch.
        num_groups: prompts of the whole batch; None where no criterion looks at prompts.
        current_version: of the weights that train; None where versions are not looked at.
        max_staleness: the last bucket of staleness holds everything from here on.
    """

    num_mini_batches: int = 1
    num_groups: int | None = None
    current_version: int | None = None
    max_staleness: int = 0


def check_counts(counts: AgreedCounts) -> None:
    """Raise ValueError for counts that cannot be."""
    check_integer("num_mini_batches", counts.num_mini_batches, least=1)
    if counts.num_groups is not None:
        check_integer("num_groups", counts.num_groups, least=1)
    if counts.current_version is not None:
        check_integer("current_version", counts.current_version)
    check_integer("max_staleness", counts.max_staleness, least=0)
    if counts.max_staleness and counts.current_version is None:
        raise ValueError(
            f"max_staleness={counts.max_staleness} does nothing without policy_versions and current_version"
        )
