"""Responses that were cut off at their longest length, where they are not to be trained on."""

from __future__ import annotations

import dataclasses

import torch

from megatron_rc.records.rollout import FINISH_REASONS, RolloutBatch

_CUT_OFF = FINISH_REASONS.index("length")


def without_overlong(batch: RolloutBatch) -> RolloutBatch:
    """The batch with no trained token in responses without an end: the overlong filtering of DAPO (Yu et al. 2025).

    Their rewards stay, and so the mean and the spread of their prompts' rewards, which the advantages of the other
    responses are measured by.
    """
    kept = (batch.finish_reasons != _CUT_OFF).unsqueeze(1)
    return dataclasses.replace(batch, response_mask=torch.where(kept, batch.response_mask, False))
