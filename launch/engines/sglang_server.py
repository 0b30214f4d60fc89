"""SGLang's server as the rollout engine: ``/generate`` with token ids, weights from disk, in place.

The server runs as ``python -m sglang.launch_server --model-path <directory> --enable-deterministic-inference``; without
that flag it ignores seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_rc.launch.engines import EngineError, Sample
from megatron_rc.launch.engines.answers import Ask, make_sample
from megatron_rc.launch.engines.requests import Request
from megatron_rc.launch.engines.server import ServerEngine
from megatron_rc.records.rollout import SamplingParams

CERTAIN = -1e-3  # nats; a likeliest token above this has too little to show
PROBED_PROMPTS = 4


class SglangServerEngine(ServerEngine):
    """Samples from ``/generate``; see :class:`ServerEngine`."""

    _log_probs_are_processed = _names_versions = False

    def _meet(self) -> None:
        self._log_probs_are_processed = False
        if not isinstance(self.client.json("GET", "/get_model_info"), dict):
            raise EngineError(f"{self.client.url}/get_model_info answered no object: is this an SGLang server?")

    def _swap(self, path: str, version: int) -> None:
        body = {"model_path": path, "flush_cache": True, "weight_version": str(version)}
        answer = self.client.json("POST", "/update_weights_from_disk", body)
        if self._field(answer, "success") is not True:
            raise EngineError(f"{self.client.url} did not take the weights over: {answer.get('message')}")
        self.client.call("POST", "/flush_cache")  # answers 400 if it could not

    def _check_params(self, asks: Sequence[Ask]) -> None:
        """Log-probs are after temperature, unless the server runs with SGLANG_RETURN_ORIGINAL_LOGPROB; ask it."""
        params = asks[0].params if asks else SamplingParams()
        if params == replace(params, top_p=1.0, top_k=1):
            return  # the likeliest tokens, as evaluations ask for: nobody trains on their log-probs
        if params.top_p < 1 or params.top_k > 0:
            raise EngineError(
                f"SGLang reports log-probs before top_p={params.top_p} and top_k={params.top_k}: sample with top_p=1 "
                "and top_k=0"
            )
        if params.temperature == 1 or self._log_probs_are_processed:
            return
        for ask in asks[:PROBED_PROMPTS]:
            plain, scaled = (self._likeliest(ask, temperature) for temperature in (1.0, params.temperature))
            if plain < CERTAIN and abs(plain - scaled) > 1e-6 * abs(plain):
                self._log_probs_are_processed = True
                return
            if plain < CERTAIN:
                raise EngineError(
                    f"{self.client.url} reports log-probs before temperature {params.temperature}: start it without "
                    "SGLANG_RETURN_ORIGINAL_LOGPROB"
                )

    def _check_version(self, was_away: bool) -> None:
        """Every answer names the version of its weights and is checked by itself, unless the server keeps none."""
        if was_away and not self._names_versions:
            self._check_held(None, self.client.url)

    def _likeliest(self, ask: Ask, temperature: float) -> float:
        """Log-prob of the likeliest first token, in nats: the same token at every temperature."""
        body = _body(ask) | {"top_logprobs_num": 1}
        body["sampling_params"] |= {"temperature": temperature, "max_new_tokens": 1}
        answer = self.client.json("POST", "/generate", body)
        return float(self._field(answer, "meta_info", "output_top_logprobs", 0, 0, 0))

    def _request(self, ask: Ask) -> Request:
        return Request("POST", "/generate", _body(ask), ask.most_bytes)

    def _read(self, ask: Ask, answer: Any) -> Sample:
        if isinstance(answer, list):
            raise EngineError(f"{self.client.url}, prompt {ask.index}: {len(answer)} answers came, expected 1")
        meta = self._field(answer, "meta_info")
        read = self._field(meta, "prompt_tokens")
        where = f"{self.client.url}, prompt {ask.index}:"
        if read != len(ask.prompt):
            raise EngineError(f"{where} the server read {read} prompt tokens, {len(ask.prompt)} were sent")
        # "default" where the server does not keep versions, and where it was not given any since it was started.
        held = meta.get("weight_version", "default")
        self._names_versions |= held == str(self.version)
        if self._names_versions or held != "default":
            self._check_held(held, self.client.url)
        pairs = self._field(meta, "output_token_logprobs")
        if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) >= 2 for pair in pairs):
            raise EngineError(f"{where} output_token_logprobs is no list of [log-prob, token id, text]")
        token_ids = answer.get("output_ids", [pair[1] for pair in pairs])
        if token_ids != [pair[1] for pair in pairs]:
            raise EngineError(f"{where} log-probs of other tokens than output_ids: the answer cannot be used")
        reason = self._field(meta, "finish_reason", "type")
        return make_sample(ask, token_ids, [pair[0] for pair in pairs], reason, self.client.url)


def _body(ask: Ask) -> dict[str, Any]:
    """Every parameter is named: what is left out, the server takes from ``generation_config.json``."""
    sampling = {
        "temperature": ask.params.temperature,
        "top_p": ask.params.top_p,
        "top_k": ask.params.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_new_tokens": ask.max_new_tokens,
        "stop_token_ids": [ask.eos_token_id],  # with ignore_eos SGLang ignores these as well
        "sampling_seed": ask.seed,
        "skip_special_tokens": False,
    }
    return {
        "input_ids": ask.prompt,
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "return_text_in_logprobs": False,
        "stream": False,
    }
