"""SGLang's server as the rollout engine: ``/generate`` with token ids; weights from disk, in place.

Start it with ``python -m sglang.launch_server --model-path <directory> --host 127.0.0.1
--enable-deterministic-inference``; without the last flag the server ignores seeds.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_rc.launch.engines import EngineError, Sample
from megatron_rc.launch.engines.answers import Ask, make_sample
from megatron_rc.launch.engines.requests import Request
from megatron_rc.launch.engines.server import ServerEngine
from megatron_rc.launch.engines.weight_versions import UNNAMED
from megatron_rc.records.rollout import SamplingParams

CERTAIN = -1e-3  # nats; a likeliest token above this shows no effect of the temperature
PROBED_PROMPTS = 4


class SglangServerEngine(ServerEngine):
    """Samples from ``/generate``; see :class:`ServerEngine`."""

    _keeps_version = _log_probs_are_processed = False

    def _check_server(self) -> None:
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
        """Probe for SGLANG_RETURN_ORIGINAL_LOGPROB, with which log-probs are before temperature."""
        params = asks[0].params if asks else SamplingParams()
        if params == replace(params, top_p=1.0, top_k=1):
            return  # greedy sampling for evaluations, whose log-probs nobody trains on
        if params.is_truncated and self.reports_support:
            return  # the log-probs beside the kept tokens are over these, after the temperature
        if params.is_truncated:
            raise EngineError(
                f"SGLang reports log-probs before top_p={params.top_p}, top_k={params.top_k} and min_p={params.min_p}: "
                "sample with top_p=1, top_k=0 and min_p=0"
            )
        if params.temperature == 1 or self._log_probs_are_processed:
            return
        for ask in asks[:PROBED_PROMPTS]:
            plain, scaled = (self._likeliest(ask, temperature) for temperature in (1.0, params.temperature))
            if plain >= CERTAIN:
                continue
            if abs(plain - scaled) <= 1e-6 * abs(plain):
                raise EngineError(
                    f"{self.client.url} reports log-probs before temperature {params.temperature}: start it without "
                    "SGLANG_RETURN_ORIGINAL_LOGPROB"
                )
            self._log_probs_are_processed = True
            return

    def _likeliest(self, ask: Ask, temperature: float) -> float:
        """Log-prob of the likeliest first token, in nats; the token is the same at every temperature."""
        body = self._body(ask) | {"top_logprobs_num": 1}
        body["sampling_params"] |= {"temperature": temperature, "max_new_tokens": 1}
        answer = self.client.json("POST", "/generate", body)
        return float(self._field(answer, "meta_info", "output_top_logprobs", 0, 0, 0))

    def _check_version(self, asked: int) -> None:
        """Nothing to do: :meth:`_read` checks the version in each answer."""

    def _request(self, ask: Ask) -> Request:
        return Request("POST", "/generate", self._body(ask), ask.most_bytes)

    def _read(self, ask: Ask, answer: Any) -> Sample:
        where = f"{self.client.url}, prompt {ask.index}:"
        if isinstance(answer, list):
            raise EngineError(f"{where} {len(answer)} answers came, expected 1")
        meta = self._field(answer, "meta_info")
        read = self._field(meta, "prompt_tokens")
        if read != len(ask.prompt):
            raise EngineError(f"{where} the server read {read} prompt tokens, {len(ask.prompt)} were sent")
        # "default" comes from a server that keeps no versions, or that got none since its start.
        held, version = meta.get("weight_version", UNNAMED), None
        self._keeps_version |= held == str(self.version)
        if self._keeps_version or held != UNNAMED:
            version = self._held(ask.version).read(held, self.client.url)
        pairs = self._field(meta, "output_token_logprobs")
        if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) >= 2 for pair in pairs):
            raise EngineError(f"{where} output_token_logprobs is no list of [log-prob, token id, text]")
        token_ids = [pair[1] for pair in pairs]
        if answer.get("output_ids", token_ids) != token_ids:
            raise EngineError(f"{where} log-probs of other tokens than output_ids: the answer cannot be used")
        reason, log_probs = self._field(meta, "finish_reason", "type"), [pair[0] for pair in pairs]
        experts = kept = None
        if self.experts_shape and token_ids:
            experts = self._experts(meta, (len(ask.prompt) + len(token_ids) - 1, *self.experts_shape), where)
        if self.wants_support(ask) and token_ids:
            kept = self._field(meta, "output_token_sampling_mask")
            log_probs = self._field(meta, "output_token_sampling_logprobs")
        sample = make_sample(ask, token_ids, log_probs, reason, self.client.url, experts=experts, kept=kept)
        return sample if version is None else replace(sample, versions=[version] * len(sample.token_ids))

    def _experts(self, meta: Any, shape: tuple[int, ...], where: str) -> Tensor:
        """[tokens, layers, top_k] from base64 of int32 numbers."""
        encoded = self._field(meta, "routed_experts")
        try:
            numbers = torch.frombuffer(bytearray(base64.b64decode(encoded, validate=True)), dtype=torch.int32)
            return numbers.view(shape)
        except (TypeError, ValueError, RuntimeError) as problem:
            raise EngineError(
                f"{where} routed_experts is no base64 of {shape[0]} tokens' experts ({problem}): start the server with "
                "--enable-return-routed-experts"
            ) from None

    def _body(self, ask: Ask) -> dict[str, Any]:
        # No ignore_eos: with it SGLang would ignore stop_token_ids too.
        own = {"top_k": ask.params.top_k or -1, "max_new_tokens": ask.max_new_tokens, "sampling_seed": ask.seed}
        return {
            "input_ids": ask.prompt,
            "sampling_params": ask.sampling | own,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "return_text_in_logprobs": False,
            "stream": False,
            **({"return_routed_experts": True} if self.experts_shape else {}),
            **({"return_sampling_mask": True} if self.wants_support(ask) else {}),
        }
