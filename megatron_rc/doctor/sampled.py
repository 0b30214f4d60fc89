"""Sampled tokens with the log-probs of both policies, from a record of any program."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rc import CorrectionResult, RolloutBatch, RolloutCorrectionConfig, SamplingParams, correct_rollouts
from megatron_rc.doctor.programs import OWN


@dataclass(frozen=True, eq=False)
class Sampled:
    """Responses of n sequences; column t of every tensor belongs to token t. Fields that the record lacks are None."""

    rollout_log_probs: Tensor  # [n, s] float32 or float64, log π_rollout in nats; any value outside of the mask
    response_mask: Tensor  # [n, s] bool, True at sampled tokens that the trainer scored
    old_log_probs: Tensor | None = None  # [n, s], log π_old in nats
    rewards: Tensor | None = None  # [n]
    policy_versions: Tensor | None = None  # [n, s] int64, version of the weights that sampled the token
    sampling: SamplingParams | None = None
    group_ids: Tensor | None = None  # [n] int64, equal for the responses to one prompt
    tokens: Tensor | None = None  # [n, s] int64, token ids
    program: str = OWN  # that wrote the record
    notes: tuple[str, ...] = ()  # sentences about what the record lacks

    @classmethod
    def of_batch(cls, batch: RolloutBatch) -> Sampled:
        """Responses of a rollout batch. A run in bypass mode records π_θ alone, which then replaces π_old."""
        old = batch.log_probs if batch.old_log_probs is None else batch.old_log_probs
        scored = None if old is None else batch.response_mask & ~old.isnan()
        if scored is None or not scored.any():
            old = None
            scored = batch.response_mask
        sampling = batch.sampling
        if batch.support_ids is not None:  # the trainer's log-probs are over the same tokens
            sampling = replace(sampling, top_p=1.0, top_k=0, min_p=0.0)
        return cls(
            rollout_log_probs=batch.rollout_log_probs,
            response_mask=scored,
            old_log_probs=old,
            rewards=batch.rewards,
            policy_versions=batch.policy_versions.long(),
            sampling=sampling,
        )

    def corrected(
        self, config: RolloutCorrectionConfig, rewards: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> CorrectionResult:
        """The correction of a record that has log π_old; ``dtype`` is that of the weights."""
        assert self.old_log_probs is not None
        old = self.old_log_probs.to(dtype)
        rollout = self.rollout_log_probs.to(dtype)
        return correct_rollouts(old, rollout, self.response_mask, config, rewards=rewards, allow_zero_log_probs=True)

    def usable(self) -> Tensor:
        """[n, s] bool: sampled tokens with finite log-probs that are not positive."""
        mask = self.response_mask
        for values in (self.rollout_log_probs, self.old_log_probs):
            if values is not None:
                mask = mask & values.isfinite() & (values <= 1e-4)
        return mask
