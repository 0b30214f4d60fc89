"""vLLM's OpenAI-compatible server as the rollout engine: token ids and log-probs over HTTP, weights in place.

The server runs as ``VLLM_SERVER_DEV_MODE=1 vllm serve <directory> --logprobs-mode processed_logprobs``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_rc.launch.engines import EngineError, Sample
from megatron_rc.launch.engines.answers import Ask, make_sample
from megatron_rc.launch.engines.http_client import HttpClient
from megatron_rc.launch.engines.model_directory import ModelDirectory
from megatron_rc.launch.engines.requests import HttpStatusError, Request
from megatron_rc.launch.engines.server import ServerEngine

PROCESSED = "processed_logprobs"
START = "VLLM_SERVER_DEV_MODE=1 vllm serve DIRECTORY --logprobs-mode processed_logprobs"


class VllmServerEngine(ServerEngine):
    """Samples from ``/v1/completions``; see :class:`ServerEngine`.

    Args:
        client: to the server.
        directory: for the weights, on a file system that both see.
        eos_token_id: ends a response.
        model: the name under which the server serves the model; default: the only one that it has.
        concurrency: requests under way at once.
        start_timeout: seconds to wait for a server that does not answer yet.
    """

    def __init__(
        self,
        client: HttpClient,
        directory: ModelDirectory,
        eos_token_id: int,
        model: str | None = None,
        concurrency: int = 64,
        start_timeout: float = 600.0,
    ) -> None:
        super().__init__(client, directory, eos_token_id, concurrency, start_timeout)
        self.model = model
        self._keeps_version = False

    def _meet(self) -> None:
        data = self._field(self.client.json("GET", "/v1/models"), "data")
        names = [str(self._field(entry, "id")) for entry in (data if isinstance(data, list) else [])]
        if self.model is None and len(names) == 1:
            self.model = names[0]
        if self.model not in names:
            raise EngineError(
                f"{self.client.url} serves {', '.join(names) or 'no model'}, not {self.model}: name one of its"
            )
        with _development_mode():
            info = self.client.json("GET", "/server_info?config_format=json")
        mode = self._field(info, "vllm_config", "model_config", "logprobs_mode")
        if mode != PROCESSED:
            raise EngineError(
                f"{self.client.url} reports {mode}, expected {PROCESSED}, those of the sampled distribution: start it "
                f"as {START}"
            )

    def _swap(self, path: str, version: int) -> None:
        """Pause, reload, reset, resume; after a failure the server stays paused: nobody samples a mixture."""
        with _development_mode():
            self.client.call("POST", "/pause?mode=wait")
            self.client.call("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
            reset = self.client.call("POST", "/reset_prefix_cache")
            # Versions that cannot tell whether it worked answer nothing.
            if reset and b"true" not in reset:
                raise EngineError(f"{self.client.url} kept its prefix cache, made with old weights: see its log")
            self._keeps_version = self._name_version(version)
            self.client.call("POST", "/resume")

    def _name_version(self, version: int) -> bool:
        """Whether the server can keep the version; it forgets it at a restart."""
        try:
            self.client.call("POST", "/update_weight_version", {"new_version": str(version)})
        except HttpStatusError as error:
            if error.status not in (404, 405):
                raise
            return False
        return True

    def _check_version(self, was_away: bool) -> None:
        if self._keeps_version:
            held = self._field(self.client.json("GET", "/weight_info"), "weight_version")
            self._check_held(held, self.client.url)
        elif was_away:
            self._check_held(None, self.client.url)

    def _check_params(self, asks: Sequence[Ask]) -> None:
        """Processed log-probs are those of the sampled distribution for all parameters."""

    def _request(self, ask: Ask) -> Request:
        return Request("POST", "/v1/completions", {"model": self.model, **_body(ask)}, ask.most_bytes)

    def _read(self, ask: Ask, answer: Any) -> Sample:
        source = self.client.url
        if self._field(answer, "model") != self.model:
            raise EngineError(f"{source}, prompt {ask.index}: model {answer['model']} answered, not {self.model}")
        choices = self._field(answer, "choices")
        if not isinstance(choices, list) or len(choices) != 1:
            count = len(choices) if isinstance(choices, list) else repr(choices)[:80]
            raise EngineError(f"{source}, prompt {ask.index}: the answer has {count} choices, expected 1")
        choice = choices[0]
        prompt = self._field(choice, "prompt_token_ids")
        if prompt != ask.prompt:
            raise EngineError(
                f"{source}, prompt {ask.index}: the server read {_length(prompt)} prompt tokens, not the "
                f"{len(ask.prompt)} that were sent: it must neither cut nor complete them"
            )
        log_probs = self._field(choice, "logprobs", "token_logprobs")
        return make_sample(ask, self._field(choice, "token_ids"), log_probs, choice.get("finish_reason"), source)


@contextlib.contextmanager
def _development_mode() -> Iterator[None]:
    """Says how to start a server that lacks the endpoints of development mode."""
    try:
        yield
    except HttpStatusError as error:
        if error.status != 404:
            raise
        raise EngineError(f"{error}: start it as {START}") from error


def _body(ask: Ask) -> dict[str, Any]:
    """Every parameter is named: what is left out, the server takes from ``generation_config.json``."""
    return {
        "prompt": ask.prompt,
        "n": 1,
        "max_tokens": ask.max_new_tokens,
        "temperature": ask.params.temperature,
        "top_p": ask.params.top_p,
        "top_k": ask.params.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": ask.seed,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "add_special_tokens": False,
        "skip_special_tokens": False,
        "ignore_eos": True,  # the trainer's end of text stops, whatever the server believes it to be
        "stop_token_ids": [ask.eos_token_id],
        "stream": False,
    }


def _length(prompt: Any) -> str:
    return str(len(prompt)) if isinstance(prompt, list) else repr(prompt)[:80]
