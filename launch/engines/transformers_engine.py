"""A Hugging Face causal LM as the rollout engine: batched sampling with a KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rc.batch import SamplingParams
from megatron_rc.launch.engines import Sample
from megatron_rc.launch.weights.checkpoint_names import checkpoint_tensors, is_expert

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def round_weight(tensor: Tensor, dtype: str, quantizable: bool) -> Tensor:
    """The values that an engine with weights of ``dtype`` would compute with, in float32.

    ``fp8-e4m3`` keeps one float32 scale for each output row of a linear layer, as engines do; everything else
    (embeddings, norms, the output layer) is bfloat16 there.
    """
    tensor = tensor.float()
    if dtype == "fp32":
        return tensor
    if dtype == "bf16" or not quantizable:
        return tensor.bfloat16().float()
    scale = tensor.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / FP8_MAX
    return (tensor / scale).to(torch.float8_e4m3fn).float() * scale


class TransformersEngine:
    """Samples from a ``transformers`` model on this process's device.

    Weights are rounded to ``dtype`` at every sync. On a CPU, which has no units for bfloat16 and fp8, the arithmetic
    stays float32; on a GPU it is bfloat16 unless ``dtype`` is fp32.

    Args:
        config: of the model (a ``transformers`` config).
        dtype: ``fp32``, ``bf16`` or ``fp8-e4m3``.
        eos_token_id: ends a response.
        pad_token_id: fills batches; never sampled into a response.
        device: where the model lives.
    """

    def __init__(self, config: Any, dtype: str, eos_token_id: int, pad_token_id: int, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        compute = torch.bfloat16 if device.type == "cuda" and dtype != "fp32" else torch.float32
        self.model = AutoModelForCausalLM.from_config(config, dtype=compute, attn_implementation="sdpa")
        self.model = self.model.to(device).eval().requires_grad_(False)
        self.dtype, self.eos, self.pad, self.device = dtype, eos_token_id, pad_token_id, device
        self.version = -1
        self._quantizable = self._linear_weights()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over all weights of the model; see :class:`RolloutEngine`."""
        parameters = checkpoint_tensors(self.model)
        missing = set(parameters)
        for name, tensor in weights:
            if name not in parameters:
                raise ValueError(f"the rollout model has no weight {name}")
            if parameters[name].shape != tensor.shape:
                wanted, given = tuple(parameters[name].shape), tuple(tensor.shape)
                raise ValueError(f"the rollout model's weight {name} is {wanted}, got {given}")
            transposed = name in self._quantizable and self._quantizable[name]
            tensor = tensor.t() if transposed else tensor
            rounded = round_weight(tensor, self.dtype, name in self._quantizable or is_expert(name))
            parameters[name].copy_(rounded.t() if transposed else rounded)
            missing.discard(name)
        if missing:
            raise ValueError(f"the rollout model's weight {min(missing)} never came")
        self.version = version

    @torch.inference_mode()
    def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int, seed: int
    ) -> list[Sample]:
        """Sample until the end of text or ``max_new_tokens``; see :class:`RolloutEngine`."""
        generator = torch.Generator(self.device).manual_seed(seed)
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        rows = [[self.pad] * left + list(prompt) for left, prompt in zip(padding, prompts, strict=True)]
        tokens = torch.tensor(rows, device=self.device)
        starts = torch.tensor(padding, device=self.device).unsqueeze(1)
        positions = (torch.arange(longest, device=self.device).unsqueeze(0) - starts).clamp(min=0)
        attention = (torch.arange(longest, device=self.device).unsqueeze(0) >= starts).long()
        running = torch.ones(len(prompts), dtype=torch.bool, device=self.device)
        cache, chosen, log_probs = None, [], []
        for _ in range(max_new_tokens):
            output = self.model(
                input_ids=tokens,
                attention_mask=attention,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
            distribution = torch.log_softmax(output.logits[:, -1].float() / params.temperature, dim=-1)
            tokens = torch.multinomial(distribution.exp(), 1, generator=generator)
            # -1 marks what comes after the end of text.
            chosen.append(torch.where(running, tokens.squeeze(1), -1))
            log_probs.append(distribution.gather(1, tokens).squeeze(1))
            running = running & (tokens.squeeze(1) != self.eos)
            if not running.any():
                break
            positions = positions[:, -1:] + 1
            attention = torch.cat([attention, attention.new_ones(len(prompts), 1)], dim=1)
        return self._samples(torch.stack(chosen, dim=1), torch.stack(log_probs, dim=1))

    def _samples(self, tokens: Tensor, log_probs: Tensor) -> list[Sample]:
        samples = []
        for row, values in zip(tokens.tolist(), log_probs.tolist(), strict=True):
            length = row.index(-1) if -1 in row else len(row)
            reason = "stop" if row[length - 1] == self.eos else "length"
            samples.append(Sample(row[:length], values[:length], reason))
        return samples

    def _linear_weights(self) -> dict[str, bool]:
        """Names of the linear layers' weights, and whether they are stored [in, out] (GPT-2's Conv1D)."""
        from transformers.pytorch_utils import Conv1D

        head = self.model.get_output_embeddings()
        return {
            f"{name}.weight": isinstance(module, Conv1D)
            for name, module in self.model.named_modules()
            if isinstance(module, (torch.nn.Linear, Conv1D)) and module is not head
        }
