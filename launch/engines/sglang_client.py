"""SGLang's server: ``/generate`` with token ids; weights in place.

Start it with ``python -m sglang.launch_server --model-path <directory> --host 127.0.0.1
--enable-deterministic-inference``; without the last flag the server ignores seeds. For weights from the trainer's ranks
add ``--load-format dummy``.
"""

from __future__ import annotations

import base64
import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_rc.launch.engines import EngineError, Sample
from megatron_rc.launch.engines.answers import Ask, make_sample
from megatron_rc.launch.engines.http_client import HttpClient
from megatron_rc.launch.engines.requests import MOST_BYTES, Request
from megatron_rc.launch.engines.server_client import INCOMPLETE, ServerClient
from megatron_rc.launch.engines.weight_versions import UNNAMED, VersionRange

CERTAIN = -1e-3  # nats; a likeliest token above this shows no effect of the temperature
BYTES_OF_NUMBER = 32  # at most, of a weight's number in JSON
PROBED_PROMPTS = 4  # of each version of the weights


class SglangClient(ServerClient):
    """Requests in SGLang's words; see :class:`ServerClient`. SGLang takes weights at any time, without a pause.

    ``takes_streams``: weights come from the trainer's ranks, so that the server must number its processes as they do.
    """

    # Whether the server keeps versions is seen in its first answer: older ones name none.
    keeps_version = False
    versions_in_answers = True

    def __init__(
        self,
        http: HttpClient,
        *,
        experts_shape: tuple[int, int] | None = None,
        reports_support: bool = False,
        takes_streams: bool = False,
    ) -> None:
        super().__init__(http, experts_shape=experts_shape, reports_support=reports_support)
        self.takes_streams = takes_streams
        self._named = ""  # version that the server was told last
        self._log_probs_are_processed = False
        self._probes_left = 0

    def health(self) -> None:
        """Check the kind of the server, and for weights from the trainer's ranks its number of pipeline stages."""
        self._log_probs_are_processed = False
        if not isinstance(self.http.json("GET", "/get_model_info"), dict):
            raise EngineError(f"{self.url}/get_model_info answered no object: is this an SGLang server?")
        if not self.takes_streams:
            return
        stages = self.field(self.http.json("GET", "/get_server_info"), "pp_size")
        if stages != 1:
            raise EngineError(
                f"{self.url} has {stages} pipeline stages, which SGLang's groups for weights do not number: "
                "start it without --pp-size, or give --rollout-weight-transfer files"
            )

    def version(self) -> Any:
        """Version of the weights, as the server names it."""
        return self.field(self.http.json("GET", "/get_model_info"), "weight_version")

    def pause(self, *, keeps_responses: bool) -> None:
        """Do nothing: no response is under way when weights change."""

    def resume(self, version: int, *, keeps_responses: bool) -> None:
        """Clear the cache of prefixes, and name the version unless the server was told; EngineError during requests."""
        self.http.call("POST", "/flush_cache")  # answers 400 if it could not
        self._probes_left = PROBED_PROMPTS
        if self._named != str(version):
            self._name_version(str(version))
            self.keeps_version = True

    def read_files(self, path: str, version: int) -> None:
        """Let the server read the weights in a folder, and name their version."""
        self._named = str(version)
        body = {"model_path": path, "flush_cache": True, "weight_version": self._named}
        answer = self.http.json("POST", "/update_weights_from_disk", body)
        if self.field(answer, "success") is not True:
            raise EngineError(f"{self.url} did not take the weights over: {answer.get('message')}")

    def check_readable(self) -> None:
        """Check that :meth:`weight` can read this server's weights: not quantised, and whole in one process."""
        settings = self.http.json("GET", "/get_server_info")
        for name, readable in (("tp_size", 1), ("pp_size", 1), ("dp_size", 1), ("quantization", None)):
            value = self.field(settings, name)
            if value != readable:
                raise EngineError(
                    f"{self.url} has {name} {value}, with which SGLang answers no whole weights: read them back from a "
                    "server that was started without this setting"
                )

    def weight(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a weight that the server has, by its Hugging Face name, float32.

        SGLang's ``get_weights_by_name``, which its class LlamaForCausalLM alone has, answers JSON of about 20 bytes a
        number.
        """
        body = {"name": name, "truncate_size": shape[0]}
        most_bytes = MOST_BYTES + BYTES_OF_NUMBER * math.prod(shape)
        request = Request("POST", "/get_weights_by_name", body, most_bytes)
        (numbers,) = self.http.read_all([request], lambda _, answer: answer, 1, nullcontext)
        try:
            weight = torch.tensor(numbers, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError) as problem:
            raise EngineError(f"{self.url} answered no numbers for {name} ({problem})") from None
        if weight.shape != shape:
            raise EngineError(f"{self.url}: {name} is {tuple(weight.shape)}, expected {shape}: is it this model?")
        return weight

    def begin_update(self, *, is_first: bool) -> None:
        """Name the weights incomplete: an update begins and ends with the name of its version."""
        self._name_version(INCOMPLETE)

    def end_update(self) -> None:
        """Do nothing: the server loads each part when it comes."""

    def _name_version(self, version: str) -> None:
        self._named = version
        self.http.call("POST", "/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def _check_params(self, ask: Ask) -> None:
        """Refuse truncation; probe for SGLANG_RETURN_ORIGINAL_LOGPROB, with which log-probs are before temperature."""
        params = ask.params
        if params == replace(params, top_p=1.0, top_k=1):
            return  # greedy sampling for evaluations, whose log-probs nobody trains on
        if params.is_truncated and self.reports_support:
            return  # the log-probs beside the kept tokens are over these, after the temperature
        if params.is_truncated:
            raise EngineError(
                f"SGLang reports log-probs before top_p={params.top_p}, top_k={params.top_k} and min_p={params.min_p}: "
                "sample with top_p=1, top_k=0 and min_p=0"
            )
        if params.temperature == 1 or self._log_probs_are_processed or not self._probes_left:
            return
        self._probes_left -= 1
        plain = self._likeliest(ask, 1.0)
        scaled = self._likeliest(ask, params.temperature)
        if plain >= CERTAIN:
            return
        if abs(plain - scaled) <= 1e-6 * abs(plain):
            raise EngineError(
                f"{self.url} reports log-probs before temperature {params.temperature}: start it without "
                "SGLANG_RETURN_ORIGINAL_LOGPROB"
            )
        self._log_probs_are_processed = True

    def _likeliest(self, ask: Ask, temperature: float) -> float:
        """Log-prob of the likeliest first token, in nats; the token is the same at every temperature."""
        body = self._body(ask) | {"top_logprobs_num": 1}
        body["sampling_params"] |= {"temperature": temperature, "max_new_tokens": 1}
        answer = self.http.json("POST", "/generate", body)
        return float(self.field(answer, "meta_info", "output_top_logprobs", 0, 0, 0))

    def request(self, ask: Ask) -> Request:
        """Request for one response, as token ids; the first ones probe the server's log-probs."""
        self._check_params(ask)
        return Request("POST", "/generate", self._body(ask), ask.most_bytes)

    def _body(self, ask: Ask) -> dict[str, Any]:
        # No ignore_eos: with it SGLang would ignore stop_token_ids too.
        sampling = {
            "top_k": ask.params.top_k or -1,
            "max_new_tokens": ask.max_new_tokens,
            "sampling_seed": ask.seed,
        }
        body = {
            "input_ids": ask.prompt,
            "sampling_params": ask.sampling | sampling,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "return_text_in_logprobs": False,
            "stream": False,
        }
        if self.experts_shape:
            body["return_routed_experts"] = True
        if self.wants_support(ask):
            body["return_sampling_mask"] = True
        return body

    def read(self, ask: Ask, answer: Any, versions: VersionRange) -> Sample:
        """Read the response in an answer."""
        where = f"{self.url}, prompt {ask.index}:"
        if isinstance(answer, list):
            raise EngineError(f"{where} {len(answer)} answers came, expected 1")
        meta = self.field(answer, "meta_info")
        num_read = self.field(meta, "prompt_tokens")
        if num_read != len(ask.prompt):
            raise EngineError(f"{where} the server read {num_read} prompt tokens, {len(ask.prompt)} were sent")
        version = self._version_of(ask, meta, versions)

        pairs = self.field(meta, "output_token_logprobs")
        if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) >= 2 for pair in pairs):
            raise EngineError(f"{where} output_token_logprobs is no list of [log-prob, token id, text]")
        log_probs = [pair[0] for pair in pairs]
        token_ids = [pair[1] for pair in pairs]
        if answer.get("output_ids", token_ids) != token_ids:
            raise EngineError(f"{where} log-probs of other tokens than output_ids: the answer cannot be used")

        experts = None
        if self.experts_shape and token_ids:
            experts = self._experts(meta, (len(ask.prompt) + len(token_ids) - 1, *self.experts_shape), where)
        kept_tokens = None
        if self.wants_support(ask) and token_ids:
            kept_tokens = self.field(meta, "output_token_sampling_mask")
            log_probs = self.field(meta, "output_token_sampling_logprobs")
        reason = self.field(meta, "finish_reason", "type")
        sample = make_sample(ask, token_ids, log_probs, reason, self.url, experts=experts, kept=kept_tokens)
        if version is None:
            return sample
        return replace(sample, versions=[version] * len(sample.token_ids))

    def _version_of(self, ask: Ask, meta: Any, versions: VersionRange) -> int | None:
        """Version of the weights of an answer; None from a server that keeps no versions."""
        # "default" comes from a server that keeps no versions, or that got none since its start.
        version = meta.get("weight_version", UNNAMED)
        if version == str(ask.version):
            self.keeps_version = True
        if version == UNNAMED and not self.keeps_version:
            return None
        return versions.read(version, self.url)

    def _experts(self, meta: Any, shape: tuple[int, ...], where: str) -> Tensor:
        """[tokens, layers, top_k] from base64 of int32 numbers."""
        encoded = self.field(meta, "routed_experts")
        try:
            numbers = torch.frombuffer(bytearray(base64.b64decode(encoded, validate=True)), dtype=torch.int32)
            return numbers.view(shape)
        except (TypeError, ValueError, RuntimeError) as problem:
            raise EngineError(
                f"{where} routed_experts is no base64 of {shape[0]} tokens' experts ({problem}): start the server with "
                "--enable-return-routed-experts"
            ) from None
