"""A server with a teacher: log-probs of the likeliest tokens, and of the given ones, at each position of a sequence.

vLLM (``vllm serve DIRECTORY``) gives them as ``prompt_logprobs`` of ``/v1/completions``, SGLang (``python -m
sglang.launch_server --model-path DIRECTORY``) as ``input_top_logprobs`` of ``/generate``. Both are of the model's own
distribution, at temperature 1, whatever the temperature of sampling.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_rc.launch.engines import EngineError
from megatron_rc.launch.engines.answers import is_log_prob
from megatron_rc.launch.engines.requests import MOST_BYTES, Request

if TYPE_CHECKING:
    # It needs an HTTP library, which a run without servers may lack.
    from megatron_rc.launch.engines.http_client import HttpClient

SERVED_TEMPERATURE = 1.0  # of the log-probs that both servers give
_BYTES_OF_ENTRY = 256  # most bytes that a server writes for one token and its log-prob


@dataclass(frozen=True)
class ScoredSequence:
    """Log-probs of the teacher at the tokens of a response."""

    log_probs: list[float]  # log-prob of each token of the response
    texts: list[str | None]  # text of each of these tokens by the server's tokenizer; None: it has none
    top_ids: list[list[int]]  # at each of these tokens the ids of the likeliest tokens
    top_log_probs: list[list[float]]  # their log-probs


@dataclass(frozen=True)
class ScoreRequest:
    """A prompt and a response, whose tokens are scored."""

    prompt: list[int]
    response: list[int]

    @property
    def tokens(self) -> list[int]:
        """All token ids."""
        return [*self.prompt, *self.response]


class TeacherServer(ABC):
    """Requests to one server; EngineError if it does not answer, refuses, or answers what cannot be used.

    Args:
        http: client of the server's address.
        top_k: number of the likeliest tokens.
        vocab_size: token ids lie below it.
        decode: the policy's tokenizer, from token ids to text.
    """

    path: str  # of the route that scores
    ready_path: str  # of a route that answers when the server has its model

    def __init__(self, http: HttpClient, top_k: int, vocab_size: int, decode: Callable[[Sequence[int]], str]) -> None:
        self.http = http
        self.top_k = top_k
        self.vocab_size = vocab_size
        self.decode = decode

    def wait_until_ready(self, seconds: float) -> None:
        """Wait for the server; EngineError if it does not answer in time."""
        self.http.wait_until_ready(self.ready_path, seconds)

    def score(self, sequences: Sequence[ScoreRequest], concurrency: int) -> list[ScoredSequence]:
        """Score the responses, with up to ``concurrency`` requests at a time; in the order of ``sequences``."""
        requests = [
            Request("POST", self.path, self.body(sequence), MOST_BYTES + self._most_bytes(sequence))
            for sequence in sequences
        ]

        def read(index: int, answer: Any) -> ScoredSequence:
            sequence = sequences[index]
            try:
                scored = self.read(sequence, answer)
            except (IndexError, KeyError, TypeError, ValueError, AttributeError) as error:
                raise EngineError(
                    f"{self.http.url}{self.path}, sequence {index}: the answer has no log-probs of the "
                    f"{self.top_k} likeliest tokens at each position ({type(error).__name__}: {error}): is it the "
                    "server of --teacher-server, and does it allow so many?"
                ) from error
            self._check(scored, sequence, index)
            return scored

        return self.http.read_all(requests, read, concurrency, nullcontext)

    @abstractmethod
    def body(self, sequence: ScoreRequest) -> dict[str, Any]:
        """Body of the request."""

    @abstractmethod
    def read(self, sequence: ScoreRequest, answer: Any) -> ScoredSequence:
        """Read an answer; errors of Python for an answer of another form."""

    def _most_bytes(self, sequence: ScoreRequest) -> int:
        return _BYTES_OF_ENTRY * (self.top_k + 2) * len(sequence.tokens)

    def _check(self, scored: ScoredSequence, sequence: ScoreRequest, index: int) -> None:
        """Raise EngineError for another tokenizer, ids out of the vocabulary, and numbers that are no log-probs."""
        where = f"{self.http.url}{self.path}, sequence {index}"
        for token, text in zip(sequence.response, scored.texts, strict=True):
            own_text = self.decode([token]).strip()
            # Other tokens may be special ones, or parts of a character, which servers show in ways of their own.
            is_plain = own_text.isascii() and own_text.isalnum()
            if text is not None and is_plain and text.strip() != own_text:
                raise EngineError(
                    f"{where}: token {token} is {text!r} to the teacher and {own_text!r} to the policy: serve a "
                    "teacher with the policy's tokenizer"
                )
        for position, (log_prob, ids, values) in enumerate(
            zip(scored.log_probs, scored.top_ids, scored.top_log_probs, strict=True)
        ):
            if len(set(ids)) != self.top_k or not all(0 <= token < self.vocab_size for token in ids):
                raise EngineError(
                    f"{where}, response token {position}: the ids of the likeliest tokens are {ids[:5]}…, expected "
                    f"{self.top_k} different ones below {self.vocab_size}, the size of the policy's vocabulary"
                )
            for value in (log_prob, *values):
                if not is_log_prob(value):
                    raise EngineError(
                        f"{where}, response token {position}: {str(value)[:40]} is no log-prob: check the teacher's "
                        "weights and precision"
                    )


class VllmTeacher(TeacherServer):
    """vLLM's ``prompt_logprobs``."""

    path = "/v1/completions"
    ready_path = "/v1/models"
    model: str | None = None  # name of the teacher; None: that of the server's only model

    def body(self, sequence: ScoreRequest) -> dict[str, Any]:
        """Body of the request; the one token that vLLM must sample is not read."""
        return {
            "model": self._model(),
            "prompt": sequence.tokens,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": self.top_k,
            "return_token_ids": True,
        }

    def read(self, sequence: ScoreRequest, answer: Any) -> ScoredSequence:
        """Read ``prompt_logprobs``: for each token a mapping of ids, the token's own and the likeliest ones."""
        (choice,) = answer["choices"]
        entries = choice["prompt_logprobs"]
        if choice["prompt_token_ids"] != sequence.tokens or len(entries) != len(sequence.tokens):
            raise ValueError("the server read other tokens")
        log_probs = []
        texts = []
        top_ids = []
        top_log_probs = []
        for token, entry in zip(sequence.response, entries[len(sequence.prompt) :], strict=True):
            log_probs.append(entry[str(token)]["logprob"])
            texts.append(entry[str(token)].get("decoded_token"))
            likeliest = sorted(_top(entry, self.top_k))
            top_ids.append([number for _, number, _ in likeliest])
            top_log_probs.append([value for _, _, value in likeliest])
        return ScoredSequence(log_probs, texts, top_ids, top_log_probs)

    def _model(self) -> str:
        """Name of the teacher: the given one, or that of the server's only model."""
        if self.model is None:
            names = [entry["id"] for entry in self.http.json("GET", "/v1/models")["data"]]
            if len(names) != 1:
                raise EngineError(f"{self.http.url} serves {', '.join(names)}: name the teacher with --teacher-model")
            (self.model,) = names
        return self.model


