"""Rollout engines: programs that sample responses, one on the first rank of each data-parallel replica."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_rc.launch.errors import RunError
from megatron_rc.records.rollout import SamplingParams


class EngineError(RunError):
    """An engine failed, or gave an answer that must not be trained on; the message names a remedy."""


@dataclass(frozen=True)
class Sample:
    """One response.

    Attributes:
        token_ids: sampled tokens, with the end token or the tokens of the stop string that ended the response.
        log_probs: log-prob of each token in nats, under the distribution that it was sampled from.
        finish_reason: ``stop`` (an end token or a stop string), ``length``, or ``abort`` for a dropped response without
            tokens.
        fault: description of an unusable log-prob; None if all are usable.
        routed_experts: [tokens of prompt and response − 1, layers, top_k] integers, the experts that read each token
            but the last; -1 if they are not known. None: the engine was not asked for them.
        support: (ids, counts) int32: the tokens that top-p, top-k or min-p kept, one position after the other, and
            their number at each sampled token; 0: all tokens. None: the engine was not asked for them.
        versions: version of the weights that sampled each token. None: the engine's ``version`` sampled all of them.
        bad_lengths: number of tokens of each bad response that came to the same request before, and of this one if it
            was dropped; 0: no token came. Engines leave it empty.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str
    fault: str | None = None
    routed_experts: Tensor | None = None
    support: tuple[Tensor, Tensor] | None = None
    versions: list[int] | None = None
    bad_lengths: tuple[int, ...] = ()


@dataclass(frozen=True)
class Progress:
    """Responses to one call of a rollout batch, for an engine whose samples go on under new weights.

    Attributes:
        batch: number of the rollout batch; requests of earlier batches go first.
        prompts: the call's prompts, token ids; in a checkpoint those of ``samples``, by their index.
        sampling: the call's sampling parameters.
        samples: responses that are there, by the index of their prompt. The engine asks for the others and adds each
            one when it comes, so that a checkpoint can keep it.
    """

    batch: int
    prompts: Sequence[list[int]] | Mapping[int, list[int]]
    sampling: SamplingParams
    samples: dict[int, Sample]


class RolloutEngine(Protocol):
    """Interface of an engine.

    Attributes:
        version: number of optimizer steps that made the engine's weights.

    Two attributes are optional. ``is_elsewhere`` is true for an engine that samples in another process; then
    ``--rollout-staleness`` calls ``sample`` on a thread while the trainer goes on, but never during ``load_weights``.
    With ``--rl-partial-rollouts`` several threads call it, with a :class:`Progress` as the last argument, also during
    ``load_weights``: then samples that are under way go on under the new weights, and have ``versions``. ``restarts``
    counts the restarts of an engine that can be restarted while the trainer goes on.
    """

    version: int

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over all weights of the model, pairs of a Hugging Face name and a tensor, one at a time.

        Raises ValueError if a tensor is unknown, comes twice, has another shape, or is missing.
        """

    def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int, seed: int
    ) -> list[Sample]:
        """Sample one response for each prompt of token ids; the same seed and weights give the same responses.

        Raises EngineError if the engine failed as a whole, not in a single response.
        """
