"""vLLM's server as the rollout engine: token ids in and out over HTTP, with their log-probs; weights in place.

Start it with ``VLLM_SERVER_DEV_MODE=1 vllm serve <directory> --host 127.0.0.1 --enable-scale-out --logprobs-mode
processed_logprobs``; for routing replay add ``--enable-return-routed-experts``, for truncated rollouts
``--return-sampling-mask``. Without ``--host`` it listens on all addresses, and whoever reaches it changes its weights.
"""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor

from megatron_rc.launch.engines import EngineError, Sample
from megatron_rc.launch.engines.answers import Ask, make_sample
from megatron_rc.launch.engines.requests import HttpStatusError, Request
from megatron_rc.launch.engines.server import ServerEngine

PROCESSED = "processed_logprobs"
ROUTE = "/inference/v1/generate"
START = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve DIRECTORY --host 127.0.0.1 --enable-scale-out --logprobs-mode processed_logprobs"
)


class VllmServerEngine(ServerEngine):
    """Samples from ``/inference/v1/generate``; see :class:`ServerEngine`.

    Args:
        model: the server's name of the model; None: the name of its only model.
        max_versions: largest number of versions of weights within a response; None: no bound.
    """

    def __init__(self, *args: Any, model: str | None = None, max_versions: int | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.model, self.max_versions = model, max_versions

    def _check_server(self) -> None:
        data = self._field(self.client.json("GET", "/v1/models"), "data")
        names = [str(self._field(entry, "id")) for entry in (data if isinstance(data, list) else [])]
        if self.model is None and len(names) == 1:
            self.model = names[0]
        if self.model not in names:
            raise EngineError(
                f"{self.client.url} serves {', '.join(names) or 'no model'}, not {self.model}: name a model that it "
                "serves with --rollout-model"
            )
        with development_mode():
            info = self.client.json("GET", "/server_info?config_format=json")
        self._check_route()
        self._check_settings(self._field(info, "vllm_config"))

    def _check_settings(self, settings: Any) -> None:
        """Check the server's settings, as ``/server_info`` names them."""
        mode = self._field(settings, "model_config", "logprobs_mode")
        if mode != PROCESSED:
            raise EngineError(
                f"{self.client.url} reports {mode}, expected {PROCESSED}, the log-probs of the sampled distribution: "
                f"start it as {START}"
            )

    def _check_route(self) -> None:
        """Check that the server takes token ids: an empty request of them is refused with 400 or 422.

        A server that was started without its routes answers 403, an older one 404.
        """
        try:
            self.client.call("POST", ROUTE, {})
        except HttpStatusError as error:
            if error.status in (403, 404):
                raise EngineError(
                    f"{self.client.url} takes no token ids at {ROUTE} (status {error.status}): use vLLM 0.32 or newer, "
                    f"and start it as {START}"
                ) from error

    def _swap(self, path: str, version: int) -> None:
        """Pause, reload, reset, resume; after a failure the server stays paused, so that nobody samples a mixture.

        With ``--rl-partial-rollouts`` responses under way wait meanwhile, and the new weights read their tokens again;
        without it, or if another version would be one too many for such a response, the update waits for them.
        """
        with development_mode():
            keeps = self._pause()
            self.client.call("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
            self._resume(version, keeps)

    def _pause(self) -> bool:
        """Pause the server; return whether responses under way will go on under the new weights."""
        limit = self.max_versions
        keeps = self.partial_rollouts and (limit is None or self.open_samples.versions < limit)
        self.client.call("POST", f"/pause?mode={'keep' if keeps else 'wait'}")
        return keeps

    def _resume(self, version: int, keeps: bool) -> None:
        """Clear the prefix cache, name the version of the new weights, and let the server go on."""
        reset = self.client.call("POST", "/reset_prefix_cache" + ("?reset_running_requests=true" if keeps else ""))
        # Some versions answer nothing, because they do not know whether the reset worked.
        if reset and b"true" not in reset:
            raise EngineError(f"{self.client.url} kept its prefix cache, made with old weights: see its log")
        self._name_version(str(version))
        self.client.call("POST", "/resume")
        self.open_samples.updated(went_on=keeps)

    def _name_version(self, version: str) -> None:
        self.client.call("POST", "/update_weight_version", {"new_version": version})

    def _held_version(self) -> Any:
        return self._field(self.client.json("GET", "/weight_info"), "weight_version")

    def _check_version(self, asked: int) -> None:
        self._held(asked).read(self._held_version(), self.client.url)

    def _check_params(self, asks: Sequence[Ask]) -> None:
        """Nothing to do: vLLM's processed log-probs follow all parameters."""

    def _request(self, ask: Ask) -> Request:
        body = {
            "model": self.model,
            "token_ids": ask.prompt,
            "sampling_params": ask.sampling_of_vllm,
            "return_token_ids": True,
            "stream": False,
        }
        return Request("POST", ROUTE, body, ask.most_bytes)

    def _read(self, ask: Ask, answer: Any) -> Sample:
        where = f"{self.client.url}, prompt {ask.index}:"
        if self._field(answer, "model") != self.model:
            raise EngineError(f"{where} model {answer['model']} answered, not {self.model}")
        choices = self._field(answer, "choices")
        if not isinstance(choices, list) or len(choices) != 1:
            raise EngineError(f"{where} the answer has {_length(choices)} choices, expected 1")
        choice = choices[0]
        prompt = self._field(answer, "prompt_token_ids")
        if prompt != ask.prompt:
            raise EngineError(
                f"{where} the server read {_length(prompt)} prompt tokens, not the {len(ask.prompt)} that were sent: "
                "it must neither cut nor extend prompts"
            )
        token_ids, entries = self._field(choice, "token_ids"), self._field(choice, "logprobs", "content")
        log_probs: Any = entries
        if isinstance(entries, list):
            log_probs = [self._field(entry, "logprob") for entry in entries]
        experts = self._experts(choice, where) if self.experts_shape and token_ids else None
        kept = None
        if self.wants_support(ask) and token_ids:
            kept = self._reported(choice, "sampling_mask", "--return-sampling-mask", where)
        sample = make_sample(
            ask, token_ids, log_probs, choice.get("finish_reason"), self.client.url, experts=experts, kept=kept
        )
        if sample.token_ids and [self._field(entry, "token_id") for entry in entries] != sample.token_ids:
            raise EngineError(f"{where} log-probs of other tokens than token_ids: the answer cannot be used")
        return replace(sample, versions=self._versions(choice, ask, len(sample.token_ids), where))

    def _versions(self, choice: Any, ask: Ask, tokens: int, where: str) -> list[int] | None:
        """Version of the weights of each token; None: the answer has none, and all are of the engine's version."""
        spans = choice.get("weight_versions")
        if not tokens or (spans is None and not self.partial_rollouts):
            return None
        versions = self._held(ask.version).read_spans(spans, tokens, where)
        found, limit = len(set(versions)), self.max_versions
        if limit is not None and found > limit:
            raise EngineError(
                f"{where} the response has {found} versions of weights, --rollout-max-versions allows {limit}: raise "
                "it, or lower --rollout-concurrency, so that the server sets no response aside"
            )
        return versions

    def _experts(self, choice: Any, where: str) -> Tensor:
        """[tokens of prompt and response − 1, layers, top_k] from base64 of a NumPy file."""
        encoded = self._reported(choice, "routed_experts", "--enable-return-routed-experts", where)
        try:
            file = io.BytesIO(base64.b64decode(encoded, validate=True))
            return torch.from_numpy(numpy.lib.format.read_array(file, allow_pickle=False).astype(numpy.int32))
        except Exception as problem:  # NumPy's reader passes on many kinds of errors
            raise EngineError(f"{where} routed_experts is no NumPy array in base64 ({problem})") from None

    def _reported(self, choice: Any, name: str, flag: str, where: str) -> Any:
        if choice.get(name) is None:
            raise EngineError(f"{where} the answer has no {name}: start the server with {flag}")
        return choice[name]


@contextlib.contextmanager
def development_mode() -> Iterator[None]:
    """Context in which status 404 means that the server is too old, or lacks development mode."""
    try:
        yield
    except HttpStatusError as error:
        if error.status != 404:
            raise
        raise EngineError(f"{error}: use vLLM 0.32 or newer, and start it as {START}") from error


def _length(items: Any) -> str:
    return str(len(items)) if isinstance(items, list) else repr(items)[:80]
