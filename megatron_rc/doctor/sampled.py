"""Sampled tokens with what two policies say of them: what the doctor needs of a recorded batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_rc import RolloutBatch, SamplingParams
from megatron_rc.doctor.other_words import OWN


@dataclass(frozen=True, eq=False)
class Sampled:
    """Responses of n sequences; every tensor speaks of the token at its own column.

    Attributes:
        rollout_log_probs: [n, s] float32 or float64, log π_rollout in nats; anything where ``response_mask`` is False.
        response_mask: [n, s] bool, True at sampled tokens, without those that the trainer did not score.
        old_log_probs: log π_old of the same tokens, or None where nobody wrote them down.
        rewards: [n], or None.
        policy_versions: [n, s] int64, version of the weights that sampled, or None.
        sampling: how the tokens were sampled, or None where the record does not say.
        group_ids: [n] int64, equal for the responses to one prompt, or None where the record does not say.
        tokens: [n, s] int64, or None.
        dialect: the program that wrote them, as the settings' dialects are called.
    """

    rollout_log_probs: Tensor
    response_mask: Tensor
    old_log_probs: Tensor | None = None
    rewards: Tensor | None = None
    policy_versions: Tensor | None = None
    sampling: SamplingParams | None = None
    group_ids: Tensor | None = None
    tokens: Tensor | None = None
    dialect: str = OWN

    @classmethod
    def of_batch(cls, batch: RolloutBatch) -> Sampled:
        """Those of a rollout batch; in bypass mode, where no step was scored before it, π_θ stands for π_old."""
        old = batch.log_probs if batch.old_log_probs is None else batch.old_log_probs
        scored = None if old is None else batch.response_mask & ~old.isnan()
        if scored is None or not scored.any():
            old, scored = None, batch.response_mask
        return cls(
            rollout_log_probs=batch.rollout_log_probs,
            response_mask=scored,
            old_log_probs=old,
            rewards=batch.rewards,
            policy_versions=batch.policy_versions.long(),
            sampling=batch.sampling,
        )

    def usable(self) -> Tensor:
        """[n, s] bool: sampled tokens whose log-probs are finite and not positive."""
        mask = self.response_mask
        for values in (self.rollout_log_probs, self.old_log_probs):
            if values is not None:
                mask = mask & values.isfinite() & (values <= 1e-4)
        return mask
