"""A Hugging Face causal LM as the rollout engine: batched sampling with a KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_rc.launch.engines import Sample
from megatron_rc.launch.engines.rounding import Rounding
from megatron_rc.launch.engines.router_record import RouterRecord
from megatron_rc.launch.tasks.ends import ResponseEnds
from megatron_rc.launch.weights.checkpoint_names import checked, checkpoint_tensors, is_expert
from megatron_rc.launch.weights.named_weights import kept_buffers
from megatron_rc.records.rollout import SamplingParams

# With fewer tokens matrix products may use another kernel, whose last digits differ.
_LEAST_SHARED = 64


class TransformersEngine:
    """Samples from a ``transformers`` model on this process's device.

    Weights are rounded to ``dtype`` at every sync. A CPU computes in float32, because it has no units for fewer bits.
    A GPU computes in bfloat16, or in float32 if ``dtype`` is fp32.

    A prompt with several responses is read once, and its keys and values are copied. A model with experts reads each
    response's prompt: its matrix products have one row for each token of an expert, and fewer rows would change the
    last digits.

    Args:
        config: ``transformers`` config of the model.
        dtype: one of ``rounding.DTYPES``.
        ends: what ends a response.
        pad_token_id: token that fills batches; never part of a response.
        reports_experts: whether samples have the experts of their tokens; ValueError for a model without experts.
        reports_support: whether truncated samples have the tokens that were kept.
    """

    is_elsewhere = False

    def __init__(
        self,
        config: Any,
        dtype: str,
        ends: ResponseEnds,
        pad_token_id: int,
        device: torch.device,
        *,
        reports_experts: bool = False,
        reports_support: bool = False,
    ) -> None:
        from transformers import AutoModelForCausalLM

        compute = torch.bfloat16 if device.type == "cuda" and dtype != "fp32" else torch.float32
        # The attention is PyTorch's, except in models that need transformers' own, such as those with sinks.
        self.model = AutoModelForCausalLM.from_config(config, dtype=compute)
        self.model = self.model.to(device).eval().requires_grad_(False)
        for buffer in kept_buffers(self.model).values():
            buffer.data = buffer.data.float()  # as in a model that is read from files
        self.ends = ends
        self.pad = pad_token_id
        self.device = device
        self._end_tokens = torch.tensor(ends.token_ids, device=device)
        self.version = -1
        self._rounded = Rounding(self.model, dtype)
        self._record = RouterRecord(self.model) if reports_experts else None
        self._reports_support = reports_support
        self._shares_prompts = not any(is_expert(name) for name, _ in self.model.named_parameters())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over all weights of the model; see :class:`RolloutEngine`."""
        parameters = checkpoint_tensors(self.model)
        for name, tensor in checked(weights, parameters):
            parameters[name].copy_(self._rounded(name, tensor))
        self.version = version

    @torch.inference_mode()
    def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int, seed: int
    ) -> list[Sample]:
        """Sample until an end or ``max_new_tokens``; see :class:`RolloutEngine`."""
        if self._record is None:
            return self._sample(prompts, params, max_new_tokens, seed)
        with self._record.open():
            samples = self._sample(prompts, params, max_new_tokens, seed)
        prompt_lengths = [len(prompt) for prompt in prompts]
        response_lengths = [len(sample.token_ids) for sample in samples]
        experts = self._record.of_responses(prompt_lengths, response_lengths)
        pairs = zip(samples, experts, strict=True)
        return [replace(sample, routed_experts=of_response) for sample, of_response in pairs]

    def _sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int, seed: int
    ) -> list[Sample]:
        generator = torch.Generator(self.device).manual_seed(seed)
        prompts_to_read, places = self._read_once(prompts)
        tokens, positions, attention = self._padded(prompts_to_read)
        running = torch.ones(len(prompts), dtype=torch.bool, device=self.device)
        warpers = _warpers(params)
        cache = None
        chosen: list[Tensor] = []  # [b] tokens of each step
        log_probs: list[Tensor] = []  # [b] of each step
        kept: list[list[Tensor]] = []  # of each step, for each response the ids of the tokens that were kept
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
            logits = output.logits[:, -1]
            if len(logits) < len(prompts):
                # Each prompt was read once: give each of its responses a copy.
                cache.batch_select_indices(places)
                logits = logits[places]
                positions = positions[places]
                attention = attention[places]
            distribution = torch.log_softmax(warpers(None, logits.float()), dim=-1)
            tokens, values = self._draw(distribution, generator)
            if self._reports_support and params.is_truncated:
                kept.append(_kept(distribution))
            chosen.append(torch.where(running, tokens.squeeze(1), -1))  # -1 after the end
            log_probs.append(values)
            running = running & ~self._are_ended(chosen)
            if not running.any():
                break
            positions = positions[:, -1:] + 1
            attention = torch.cat([attention, attention.new_ones(len(prompts), 1)], dim=1)
        samples = self._samples(torch.stack(chosen, dim=1), torch.stack(log_probs, dim=1))
        if not kept:
            return samples
        kept_of_responses = zip(*kept, strict=True)
        pairs = zip(samples, kept_of_responses, strict=True)
        return [replace(sample, support=_support(steps[: len(sample.token_ids)])) for sample, steps in pairs]

    def _read_once(self, prompts: Sequence[Sequence[int]]) -> tuple[Sequence[Sequence[int]], Tensor | None]:
        """(different prompts, position of each prompt among them); (all prompts, None) if they are not shared."""
        different = list(dict.fromkeys(map(tuple, prompts)))
        num_tokens = len(different) * max(map(len, prompts))
        if not self._shares_prompts or len(different) == len(prompts) or num_tokens < _LEAST_SHARED:
            return prompts, None
        numbers = {prompt: number for number, prompt in enumerate(different)}
        return different, torch.tensor([numbers[tuple(prompt)] for prompt in prompts], device=self.device)

    def _padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, positions and attention mask [b, s] of prompts, padded on the left."""
        longest = max(map(len, prompts))
        rows = [[self.pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        starts = torch.tensor([longest - len(prompt) for prompt in prompts], device=self.device).unsqueeze(1)
        positions = torch.arange(longest, device=self.device).unsqueeze(0) - starts
        return torch.tensor(rows, device=self.device), positions.clamp(min=0), (positions >= 0).long()

    def _draw(self, distribution: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Tokens [b, 1] drawn from log-probs [b, v], and their log-probs [b]; after NaN, which is kept, the end."""
        broken = distribution[:, :1].isnan()
        tokens = torch.multinomial(torch.where(broken, 1.0, distribution.exp()), 1, generator=generator)
        tokens = torch.where(broken, self.ends.token_ids[0], tokens)
        return tokens, distribution.gather(1, tokens).squeeze(1)

    def _are_ended(self, chosen: Sequence[Tensor]) -> Tensor:
        """[b] bool: responses that end with their newest token; ``chosen`` has the tokens [b] of each step so far."""
        if not self.ends.strings:
            return torch.isin(chosen[-1], self._end_tokens)
        tails = torch.stack(list(chosen[-self.ends.tail_length :]), dim=1).tolist()
        ended = [tail[-1] >= 0 and self.ends.is_at_end(tail) for tail in tails]
        return torch.tensor(ended, device=self.device)

    def _samples(self, tokens: Tensor, log_probs: Tensor) -> list[Sample]:
        samples = []
        for row, values in zip(tokens.tolist(), log_probs.tolist(), strict=True):
            length = row.index(-1) if -1 in row else len(row)
            token_ids = row[:length]
            samples.append(Sample(token_ids, values[:length], self.ends.finish_reason(token_ids)))
        return samples


def _warpers(params: SamplingParams) -> Any:
    """The steps from logits [b, v] to the logits that are sampled from, minus infinity for tokens that are not kept."""
    from transformers import generation

    warpers = generation.LogitsProcessorList([generation.TemperatureLogitsWarper(float(params.temperature))])
    if params.top_k:
        warpers.append(generation.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(generation.TopPLogitsWarper(float(params.top_p)))
    if params.min_p:
        warpers.append(generation.MinPLogitsWarper(float(params.min_p)))
    return warpers


def _kept(distribution: Tensor) -> list[Tensor]:
    """For each row of log-probs [b, v] the ids of its kept tokens, int32; none if the log-probs are NaN."""
    return [row.nonzero().flatten().int() for row in (distribution > -torch.inf).cpu()]


def _support(kept: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(ids, counts) int32 of the kept tokens of each step of a response."""
    return torch.cat(list(kept)), torch.tensor([len(ids) for ids in kept], dtype=torch.int32)
