"""What an engine sends and what it may answer: seeds of single requests, and the checks that every sample passes."""

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
    """One response to be sampled.

    Attributes:
        index: of the prompt within the batch.
        prompt: token ids.
        params: of the distribution.
        max_new_tokens: that the response may have.
        eos_token_id: ends it.
        seed: of this request alone.
    """

    index: int
    prompt: list[int]
    params: SamplingParams
    max_new_tokens: int
    eos_token_id: int
    seed: int

    @property
    def most_bytes(self) -> int:
        """More than any answer to it has: no engine writes a kilobyte about a token."""
        return MOST_BYTES + 1024 * (len(self.prompt) + self.max_new_tokens)


def make_asks(
    prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int, seed: int, eos_token_id: int
) -> list[Ask]:
    """One request a prompt, each with a seed of its own, so that equal prompts get different responses.

    Raises:
        ValueError: an empty prompt, a temperature that is not above 0, or no new tokens.
    """
    if params.temperature <= 0:
        raise ValueError(f"temperature is {params.temperature}: expected a number above 0")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}: expected at least 1")
    empty = [index for index, prompt in enumerate(prompts) if not prompt]
    if empty:
        raise ValueError(f"prompt {empty[0]} is empty: a response needs at least one token before it")
    return [
        Ask(index, list(prompt), params, max_new_tokens, eos_token_id, derive_seed(seed, index))
        for index, prompt in enumerate(prompts)
    ]


def derive_seed(seed: int, index: int) -> int:
    """The seed of request ``index``: 31 bits, equal in every process; a counter would repeat across steps."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 33


def make_sample(ask: Ask, token_ids: Any, log_probs: Any, reason: Any, source: str) -> Sample:
    """The sample of an answer, after a check of what is the same in all that the engine gives.

    Log-probs that are none become NaN, and its ``fault``.

    Args:
        ask: what was asked for.
        token_ids: of the answer, as they came.
        log_probs: of the answer, as they came.
        reason: the engine's finish reason: ``stop`` or ``length``.
        source: names the engine in errors.

    Raises:
        EngineError: fields that are absent, of another type or length, or a response that ends before it should: so
            are all that the engine gives.
    """
    where = f"{source}, prompt {ask.index}:"
    if not _is_list_of(token_ids, int):
        raise EngineError(
            f"{where} the answer's token ids are {_short(token_ids)}, expected a list of integers: ask for an engine "
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
    numbers = [float(value) if _is_log_prob(value) else math.nan for value in log_probs]
    if len(token_ids) <= ask.max_new_tokens:
        _check_end(ask, token_ids, reason, where)
    return Sample(token_ids, numbers, _finish_reason(ask, token_ids), fault_in_log_probs(log_probs, where))


def fault_in_log_probs(log_probs: Sequence[Any], where: str) -> str | None:
    """The first that is no log-prob, in words that begin with ``where``."""
    for position, value in enumerate(log_probs):
        if not _is_log_prob(value):
            return (
                f"{where} the log-prob of response token {position} is {str(value)[:40]}, expected a finite number of "
                "at most 0: check the engine's weights and precision"
            )
    return None


def _check_end(ask: Ask, token_ids: list[int], reason: Any, where: str) -> None:
    """A response ends with the end-of-text token, its only one, or at the length that was asked for."""
    if reason not in ("stop", "length"):
        raise EngineError(f"{where} the response ended with {_short(reason)}, expected 'stop' or 'length': see its log")
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


def _finish_reason(ask: Ask, token_ids: list[int]) -> str:
    """Engines call a response that ends with end-of-text at its last place either; it is a whole one."""
    return "stop" if token_ids[-1] == ask.eos_token_id else "length"


def _is_log_prob(value: Any) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        # False of NaN and both infinities, and no error for an integer beyond all floats.
        and LOWEST < value <= POSITIVE_LIMIT
    )


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) and not isinstance(item, bool) for item in value)


def _short(value: Any) -> str:
    return repr(value)[:80]