class SglangTeacher(TeacherServer):
    """SGLang's ``input_top_logprobs``."""

    path = "/generate"
    ready_path = "/get_model_info"

    def body(self, sequence: ScoreRequest) -> dict[str, Any]:
        """Body of the request, without a new token."""
        return {
            "input_ids": sequence.tokens,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "return_text_in_logprobs": True,
            # The first entry belongs to the last token of the prompt.
            "logprob_start_len": len(sequence.prompt) - 1,
            "top_logprobs_num": self.top_k,
        }

    def read(self, sequence: ScoreRequest, answer: Any) -> ScoredSequence:
        """Read lists of [log-prob, id, text], which begin one token before the response."""
        meta = answer["meta_info"]
        entries = meta["input_token_logprobs"][1:]
        tops = meta["input_top_logprobs"][1:]
        if [entry[1] for entry in entries] != sequence.response or len(tops) != len(entries):
            raise ValueError("the server read other tokens")
        return ScoredSequence(
            log_probs=[entry[0] for entry in entries],
            texts=[entry[2] for entry in entries],
            top_ids=[[entry[1] for entry in top] for top in tops],
            top_log_probs=[[entry[0] for entry in top] for top in tops],
        )


SERVERS: dict[str, type[VllmTeacher] | type[SglangTeacher]] = {"vllm": VllmTeacher, "sglang": SglangTeacher}


def _top(entry: Mapping[str, Any], top_k: int) -> list[tuple[int, int, float]]:
    """(rank, id, log-prob) of the likeliest tokens of one position: a token of the text beyond them is left out."""
    return [(value["rank"], int(number), value["logprob"]) for number, value in entry.items() if value["rank"] <= top_k]
