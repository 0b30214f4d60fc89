"""Rollout engines: what samples responses, on the first rank of each data-parallel replica."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_rc.records.rollout import SamplingParams


class EngineError(RuntimeError):
    """An engine that cannot be used, or an answer that is not to be trained on; the message names the remedy."""


@dataclass(frozen=True)
class Sample:
    """One response.

    Attributes:
        token_ids: the sampled tokens, the end-of-text token included where it was sampled.
        log_probs: of each of them, in nats, under the distribution it was sampled from.
        finish_reason: ``stop`` (end of text) or ``length``; ``abort``: dropped, without a token.
        fault: what is wrong with its log-probs, where the engine gave some that are none.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str
    fault: str | None = None


class RolloutEngine(Protocol):
    """What the trainer asks of an engine.

    Attributes:
        version: of the weights it samples from: the optimizer steps that made them.

    An engine that samples in another process, so that the trainer can go on meanwhile, says so with a true attribute
    ``is_elsewhere``: with ``--rollout-staleness`` its ``sample`` is called on a thread, never during ``load_weights``.
    One that can be started again while the trainer goes on counts that in an attribute ``restarts``.
    """

    version: int

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over ``(Hugging Face name, tensor)`` pairs, all of the model, one at a time.

        Raises:
            ValueError: a tensor that the model lacks, that comes twice, of another shape, or that never came.
        """
        ...

    def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int, seed: int
    ) -> list[Sample]:
        """One response for each prompt of token ids; the same seed and weights give the same responses.

        Raises:
            EngineError: it failed as a whole, not in a single response.
        """
        ...
