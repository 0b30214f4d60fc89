"""vLLM's server: token ids in and out over HTTP, with their log-probs; weights in place.

Start it with ``VLLM_SERVER_DEV_MODE=1 vllm serve <directory> --host 127.0.0.1 --enable-scale-out --logprobs-mode
processed_logprobs``; for routing replay add ``--enable-return-routed-experts``, for truncated rollouts
``--return-sampling-mask``. Without ``--host`` it listens on all addresses, and whoever reaches it changes its weights.
"""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor

from megatron_rc.launch.engines import EngineError, Sample
from megatron_rc.launch.engines.answers import Ask, make_sample
from megatron_rc.launch.engines.http_client import HttpClient
from megatron_rc.launch.engines.requests import HttpStatusError, Request
from megatron_rc.launch.engines.server_client import INCOMPLETE, ServerClient
from megatron_rc.launch.engines.weight_stream import BACKEND
from megatron_rc.launch.engines.weight_versions import VersionRange

PROCESSED = "processed_logprobs"
ROUTE = "/inference/v1/generate"
START = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve DIRECTORY --host 127.0.0.1 --enable-scale-out --logprobs-mode processed_logprobs"
)
STREAMED_START = f"""{START} --load-format dummy --weight-transfer-config '{{"backend": "{BACKEND}"}}'"""


