"""Requests for single responses, with a seed each, and the checks that every answer passes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_rc.launch.engines import EngineError, Sample
from megatron_rc.launch.engines.requests import MOST_BYTES
from megatron_rc.launch.tasks.ends import STOP_TOKENS, ResponseEnds
from megatron_rc.numerics import POSITIVE_LIMIT
from megatron_rc.records.rollout import SamplingParams
from megatron_rc.records.support import support_of

LOWEST = -9000.0  # vLLM's server writes -9999 for minus infinity


@dataclass(frozen=True)
class Ask:
    """Request for one response."""

    index: int  # position of the prompt in the batch
    prompt: list[int]  # token ids
    params: SamplingParams
    max_new_tokens: int
    ends: ResponseEnds
    seed: int  # of this request alone
    kilobytes: int = 1  # largest answer for each token: no engine writes more, without experts and kept tokens
    version: int = 0  # of the engine's weights when it was asked

    @property
    def most_bytes(self) -> int:
        """Upper bound of the size of an answer."""
        return MOST_BYTES + (self.kilobytes << 10) * (len(self.prompt) + self.max_new_tokens)

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling parameters with the names that vLLM and SGLang share.

        All that exist are named: a server takes those that are missing from its model's files.
        """
        return {
            "temperature": self.params.temperature,
            "top_p": self.params.top_p,
            "min_p": self.params.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(self.ends.token_ids),
            **({"stop": list(self.ends.strings)} if self.ends.strings else {}),
            "skip_special_tokens": False,
        }

    @property
    def sampling_of_vllm(self) -> dict[str, Any]:
        """Sampling parameters as vLLM names them."""
        of_vllm_alone = {
            "n": 1,
            "max_tokens": self.max_new_tokens,
            "top_k": self.params.top_k,
            "seed": self.seed,
            # The log-prob of the sampled token, and of no other one.
            "logprobs": 0,
            # Stop strings are found in text, which vLLM makes only if it is asked for it.
            "detokenize": bool(self.ends.strings),
            # Only ``stop_token_ids`` end a response, whichever tokens the files of the server's model name.
            "ignore_eos": True,
        }
        return self.sampling | of_vllm_alone


def make_asks(
    prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int, seed: int, ends: ResponseEnds
) -> list[Ask]:
    """One request for each prompt, with a seed of its own, so that equal prompts get different responses.

    Raises ValueError if a prompt is empty.
    """
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {index} is empty: a response needs at least one token before it")
    return [
        Ask(index, list(prompt), params, max_new_tokens, ends, derive_seed(seed, index))
        for index, prompt in enumerate(prompts)
    ]


def derive_seed(seed: int, index: int) -> int:
    """Seed of request ``index``: 31 bits, equal in every process. A hash, because a counter repeats across steps."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 33


def make_sample(
    ask: Ask,
    token_ids: Any,
    log_probs: Any,
    reason: Any,
    source: str,
    *,
    experts: Tensor | None = None,
    kept: Any = None,
) -> Sample:
    """Make a sample of an answer's token ids, log-probs and finish reason; ``source`` names the engine in errors.

    ``experts`` and ``kept``, a list of ids for each token, come with the answer if the engine was asked for them. An
    unusable log-prob becomes NaN, and ``Sample.fault`` describes it; other faults of an answer are an EngineError.
    """
    where = f"{source}, prompt {ask.index}:"
    if not isinstance(token_ids, list) or any(type(token) is not int for token in token_ids):
        raise EngineError(
            f"{where} the answer's token ids are {_short(token_ids)}, expected a list of integers: use an engine "
            "version that returns them"
        )
    if not token_ids:
        return Sample([], [], "stop")
    if not isinstance(log_probs, list) or len(log_probs) != len(token_ids):
        raise EngineError(
            f"{where} the answer's log-probs are {_short(log_probs)}, expected a list of {len(token_ids)}: the engine "
            "must return one for each token"
        )
    if len(token_ids) <= ask.max_new_tokens:
        _check_end(ask, token_ids, reason, where)
    numbers = [float(value) if is_log_prob(value) else math.nan for value in log_probs]
    # Engines write "length" if an end comes exactly at the length limit.
    finish_reason = ask.ends.finish_reason(token_ids)
    try:
        support = None if kept is None else support_of(kept)
    except ValueError as problem:
        raise EngineError(f"{where} {problem}") from None
    if support is not None and len(support[1]) != len(token_ids):
        raise EngineError(f"{where} kept tokens of {len(support[1])} positions came for {len(token_ids)} tokens")
    return Sample(token_ids, numbers, finish_reason, fault_in_log_probs(log_probs, where), experts, support)


def fault_in_log_probs(log_probs: Sequence[Any], where: str) -> str | None:
    """Description of the first unusable log-prob, beginning with ``where``; None if all are usable."""
    for position, value in enumerate(log_probs):
        if not is_log_prob(value):
            return (
                f"{where} the log-prob of response token {position} is {str(value)[:40]}, expected a finite number of "
                "at most 0: check the engine's weights and precision"
            )
    return None


def _check_end(ask: Ask, token_ids: list[int], reason: Any, where: str) -> None:
    """Check that the response ends with the first of its ends, or at the requested length."""
    if reason not in ("stop", "length"):
        raise EngineError(
            f"{where} the response ended with {_short(reason)}, expected 'stop' or 'length': see the engine's log"
        )
    length = ask.ends.length_of(token_ids)
    if length is not None and length < len(token_ids):
        raise EngineError(f"{where} {_went_on(ask.ends, token_ids[:length])}")
    if length is None and len(token_ids) < ask.max_new_tokens:
        last = token_ids[-1]
        ends = ", ".join(map(str, ask.ends.token_ids))
        problem = (
            f"the response was cut after {len(token_ids)} of {ask.max_new_tokens} tokens: raise the engine's longest "
            "sequence (vLLM: --max-model-len, SGLang: --context-length)"
            if reason == "length"
            else f"the response stopped at token {last}, which is none of the end tokens {ends}: add it with "
            f"{STOP_TOKENS} {last}, or start the server with a directory whose config.json, generation_config.json and "
            "tokenizer do not name it"
        )
        raise EngineError(f"{where} {problem}")


def _went_on(ends: ResponseEnds, token_ids: list[int]) -> str:
    """Return the sentence about a response that goes on after these tokens, which have an end."""
    last = token_ids[-1]
    if last in ends.token_ids:
        return f"the response goes on after end token {last}: do the engine and the trainer use the same tokenizer?"
    return (
        f"the response goes on after the stop string {ends.string_in(token_ids)!r}: start the server with a tokenizer, "
        "without --skip-tokenizer-init"
    )


def is_log_prob(value: Any) -> bool:
    """Return whether an engine's value is a finite number that a log-prob may have."""
    # The comparison is false for NaN and infinities, and raises no error for an integer beyond all floats.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and LOWEST < value <= POSITIVE_LIMIT


def _short(value: Any) -> str:
    return repr(value)[:80]
