"""Overlong filtering: no training on responses that were cut off at the maximum length."""

from __future__ import annotations

import dataclasses

import torch

from megatron_rc.records.rollout import FINISH_REASONS, RolloutBatch

_CUT_OFF = FINISH_REASONS.index("length")


def without_overlong(batch: RolloutBatch) -> RolloutBatch:
    """Mask all tokens of responses that were cut off, as DAPO does (Yu et al. 2025, overlong filtering).

    Their rewards stay, so the baselines of the other responses do not change.
    """
    kept = (batch.finish_reasons != _CUT_OFF).unsqueeze(1)
    return dataclasses.replace(batch, response_mask=torch.where(kept, batch.response_mask, False))
