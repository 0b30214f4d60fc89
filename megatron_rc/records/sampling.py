"""Sampling parameters of a rollout batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from megatron_rc.parallel.arguments import check_integer, check_number, one_of

LOG_PROBS_MODES = ("processed", "raw")


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of all tokens of a batch.

    Attributes:
        temperature: divides the logits; > 0.
        top_p: probability of the nucleus; 1 samples from all tokens.
        top_k: number of tokens to sample from; 0 means all.
        min_p: least probability of a token, as a share of the likeliest token's; 0 samples from all tokens.
        log_probs_mode: ``processed``: log-probs of the distribution that was sampled from; ``raw``: before temperature.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    log_probs_mode: str = "processed"
    min_p: float = 0.0

    @property
    def is_truncated(self) -> bool:
        """Return whether tokens are sampled from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """The parameters from a mapping; ValueError unless it has each field but ``min_p``, and no other name."""
        names = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping):
            raise ValueError(f"sampling parameters are {values!r}: expected {', '.join(sorted(names))} by name")
        differing = (set(values) ^ names) - {"min_p"}  # records of older releases do not have min_p
        if differing:
            listed = ", ".join(sorted(differing))
            raise ValueError(f"sampling parameters: {listed} unknown or missing, expected {', '.join(sorted(names))}")
        return cls(**values)

    def check(self, allow_truncated_sampling: bool = False) -> None:
        """Check each parameter, and all together.

        Args:
            allow_truncated_sampling: accept top_p < 1, top_k > 0 and min_p > 0.

        Raises:
            ValueError: names the parameter, its value and the remedy.
        """
        check_number("temperature", self.temperature, lambda x: 0 < x < math.inf, "must be a number above 0")
        check_number("top_p", self.top_p, lambda x: 0 < x <= 1, "must be a number above 0 and at most 1")
        check_integer("top_k", self.top_k, least=0)
        check_number("min_p", self.min_p, lambda x: 0 <= x < 1, "must be a number of at least 0 and below 1")
        one_of("log_probs_mode", self.log_probs_mode, LOG_PROBS_MODES)
        # At temperature 1 raw and processed log-probs are the same.
        if self.log_probs_mode == "raw" and self.temperature != 1:
            raise ValueError(
                f"log-probs are raw (before temperature) at temperature {self.temperature}: "
                "ask the engine for processed log-probs"
            )
        if self.is_truncated and not allow_truncated_sampling:
            raise ValueError(
                f"top_p={self.top_p}, top_k={self.top_k}, min_p={self.min_p} sample from a truncated distribution, "
                "which is not the policy: record the tokens that the engine kept (support_ids), sample with top_p=1, "
                "top_k=0 and min_p=0, or allow truncated sampling"
            )
