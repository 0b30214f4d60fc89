"""Checks of the data: counts of impossible values on every rank, and the errors that they raise on the host."""

from __future__ import annotations

import functools
import hashlib

import torch
from torch import Tensor

from megatron_rc.correction.inputs import OutOfRange, Shards
from megatron_rc.correction.sequences import SequenceSums
from megatron_rc.measures.bad_tokens import describe_bad_token, first_bad_key
from megatron_rc.measures.header import DataSums
from megatron_rc.measures.shift import find_lag, shift_sums
from megatron_rc.numerics import MAX_ZERO_LOG_PROBS
from megatron_rc.settings.config import RolloutCorrectionConfig

_RANGES = {
    "sequence_ids": "lie in [0, 2²¹)",
    "mini_batch_ids": "lie in [0, num_mini_batches)",
    "group_ids": "lie in [0, num_groups)",
    "policy_versions": "be at most current_version",
    "advantages": "be finite",
    "rewards": "be finite",
}


def data_sums(
    shards: Shards, sums: SequenceSums, newer_tokens: Tensor, config: RolloutCorrectionConfig
) -> DataSums[Tensor]:
    """The counts of this rank.

    Args:
        shards: the local tokens.
        sums: of whole sequences.
        newer_tokens: 0-D, tokens with a version above the current one; 0 if versions are one a sequence.
        config: the correction.
    """
    trained, first = sums.response > 0, shards.is_first_cp_rank
    # Log-probs are at most 0: except for rounding above it, which may cancel, all are 0 if their sum is.
    zeros = (sums.rollout == 0) & (sums.valid > MAX_ZERO_LOG_PROBS)
    infinite = torch.stack(
        [(part.mask & ~part.advantages.isfinite()).sum() for part in shards.parts if part.advantages is not None]
        or [torch.zeros_like(newer_tokens)]
    )
    wrong, number = shards.out_of_range, sums.valid.new_full((), fingerprint(config))
    flags = torch.stack([*vars(wrong).values(), zeros]) & trained
    *ranges, zero_log_probs = (flags.sum(1, dtype=torch.float64) * first).unbind()
    counts = OutOfRange(*ranges)
    return DataSums(
        sequence_ids=counts.sequence_ids,
        mini_batch_ids=counts.mini_batch_ids,
        group_ids=counts.group_ids,
        policy_versions=counts.policy_versions + newer_tokens,
        advantages=counts.advantages + infinite.sum(),
        rewards=counts.rewards,
        bad_tokens=(sums.response - sums.valid).sum() * first,
        default_ids=sums.valid.new_full((), shards.has_default_ids * first),
        zero_log_probs=zero_log_probs,
        shift=shift_sums(shards.parts),
        config_max=number,
        config_min=number,
        first_bad_key=first_bad_key(shards, sums.response - sums.valid),
    )


@functools.lru_cache(maxsize=64)
def fingerprint(config: RolloutCorrectionConfig) -> int:
    """A number below 2⁴⁸ that two configurations share only if all their fields are equal (or by a rare chance)."""
    return int(hashlib.sha256(repr(sorted(config.to_dict().items())).encode()).hexdigest()[:12], 16)


def check_data(data: DataSums[float], config: RolloutCorrectionConfig, *, allow_zero_log_probs: bool) -> None:
    """Raise ValueError for the first count that cannot be right; the counts are equal on every rank."""
    if not data.config_min == data.config_max == fingerprint(config):
        raise ValueError(
            "config: the RolloutCorrectionConfig differs between ranks: give every rank the same fields, for example "
            "from one file"
        )
    for name, remedy in _RANGES.items():
        count = getattr(data, name)
        if count:
            raise ValueError(f"{name}: {count:.0f} values of the batch are out of range, all must {remedy}")
    if config.bad_log_probs == "error" and data.bad_tokens:
        raise ValueError(describe_bad_token(data.first_bad_key, data.bad_tokens, bool(data.default_ids)))
    if data.zero_log_probs and not allow_zero_log_probs:
        raise ValueError(
            f"rollout_log_probs: their sum is exactly 0 at the trained tokens of {data.zero_log_probs:.0f} sequences "
            f"of more than {MAX_ZERO_LOG_PROBS} such tokens, as if the engine returned none and all are 0: ask it for "
            "log-probs; if they are right (greedy sampling), pass allow_zero_log_probs=True"
        )
    lag = find_lag(data.shift)
    if lag:
        raise ValueError(
            f"the rollout log-probs are shifted by {lag:+d} position against the training log-probs: align both to the "
            "label tokens (labels = tokens shifted left by one, before any sharding)"
        )
