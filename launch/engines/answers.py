"""Requests for single responses, with a seed each, and the checks that every answer passes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rc.launch.engines import EngineError, Sample
from megatron_rc.launch.engines.requests import MOST_BYTES
from megatron_rc.numerics import POSITIVE_LIMIT
from megatron_rc.records.rollout import SamplingParams

LOWEST = -9000.0  # vLLM's server writes -9999 for minus infinity


@dataclass(frozen=True)
class Ask:
    """Request for one response.

    Attributes:
        index: position of the prompt in the batch.
        prompt: token ids.
        params: parameters of the distribution.
        max_new_tokens: largest number of tokens in the response.
        eos_token_id: token that ends the response.
        seed: seed of this request alone.
    """

    index: int
    prompt: list[int]
    params: SamplingParams
    max_new_tokens: int
    eos_token_id: int
    seed: int

    @property
    def most_bytes(self) -> int:
        """Upper bound of the size of an answer: no engine writes a kilobyte about one token."""
        return MOST_BYTES + 1024 * (len(self.prompt) + self.max_new_tokens)


def make_asks(
    prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int, seed: int, eos_token_id: int
) -> list[Ask]:
    """Make one request for each prompt; seeds differ, so that equal prompts get different responses.

    Raises:
        ValueError: a prompt is empty.
    """
    empty = [index for index, prompt in enumerate(prompts) if not prompt]
    if empty:
        raise ValueError(f"prompt {empty[0]} is empty: a response needs at least one token before it")
    return [
        Ask(index, list(prompt), params, max_new_tokens, eos_token_id, derive_seed(seed, index))
        for index, prompt in enumerate(prompts)
    ]


def derive_seed(seed: int, index: int) -> int:
    """Seed of request ``index``: 31 bits, equal in every process. A hash, because a counter repeats across steps."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 33


def make_sample(ask: Ask, token_ids: Any, log_probs: Any, reason: Any, source: str) -> Sample:
    """Make a sample of an answer, after checks.

    An unusable log-prob becomes NaN and is described in ``Sample.fault``, because it concerns one response. The errors
    below concern every answer of the engine.

    Args:
        ask: the request.
        token_ids: token ids as the engine sent them.
        log_probs: log-probs as the engine sent them.
        reason: finish reason as the engine sent it.
        source: name of the engine in errors.

    Raises:
        EngineError: a field is absent or has a wrong type or length, or the response ended too early.
    """
    where = f"{source}, prompt {ask.index}:"
    if not isinstance(token_ids, list) or any(type(token) is not int for token in token_ids):
        raise EngineError(
            f"{where} the answer's token ids are {_short(token_ids)}, expected a list of integers: use an engine "
            "version that returns them"
        )
    if not token_ids:
        return Sample([], [], "stop")
    if not isinstance(log_probs, list):
        raise EngineError(
            f"{where} the answer's log-probs are {_short(log_probs)}, expected a list: the engine must return them"
        )
    if len(log_probs) != len(token_ids):
        raise EngineError(f"{where} {len(log_probs)} log-probs for {len(token_ids)} tokens: the answer cannot be used")
    if len(token_ids) <= ask.max_new_tokens:
        _check_end(ask, token_ids, reason, where)
    numbers = [float(value) if _is_log_prob(value) else math.nan for value in log_probs]
    # Engines write "length" if end-of-text comes exactly at the length limit.
    finish_reason = "stop" if token_ids[-1] == ask.eos_token_id else "length"
    return Sample(token_ids, numbers, finish_reason, fault_in_log_probs(log_probs, where))


def fault_in_log_probs(log_probs: Sequence[Any], where: str) -> str | None:
    """Description of the first unusable log-prob, beginning with ``where``; None if all are usable."""
    for position, value in enumerate(log_probs):
        if not _is_log_prob(value):
            return (
                f"{where} the log-prob of response token {position} is {str(value)[:40]}, expected a finite number of "
                "at most 0: check the engine's weights and precision"
            )
    return None


def _check_end(ask: Ask, token_ids: list[int], reason: Any, where: str) -> None:
    """Check that the response ends with its only end-of-text token, or at the requested length."""
    if reason not in ("stop", "length"):
        raise EngineError(
            f"{where} the response ended with {_short(reason)}, expected 'stop' or 'length': see the engine's log"
        )
    if ask.eos_token_id in token_ids[:-1]:
        raise EngineError(
            f"{where} the response goes on after end-of-text token {ask.eos_token_id}: do the engine and the trainer "
            "use the same tokenizer?"
        )
    if token_ids[-1] == ask.eos_token_id or len(token_ids) == ask.max_new_tokens:
        return
    if reason == "length":
        raise EngineError(
            f"{where} the response was cut after {len(token_ids)} of {ask.max_new_tokens} tokens: raise the engine's "
            "longest sequence (vLLM: --max-model-len, SGLang: --context-length)"
        )
    raise EngineError(
        f"{where} the response stopped at token {token_ids[-1]}, which is not end-of-text token {ask.eos_token_id}: "
        "remove other stop tokens from the engine's model directory"
    )


def _is_log_prob(value: Any) -> bool:
    # The comparison is false for NaN and infinities, and raises no error for an integer beyond all floats.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and LOWEST < value <= POSITIVE_LIMIT


def _short(value: Any) -> str:
    return repr(value)[:80]