class VllmClient(ServerClient):
    """Requests in vLLM's words; see :class:`ServerClient`.

    Args:
        model: the server's name of the model; None: the name of its only model.
        needs_versions: whether each answer must name the versions of its tokens' weights.
        max_versions: largest number of versions of weights within a response; None: no bound.
        http_without_retries: client of the same server that repeats no request, for weights from the trainer's ranks;
            None: weights come from files.
    """

    def __init__(
        self,
        http: HttpClient,
        *,
        experts_shape: tuple[int, int] | None = None,
        reports_support: bool = False,
        model: str | None = None,
        needs_versions: bool = False,
        max_versions: int | None = None,
        http_without_retries: HttpClient | None = None,
    ) -> None:
        super().__init__(http, experts_shape=experts_shape, reports_support=reports_support)
        self.model = model
        self.needs_versions = needs_versions
        self.max_versions = max_versions
        self.http_without_retries = http_without_retries

    def health(self) -> None:
        """Check the model's name, the log-probs, the route of token ids, and the way of the weights."""
        models = self.field(self.http.json("GET", "/v1/models"), "data")
        names = [str(self.field(entry, "id")) for entry in models] if isinstance(models, list) else []
        if self.model is None and len(names) == 1:
            self.model = names[0]
        if self.model not in names:
            raise EngineError(
                f"{self.url} serves {', '.join(names) or 'no model'}, not {self.model}: name a model that it "
                "serves with --rollout-model"
            )
        with development_mode():
            info = self.http.json("GET", "/server_info?config_format=json")
        self._check_route()
        self._check_settings(self.field(info, "vllm_config"))

    def _check_route(self) -> None:
        """Check that the server takes token ids: an empty request of them is refused with 400 or 422.

        A server that was started without its routes answers 403, an older one 404.
        """
        try:
            self.http.call("POST", ROUTE, {})
        except HttpStatusError as error:
            if error.status in (403, 404):
                raise EngineError(
                    f"{self.url} takes no token ids at {ROUTE} (status {error.status}): use vLLM 0.32 or newer, "
                    f"and start it as {START}"
                ) from error

    def _check_settings(self, settings: Any) -> None:
        """Check the server's settings, as ``/server_info`` names them."""
        mode = self.field(settings, "model_config", "logprobs_mode")
        if mode != PROCESSED:
            raise EngineError(
                f"{self.url} reports {mode}, expected {PROCESSED}, the log-probs of the sampled distribution: "
                f"start it as {START}"
            )
        if self.http_without_retries is None:
            return
        transfer = settings.get("weight_transfer_config") or {}
        if transfer.get("backend") != BACKEND:
            raise EngineError(
                f"{self.url} takes no weights from --rollout-weight-transfer: install megatron_rc beside vLLM, "
                f"and start it as {STREAMED_START}"
            )

    def version(self) -> Any:
        """Version of the weights, as the server names it."""
        return self.field(self.http.json("GET", "/weight_info"), "weight_version")

    def pause(self, *, keeps_responses: bool) -> None:
        """Pause the server; responses under way are set aside, or end before the server answers."""
        mode = "keep" if keeps_responses else "wait"
        with development_mode():
            self.http.call("POST", f"/pause?mode={mode}")

    def resume(self, version: int, *, keeps_responses: bool) -> None:
        """Clear the prefix cache, also of responses that were set aside; name the version; let the server go on."""
        route = "/reset_prefix_cache"
        if keeps_responses:
            route += "?reset_running_requests=true"
        with development_mode():
            answer = self.http.call("POST", route)
            # Some versions answer nothing, because they do not know whether the reset worked.
            if answer and b"true" not in answer:
                raise EngineError(f"{self.url} kept its prefix cache, made with old weights: see its log")
            self._name_version(str(version))
            self.http.call("POST", "/resume")

    def read_files(self, path: str, version: int) -> None:
        """Let every process of the server read the weights in a folder."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        with development_mode():
            self.http.call("POST", "/collective_rpc", body)

    def write_weights(self, path: str) -> None:
        """Let every process of the server write its weights into a folder, as safetensors under vLLM's own names."""
        body = {"method": "save_sharded_state", "kwargs": {"path": path}}
        with development_mode():
            self.http.call("POST", "/collective_rpc", body)

    def begin_update(self, *, is_first: bool) -> None:
        """Name the weights incomplete, and let the server take new ones."""
        with development_mode():
            if is_first and self.version() == INCOMPLETE:
                # End the update of another trainer; the server refuses, if the update has failed in the server too.
                with contextlib.suppress(EngineError):
                    self.end_update()
            self._name_version(INCOMPLETE)
            self._client_of_updates().call("POST", "/start_weight_update")

    def end_update(self) -> None:
        """End an update; EngineError if not all layers took weights."""
        self._client_of_updates().call("POST", "/finish_weight_update")

    def _client_of_updates(self) -> HttpClient:
        if self.http_without_retries is None:
            raise EngineError(f"{self.url} gets its weights from files")
        return self.http_without_retries

    def _name_version(self, version: str) -> None:
        self.http.call("POST", "/update_weight_version", {"new_version": version})

    def request(self, ask: Ask) -> Request:
        """Request for one response, as token ids."""
        body = {
            "model": self.model,
            "token_ids": ask.prompt,
            "sampling_params": ask.sampling_of_vllm,
            "return_token_ids": True,
            "stream": False,
        }
        return Request("POST", ROUTE, body, ask.most_bytes)

    def read(self, ask: Ask, answer: Any, versions: VersionRange) -> Sample:
        """Read the only choice of an answer."""
        where = f"{self.url}, prompt {ask.index}:"
        if self.field(answer, "model") != self.model:
            raise EngineError(f"{where} model {answer['model']} answered, not {self.model}")
        choices = self.field(answer, "choices")
        if not isinstance(choices, list) or len(choices) != 1:
            raise EngineError(f"{where} the answer has {_length(choices)} choices, expected 1")
        choice = choices[0]
        prompt = self.field(answer, "prompt_token_ids")
        if prompt != ask.prompt:
            raise EngineError(
                f"{where} the server read {_length(prompt)} prompt tokens, not the {len(ask.prompt)} that were sent: "
                "it must neither cut nor extend prompts"
            )

        token_ids = self.field(choice, "token_ids")
        entries = self.field(choice, "logprobs", "content")
        log_probs = entries
        if isinstance(entries, list):
            log_probs = [self.field(entry, "logprob") for entry in entries]
        experts = None
        if self.experts_shape and token_ids:
            experts = self._experts(choice, where)
        kept_tokens = None
        if self.wants_support(ask) and token_ids:
            kept_tokens = self._reported(choice, "sampling_mask", "--return-sampling-mask", where)
        reason = choice.get("finish_reason")
        sample = make_sample(ask, token_ids, log_probs, reason, self.url, experts=experts, kept=kept_tokens)

        if sample.token_ids and [self.field(entry, "token_id") for entry in entries] != sample.token_ids:
            raise EngineError(f"{where} log-probs of other tokens than token_ids: the answer cannot be used")
        return replace(sample, versions=self._versions(choice, len(sample.token_ids), versions, where))

    def _versions(self, choice: Any, num_tokens: int, versions: VersionRange, where: str) -> list[int] | None:
        """Version of the weights of each token; None: the answer has none, and all are of the engine's version."""
        spans = choice.get("weight_versions")
        if not num_tokens or (spans is None and not self.needs_versions):
            return None
        of_tokens = versions.read_spans(spans, num_tokens, where)
        number = len(set(of_tokens))
        if self.max_versions is not None and number > self.max_versions:
            raise EngineError(
                f"{where} the response has {number} versions of weights, --rollout-max-versions allows "
                f"{self.max_versions}: raise it, or lower --rollout-concurrency, so that the server sets no response "
                "aside"
            )
        return of_tokens

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
