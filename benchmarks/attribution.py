"""The table of docs/attribution.md: which parameters of SmolLM2 make an engine differ.

    python -m benchmarks.attribution FOLDER --output build/attribution.json

FOLDER is a model in Hugging Face's format. Engine and trainer compute in float32 with the same kernels, so that the
weights alone differ, except where the table says bf16 kernels.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rc.attribution import (
    Attribution,
    attribute,
    bf16,
    fp8_per_block,
    fp8_per_channel,
    fp8_per_tensor,
    int8_per_channel,
    quantized,
    shards_of,
)

Weights = dict[str, Tensor]
TOKENS = 20  # of a response
STALE_STEPS = 20


def int4_per_channel(weight: Tensor) -> Tensor:
    """Round to 15 levels with a scale for each output."""
    scale = weight.float().abs().amax(dim=1, keepdim=True) / 7
    return (weight.float() / scale).round() * scale


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "bf16": bf16,
    "int8 by row": lambda weight: int8_per_channel(weight.float()),
    "fp8 by channel": fp8_per_channel,
    "fp8 by tensor": fp8_per_tensor,
    "fp8 by block": fp8_per_block,
    "int4 by row": int4_per_channel,
}


class Batch:
    """Responses that a model sampled, and the log-probs of any weights for them."""

    def __init__(self, model: Any, tokenizer: Any, seed: int, prompts: int) -> None:
        self.model = model
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        rows = []
        for _ in range(prompts):
            first, second, third = torch.randint(2, 60, (3,), generator=generator).tolist()
            message = [{"role": "user", "content": f"What is {first} + {second} + {third}?"}]
            prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt")
            prompt = prompt if isinstance(prompt, Tensor) else prompt["input_ids"]
            with torch.no_grad():
                tokens = model.generate(prompt, do_sample=True, max_new_tokens=TOKENS, top_k=0, use_cache=True)
            rows.append((tokens[0], prompt.shape[1]))
        length = max(len(tokens) for tokens, _ in rows)
        self.tokens = torch.stack([torch.nn.functional.pad(tokens, (0, length - len(tokens))) for tokens, _ in rows])
        position = torch.arange(1, length)
        self.mask = torch.stack([(position >= begin) & (position < len(tokens)) for tokens, begin in rows])

    def score(self, model: Any) -> Tensor:
        """Log-probs of the next tokens, [n, s - 1]; 0 outside of the responses."""
        logits = model(self.tokens).logits[:, :-1].float()
        taken = logits.log_softmax(-1).gather(2, self.tokens[:, 1:].unsqueeze(2)).squeeze(2)
        return torch.where(self.mask, taken, 0.0)

    def attribute(self, engine: Weights, *, nodes: int = 1, bf16_kernels: bool = False) -> dict[str, Any]:
        """The attribution to the model's parameters, and its figures."""
        model = self.model
        with torch.no_grad():
            train = self.score(model)
            other = copy.deepcopy(model)
            other.load_state_dict(engine, strict=False)
            exact = self.score(other)
            rollout = self.score(other.bfloat16()) if bf16_kernels else exact
        del other
        began = time.monotonic()
        result = attribute(
            shards_of(model),
            engine,
            lambda coefficients: (coefficients * self.score(model)).sum().backward(),
            train - rollout,
            nodes=nodes,
            differences_of_weights=lambda: train - exact,
        )
        return self._figures(result, nodes, time.monotonic() - began)

    def _figures(self, result: Attribution, nodes: int, seconds: float) -> dict[str, Any]:
        kinds = {kind: result.share(part) for kind, part in result.by_kind().items()}
        layers = {layer: result.share(part) for layer, part in result.by_layer().items()}
        return {
            "tokens": int(self.mask.sum()),
            "k2": result.measured / 2 / int(self.mask.sum()),
            "explained": result.explained,
            "completeness": result.completeness,
            "nodes": nodes,
            "largest": result.largest(5),
            "kinds": kinds,
            "layers": layers,
            "seconds": seconds,
        }


def stale(model: Any, batch: Batch) -> Weights:
    """Train the model by some steps on its own responses; return the weights before."""
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    for _ in range(STALE_STEPS):
        optimizer.zero_grad()
        (-batch.score(model).sum() / batch.mask.sum()).backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return before


def faults(weights: Weights, before: Weights) -> dict[str, tuple[list[str], Weights]]:
    """Faults by name: (the parameters that are at fault, their weights in the engine before its rounding)."""
    layers = "model.layers."

    def of_layer(layer: int) -> list[str]:
        return [name for name in weights if name.startswith(f"{layers}{layer}.")]

    int4, scaled = f"{layers}12.mlp.up_proj.weight", f"{layers}20.self_attn.o_proj.weight"
    swapped = f"{layers}10.self_attn.k_proj.weight"
    small, embedding = f"{layers}15.self_attn.v_proj.weight", "model.embed_tokens.weight"
    largest = weights[embedding].abs().amax()
    return {
        "one projection in int4": ([int4], {int4: int4_per_channel(weights[int4])}),
        f"one layer {STALE_STEPS} steps old": (of_layer(7), {name: before[name] for name in of_layer(7)}),
        "one projection is the next layer's": ([swapped], {swapped: weights[swapped.replace(".10.", ".11.")]}),
        "one projection 5 % too large": ([scaled], {scaled: weights[scaled] * 1.05}),
        "one projection 1 % too large": ([scaled], {scaled: weights[scaled] * 1.01}),
        "an update of rank 1 lost": ([small], {small: weights[small] - low_rank(weights[small])}),
        "embedding in 8 bits by tensor": (
            [embedding],
            {embedding: (weights[embedding] / largest * 127).round() * largest / 127},
        ),
    }


def low_rank(weight: Tensor) -> Tensor:
    """An update of rank 1, a sixteenth of the weight's size."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = (torch.randn(length, 1, generator=generator) for length in weight.shape)
    return rows @ columns.T * weight.abs().mean() * 2**-4


def main(arguments: list[str] | None = None) -> int:
    """Measure everything and write it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8)
    options = parser.parse_args(arguments)
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    rows: list[dict[str, Any]] = []

    def add(engine: str, fault: str, seed: int, figures: dict[str, Any]) -> None:
        rows.append({"engine": engine, "fault": fault, "seed": seed} | figures)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        largest = ", ".join(f"{name} {share:.1%}" for name, share in figures["largest"][:2])
        sys.stdout.write(f"{seed} {engine} {fault} k2 {figures['k2']:.2g} {figures['explained']:.4f} {largest}\n")
        sys.stdout.flush()

    for seed in range(options.seeds):
        batch = Batch(model, tokenizer, seed, options.prompts)
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        for engine, rounding in ROUNDINGS.items():
            add(engine, "", seed, batch.attribute(quantized(weights, rounding)))
        add("bf16", "bf16 kernels", seed, batch.attribute(quantized(weights, bf16), bf16_kernels=True))

    batch = Batch(model, tokenizer, 0, options.prompts)
    before = stale(model, batch)
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    add(f"float32, {STALE_STEPS} steps old", "", 0, batch.attribute(before))
    for engine in ("bf16", "fp8 by channel"):
        for fault, (names, wrong) in faults(weights, before).items():
            nodes = 8 if fault == "one projection is the next layer's" else 1
            figures = batch.attribute(quantized(weights | wrong, ROUNDINGS[engine]), nodes=nodes)
            ordered = [name for name, _ in figures["largest"]]
            add(engine, fault, 0, figures | {"first": ordered[0] in names, "at_fault": names[:3]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
