"""``correct_rollouts``: the correction of a whole rollout batch."""

from __future__ import annotations

import torch

from megatron_rc.batch.result import CorrectionResult
from megatron_rc.batch.sums import correct_batch
from megatron_rc.correction.inputs import AgreedCounts, Layouts, PlanInputs, Tensors
from megatron_rc.parallel.groups import ParallelGroups
from megatron_rc.settings.config import RolloutCorrectionConfig


@torch.no_grad()
def correct_rollouts(
    train_log_probs: Tensors,
    rollout_log_probs: Tensors,
    response_mask: Tensors,
    config: RolloutCorrectionConfig,
    layout: Layouts | None = None,
    groups: ParallelGroups | None = None,
    *,
    advantages: Tensors | None = None,
    rewards: Tensors | None = None,
    group_ids: Tensors | None = None,
    num_groups: int | None = None,
    sequence_ids: Tensors | None = None,
    policy_versions: Tensors | None = None,
    current_version: int | None = None,
    max_staleness: int = 0,
    mini_batch_ids: Tensors | None = None,
    num_mini_batches: int = 1,
    turn_ids: Tensors | None = None,
    allow_zero_log_probs: bool = False,
    compile: bool = False,
) -> CorrectionResult:
    """Importance weights, accepted mask, denominators and metrics of a whole rollout batch.

    Every tensor argument and the layout may be lists with one entry a micro-batch; weights and mask then are lists too.

    Args:
        train_log_probs: log π_train, the layout's local shape, nats; detached.
        rollout_log_probs: log π_rollout of the same tokens, of the same shape.
        response_mask: bool, of the same shape; values elsewhere change no bit of any result.
        config: the correction.
        layout: which tokens these are. Default: padded ``[b, s]``, whole sequences.
        groups: ``cp`` and ``dp_cp`` hold the other tokens. Default: this process alone.
        advantages: [n], or like the log-probs; ``opsm`` needs them.
        rewards: [n]; rejected shares are reported by their sign.
        group_ids: [n] int64 in [0, num_groups): the prompt of each sequence; group criteria need them.
        num_groups: prompts of the whole batch.
        sequence_ids: [n] int64, unique over DP, below 2²¹; error messages name them. Default: the local index.
        policy_versions: [n] or like the log-probs, int64: the version of the weights that sampled.
        current_version: of the weights that train; staleness is its distance from ``policy_versions``.
        max_staleness: the last bucket of staleness holds this one and all above.
        mini_batch_ids: [n] int64 in [0, num_mini_batches); may be left out with one mini-batch.
        num_mini_batches: optimizer steps that share the batch.
        turn_ids: int64, like the log-probs: consecutive tokens with one id are a turn. Default: each run of trained
            tokens is one.
        allow_zero_log_probs: ``check()`` takes sequences of more than 8 trained tokens whose rollout log-probs sum to
            exactly 0, which only greedy sampling gives. Without it they are an error: the engine returned no log-probs.
        compile: run the pass over padded tokens through ``torch.compile``: seconds for the first call of each shape and
            configuration, then less time. After eight of them (torch's ``recompile_limit``) others run as they are.

    The counts ``num_*``, ``current_version`` and ``max_staleness`` are the same on every rank.

    Returns:
        The result; call its ``check()`` before any optimizer step.

    Collectives: one SUM over ``cp`` (and one MAX with a ``seq_max`` criterion), one SUM and one MAX over ``dp_cp`` (and
    one SUM of ``[num_groups, k]`` with a group criterion); none for a group of size 1. Weights of prefixes add one SUM
    over ``cp``, turns two. The sizes do not depend on the number of tokens.

    Raises:
        ValueError: shapes, dtypes or settings that do not fit together (alike on all ranks).
    """
    per_sequence = (advantages, rewards, group_ids, sequence_ids, policy_versions, mini_batch_ids)
    inputs = PlanInputs(train_log_probs, rollout_log_probs, response_mask, layout, *per_sequence, turn_ids)
    counts = AgreedCounts(num_mini_batches, num_groups, current_version, max_staleness)
    return correct_batch(
        inputs, config, counts, ParallelGroups.given(groups), compile=compile, allow_zero_log_probs=allow_zero_log_probs
    )
