"""What a rollout is: the record that an engine hands to the trainer, and its checks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.tokens import POSITIVE_LIMIT

FINISH_REASONS = ("stop", "length", "abort")


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens were sampled.

    Attributes:
        temperature: of the distribution, > 0.
        top_p: nucleus; 1 samples from all tokens.
        top_k: number of tokens sampled from; 0 means all.
        log_probs_mode: ``processed``: log-probs of the distribution that was sampled from; ``raw``: before temperature.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    log_probs_mode: str = "processed"


@dataclass(frozen=True)
class RolloutBatch:
    """Responses with all that the trainer needs of them, whole sequences, padded on the right.

    Attributes:
        tokens: [n, s] int64: prompt, response, padding.
        response_mask: [n, s] bool, True at sampled tokens (in token positions, not yet in label positions).
        rollout_log_probs: [n, s] float32, log π_rollout of the sampled tokens in nats; anything elsewhere.
        policy_versions: [n, s] int32, version of the weights that sampled each token; anything elsewhere.
        sample_ids: [n] int64, unique over all replicas, below 2²¹.
        group_ids: [n] int64, equal for the responses to one prompt.
        rewards: [n] float32.
        finish_reasons: [n] int64, index into ``FINISH_REASONS``.
        sampling: how the tokens were sampled.
        routed_experts: [n, s, layers, top_k] int32, for models with experts; None otherwise.
    """

    tokens: Tensor
    response_mask: Tensor
    rollout_log_probs: Tensor
    policy_versions: Tensor
    sample_ids: Tensor
    group_ids: Tensor
    rewards: Tensor
    finish_reasons: Tensor
    sampling: SamplingParams
    routed_experts: Tensor | None = None

    def validate(self, *, allow_truncated_sampling: bool = False) -> None:
        """Check what can be checked on one host, before the records travel.

        Args:
            allow_truncated_sampling: accept top_p < 1 or top_k > 0, where the sampled distribution is not the policy.

        Raises:
            ValueError: names the field, the sample and the position.
        """
        self._check_shapes()
        self._check_sampling(allow_truncated_sampling)
        if self.response_mask[:, 0].any():
            sample = int(self.sample_ids[self.response_mask[:, 0]][0])
            raise ValueError(f"sample {sample}: its first token is marked as sampled, but nothing stands before it")
        values = self.rollout_log_probs
        bad = self.response_mask & ~(values.isfinite() & (values <= POSITIVE_LIMIT))
        if bad.any():
            row, position = (int(index) for index in bad.nonzero()[0])
            raise ValueError(
                f"the rollout log-prob of sample {int(self.sample_ids[row])}, token {position} is "
                f"{float(values[row, position])}: expected a finite number of at most 0"
            )
        if not self.rewards.isfinite().all():
            row = int((~self.rewards.isfinite()).nonzero()[0])
            raise ValueError(f"the reward of sample {int(self.sample_ids[row])} is {float(self.rewards[row])}")

    def label_aligned(self) -> tuple[Tensor, Tensor, Tensor]:
        """(labels, response_mask, rollout_log_probs), each [n, s]: position t speaks of token t + 1.

        The shift is made over whole sequences, before any sharding; the last position is never counted.
        """
        return tuple(
            torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], dim=1)
            for value in (self.tokens, self.response_mask, self.rollout_log_probs)
        )  # type: ignore[return-value]

    def _check_shapes(self) -> None:
        rows, length = self.tokens.shape
        for name in ("response_mask", "rollout_log_probs", "policy_versions"):
            if getattr(self, name).shape != (rows, length):
                shape = tuple(getattr(self, name).shape)
                raise ValueError(f"{name} has shape {shape}: expected {(rows, length)}, that of tokens")
        for name in ("sample_ids", "group_ids", "rewards", "finish_reasons"):
            if getattr(self, name).shape != (rows,):
                raise ValueError(f"{name} has shape {tuple(getattr(self, name).shape)}: expected {(rows,)}")
        if self.sample_ids.unique().numel() != rows:
            raise ValueError("sample_ids must be unique")

    def _check_sampling(self, allow_truncated_sampling: bool) -> None:
        sampling = self.sampling
        if sampling.log_probs_mode != "processed" and sampling.temperature != 1:
            raise ValueError(
                f"log-probs are {sampling.log_probs_mode} (before temperature) at temperature {sampling.temperature}: "
                "ask the engine for processed log-probs"
            )
        if (sampling.top_p < 1 or sampling.top_k > 0) and not allow_truncated_sampling:
            raise ValueError(
                f"top_p={sampling.top_p}, top_k={sampling.top_k} sample from a truncated distribution, which is not "
                "the policy: sample with top_p=1 and top_k=0"
            )
