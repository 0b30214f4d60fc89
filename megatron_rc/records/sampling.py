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
        log_probs_mode: ``processed``: log-probs of the distribution that was sampled from; ``raw``: before temperature.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    log_probs_mode: str = "processed"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """The parameters from a mapping; ValueError unless it has each field, and no other name."""
        names = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping):
            raise ValueError(f"sampling parameters are {values!r}: expected {', '.join(sorted(names))} by name")
        if set(values) != names:
            odd = ", ".join(sorted(set(values) ^ names))
            raise ValueError(f"sampling parameters: {odd} unknown or missing, expected {', '.join(sorted(names))}")
        return cls(**values)

    def check(self, allow_truncated_sampling: bool = False) -> None:
        """Check each parameter, and all together; ValueError names the parameter, its value and the remedy.

        ``allow_truncated_sampling``: accept top_p < 1 and top_k > 0.
        """
        temperature, top_p, top_k, mode = self.temperature, self.top_p, self.top_k, self.log_probs_mode
        check_number("temperature", temperature, lambda x: 0 < x < math.inf, "must be a number above 0")
        check_number("top_p", top_p, lambda x: 0 < x <= 1, "must be a number above 0 and at most 1")
        check_integer("top_k", top_k, least=0)
        one_of("log_probs_mode", mode, LOG_PROBS_MODES)
        if mode == "raw" and temperature != 1:
            raise ValueError(
                f"log-probs are raw (before temperature) at temperature {temperature}: "
                "ask the engine for processed log-probs"
            )
        if (top_p < 1 or top_k > 0) and not allow_truncated_sampling:
            raise ValueError(
                f"top_p={top_p}, top_k={top_k} sample from a truncated distribution, which is not the policy: sample "
                "with top_p=1 and top_k=0, or allow truncated sampling"
            )
