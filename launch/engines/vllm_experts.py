"""The experts that vLLM's routers choose on a CPU, where vLLM's own option does not run.

vLLM loads this class into its workers by name (``worker_extension_cls``). It binds to the model runner of vLLM 0.32.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor


class RecordsExperts:
    """Methods of a vLLM worker that its engine calls by ``collective_rpc``; the worker has ``model_runner``."""

    model_runner: Any

    def record_experts(self) -> None:
        """Begin the record: each step of the model notes the experts of its tokens."""
        module = importlib.import_module("vllm.model_executor.layers.fused_moe.routed_experts_capturer")
        self._experts = _Record()
        module.bind_routed_experts_capturer(self.model_runner.model, self._experts)
        run = self.model_runner.execute_model

        def execute_model(step: Any, *args: Any, **more: Any) -> Any:
            output = run(step, *args, **more)
            self._experts.note(self.model_runner.input_batch, step.num_scheduled_tokens)
            return output

        self.model_runner.execute_model = execute_model

    def take_experts(self) -> dict[str, list[Any]]:
        """[tokens that were read, layers with experts, top_k] as lists for each request; the record is empty then."""
        found = {name: table.tolist() for name, table in self._experts.requests.items()}
        self._experts.requests = {}
        return found


class _Record:
    """The experts of each request's tokens, by position."""

    def __init__(self) -> None:
        self.requests: dict[str, Tensor] = {}  # [positions, layers, top_k]
        self._layers: dict[int, Tensor] = {}  # [tokens of the step, top_k] of each layer

    def capture(self, layer: int, experts: Tensor) -> None:
        """Take the experts of one layer for all tokens of a step; vLLM's routers call it."""
        self._layers[layer] = experts.to("cpu", torch.int32, copy=True)

    def note(self, batch: Any, numbers: dict[str, int]) -> None:
        """Give the rows of a step to its requests: ``numbers`` of tokens for each, in the order of the batch."""
        if not self._layers:
            return
        table = torch.stack([self._layers[layer] for layer in sorted(self._layers)], dim=1)
        start = 0
        for row, name in enumerate(batch.req_ids):
            first, number = int(batch.num_computed_tokens_cpu[row]), numbers[name]
            before = self.requests.get(name, table[:0])[:first]  # vLLM may read tokens again
            self.requests[name] = torch.cat([before, table[start : start + number]])
            start += number
        self._layers = {}
