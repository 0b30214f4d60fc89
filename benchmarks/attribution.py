"""The tables of docs/attribution.md: which parameters of SmolLM2 make an engine differ.

    python -m benchmarks.attribution FOLDER --output build/attribution.json

FOLDER is a model in Hugging Face's format. Engine and trainer compute in float32 with the same kernels, so that the
weights alone differ, except where the table says bf16 kernels. Rows that the output has already are not measured again.
``--tables`` prints those of the output and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
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
from megatron_rc.attribution.names import place_of
from megatron_rc.attribution.picture import write_picture

Weights = dict[str, Tensor]
TOKENS = 20  # of a response
PROMPTS = 5  # of a row about an engine
PROMPTS_OF_FAULTS = 3
PROMPTS_OF_TRAINING = 1
# Age of an engine's weights in optimizer steps, and the passes that such an attribution makes.
STALE_NODES = {2: 1, 20: 3}
# Of two exchanged layers 32 leave 8 % for one of the seeds.
EXCHANGED_NODES = 64
# Roundings of all weights beside a planted fault.
BESIDE = ("bf16", "fp8 by channel")
# As configs/launch/smollm2_sums.yaml.
LEARNING_RATE = 1e-5
# Other prompts than those that are attributed.
TRAINING_SEED = 100


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


@dataclass(frozen=True)
class Fault:
    """A fault that is planted in an engine."""

    wrong: Weights  # the engine's weights before its rounding, where they differ from the trainer's
    at_fault: list[str] | list[int]  # parameters by name, or layers
    nodes: int = 1  # passes that it needs
    beside: tuple[str, ...] = BESIDE  # roundings of all weights


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

    def score(self, weights: Weights | None = None, *, bf16_kernels: bool = False) -> Tensor:
        """Log-probs of the next tokens, [n, s - 1]; 0 outside of the responses. ``weights``: None: the model's own."""
        weights = weights or {}
        if bf16_kernels:
            weights = {name: weight.bfloat16() for name, weight in weights.items()}
        output = torch.func.functional_call(self.model, weights, self.tokens, tie_weights=True)
        logits = output.logits[:, :-1].float()
        taken = logits.log_softmax(-1).gather(2, self.tokens[:, 1:].unsqueeze(2)).squeeze(2)
        return torch.where(self.mask, taken, 0.0)

    def attribute(
        self, engine: Weights, *, nodes: int = 1, intended: Weights | None = None, bf16_kernels: bool = False
    ) -> tuple[Attribution, float]:
        """The attribution to the model's parameters, and the seconds of its passes."""
        with torch.no_grad():
            train = self.score()
            exact = self.score(engine)
            rollout = self.score(engine, bf16_kernels=True) if bf16_kernels else exact
        began = time.monotonic()
        result = attribute(
            shards_of(self.model),
            engine,
            lambda coefficients: (coefficients * self.score()).sum().backward(),
            train - rollout,
            nodes=nodes,
            intended_weights=intended,
            differences_of_weights=lambda: train - exact,
        )
        return result, time.monotonic() - began


class Table:
    """Rows of figures in a file, written after each measurement."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

    def measure(
        self,
        batch: Batch,
        engine: str,
        seed: int,
        weights: Weights,
        *,
        rounding: Callable[[Tensor], Tensor] | None = None,
        name: str = "",
        fault: Fault | None = None,
        nodes: int = 1,
        bf16_kernels: bool = False,
    ) -> None:
        """Add a row, unless the file has it. ``weights``: the engine's before its rounding."""
        key = {"engine": engine, "fault": name, "seed": seed}
        if any(key.items() <= row.items() for row in self.rows):
            return
        rounded = weights if rounding is None else quantized(weights, rounding)
        intended = None
        if fault is not None and rounding is not None:
            trainer = {name: weight.detach() for name, weight in batch.model.named_parameters()}
            intended = quantized(trainer, rounding)
        result, seconds = batch.attribute(rounded, nodes=nodes, intended=intended, bf16_kernels=bf16_kernels)
        num_tokens = int(batch.mask.sum())
        row = key | {
            "tokens": num_tokens,
            "k2": result.measured / 2 / num_tokens,
            "explained": result.explained,
            "completeness": result.completeness,
            "nodes": nodes,
            "largest": result.largest(5),
            "layers": {layer: round(result.share(part), 5) for layer, part in result.by_layer().items()},
            "kinds": {kind: round(result.share(part), 5) for kind, part in result.by_kind().items()},
            "layers_and_kinds": [
                (layer, kind, round(result.share(part), 5))
                for (layer, kind), part in result.by_layer_and_kind().items()
            ],
            "seconds": round(seconds, 1),
        }
        if fault is None:
            write_picture(result, self.path.with_name(f"{engine}, seed {seed}.png"))
        else:
            row |= places(result, fault)
        self.rows.append(row)
        self.path.write_text(json.dumps(self.rows), encoding="utf-8")
        shown = {name: row[name] for name in ("k2", "explained", "completeness", "share", "places") if name in row}
        sys.stdout.write(f"{key} {shown} {row['largest'][:2]}\n")
        sys.stdout.flush()


def places(result: Attribution, fault: Fault) -> dict[str, Any]:
    """The share of the parameters or layers at fault and their places in the list, by their parts and by their excess.

    The first place is 1. The excess is sorted by its absolute value.
    """
    of_parts, of_excess = _by_layers(fault, result.parts), _by_layers(fault, result.excess or {})
    ordered = sorted(of_parts, key=lambda name: of_parts[name], reverse=True)
    ordered_by_excess = sorted(of_excess, key=lambda name: abs(of_excess[name]), reverse=True)
    return {
        "share": result.share(sum(of_parts[name] for name in fault.at_fault)),
        "places": [ordered.index(name) + 1 for name in fault.at_fault],
        "excess": result.share(sum(of_excess[name] for name in fault.at_fault)),
        "excess_places": [ordered_by_excess.index(name) + 1 for name in fault.at_fault],
        "num_excess": sum(excess != 0 for excess in of_excess.values()),
    }


def _by_layers(fault: Fault, parts: Mapping[str, float]) -> dict[Any, float]:
    """The parts of parameters; the sums of layers if layers are at fault."""
    if not isinstance(fault.at_fault[0], int):
        return dict(parts)
    sums: dict[Any, float] = {}
    for name, part in parts.items():
        layer = place_of(name).layer
        if layer is not None:
            sums[layer] = sums.get(layer, 0.0) + part
    return sums


def gradients_of(model: Any, batch: Batch) -> Weights:
    """Return the gradients of the mean log-prob of a batch."""
    (batch.score().sum() / batch.mask.sum()).backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return gradients


def train(model: Any, batch: Batch, steps: int) -> None:
    """Train the model by some steps on its own responses."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        (-batch.score().sum() / batch.mask.sum()).backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def faults(weights: Weights, gradients: Weights) -> dict[str, Fault]:
    """Faults by name, in a trainer with these weights."""
    int4 = "model.layers.12.mlp.up_proj.weight"
    scaled = "model.layers.20.self_attn.o_proj.weight"
    merged = "model.layers.15.self_attn.v_proj.weight"
    embedding = "model.embed_tokens.weight"
    largest = weights[embedding].abs().amax()

    exchanged = {name: weights[name.replace(".10.", ".11.")] for name in of_layer(weights, 10)}
    exchanged |= {name: weights[name.replace(".11.", ".10.")] for name in of_layer(weights, 11)}
    update = lora_update(weights[merged], gradients[merged])
    return {
        "a projection in int4": Fault({int4: int4_per_channel(weights[int4])}, [int4]),
        "a projection 1 % too large": Fault({scaled: weights[scaled] * 1.01}, [scaled]),
        "a projection 5 % too large": Fault({scaled: weights[scaled] * 1.05}, [scaled]),
        "a projection 20 % too large": Fault({scaled: weights[scaled] * 1.2}, [scaled], beside=("fp8 by channel",)),
        "a projection 50 % too large": Fault({scaled: weights[scaled] * 1.5}, [scaled], beside=("fp8 by channel",)),
        "a LoRA merge in bf16": Fault({merged: bf16(bf16(weights[merged] - update) + update)}, [merged]),
        "embedding in 8 bits, one scale": Fault(
            {embedding: (weights[embedding] / largest * 127).round() * largest / 127}, [embedding]
        ),
        "two layers exchanged": Fault(exchanged, [10, 11], nodes=EXCHANGED_NODES),
    }


def of_layer(weights: Weights, layer: int) -> list[str]:
    """Return the names of a layer's parameters."""
    return [name for name in weights if name.startswith(f"model.layers.{layer}.")]


def lora_update(weight: Tensor, gradient: Tensor) -> Tensor:
    """A step of rank 8 down the gradient, a thousandth of the weight's size: bf16 rounds most of its elements away."""
    left, values, right = torch.svd_lowrank(gradient, q=8)
    update = -(left * values) @ right.T
    return update * weight.norm() / update.norm() * 2**-10


def engine_table(rows: list[dict[str, Any]]) -> str:
    """Return the shares by engine, kind and layer as Markdown; each cell has the numbers of all seeds."""
    engines = list(dict.fromkeys(row["engine"] for row in rows if not row["fault"]))
    lines = [
        "| engine's weights | k2 of a token, nats² | explained | attention | MLP | embedding | layers 0, 1 "
        "| layers 2 to 25 | layers 26 to 29 | first in the list |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for engine in engines:
        of_seeds = [row for row in rows if row["engine"] == engine and not row["fault"]]
        cells = [engine, _joined(f"{row['k2']:.2g}" for row in of_seeds)]
        cells.append(_joined(f"{row['explained']:.3f}" for row in of_seeds))
        for kind in ("attention", "mlp", "embedding"):
            cells.append(_joined(_percent(row["kinds"][kind]) for row in of_seeds) + " %")
        for layers in (range(2), range(2, 26), range(26, 30)):
            cells.append(_joined(_percent(_sum_of(row["layers"], layers)) for row in of_seeds) + " %")
        cells.append("; ".join(_first_in_words(row) for row in of_seeds))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def fault_table(rows: list[dict[str, Any]]) -> str:
    """Return the shares and places of the planted faults as Markdown; each cell has the numbers of all seeds."""
    columns = [f"{engine}: {figure}" for engine in BESIDE for figure in ("share", "place", "excess")]
    lines = [f"| fault | {' | '.join(columns)} |", "|" + "---|" * (1 + len(columns))]
    for name in dict.fromkeys(row["fault"] for row in rows if row["fault"]):
        cells = [name]
        for engine in BESIDE:
            of_seeds = [row for row in rows if (row["fault"], row["engine"]) == (name, engine)]
            if not of_seeds:
                cells += ["", "", ""]
                continue
            cells.append(_joined(_percent(row["share"]) for row in of_seeds) + " %")
            cells.append(_joined(_in_words(row["places"]) for row in of_seeds))
            cells.append(_joined(_percent(row["excess"]) for row in of_seeds) + " %")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _in_words(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _joined(texts: Iterable[str]) -> str:
    return " / ".join(texts)


def _percent(share: float) -> str:
    """Return a number of percents, never -0, with a digit behind the point if it is below 1."""
    percents = 100 * share
    return str(round(percents)) if abs(percents) >= 1 or not percents else f"{percents:.1g}"


def _sum_of(shares: dict[str, float], layers: range) -> float:
    """Sum the shares of some layers, whose numbers are texts in a JSON file."""
    return sum(share for layer, share in shares.items() if int(layer) in layers)


def _first_in_words(row: dict[str, Any]) -> str:
    name, share = row["largest"][0]
    short = name.removeprefix("model.").removesuffix(".weight").replace("layers.", "")
    return f"{short} {_percent(share)} %"


def main(arguments: list[str] | None = None) -> int:
    """Measure everything and write it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="prompts of the rows about engines")
    parser.add_argument("--tables", action="store_true", help="print the tables of the output; measure nothing")
    options = parser.parse_args(arguments)
    table = Table(options.output)
    if options.tables:
        sys.stdout.write(f"{engine_table(table.rows)}\n\n{fault_table(table.rows)}\n")
        return 0
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32).eval()
    # With a padding token, torch leaves out the gradient of its row, although prompts contain the token.
    model.get_input_embeddings().padding_idx = None
    tokenizer = AutoTokenizer.from_pretrained(options.folder)

    batches = {seed: Batch(model, tokenizer, seed, PROMPTS) for seed in options.seeds}
    of_faults = {seed: Batch(model, tokenizer, seed, PROMPTS_OF_FAULTS) for seed in options.seeds}
    of_training = Batch(model, tokenizer, TRAINING_SEED, PROMPTS_OF_TRAINING)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for engine, rounding in ROUNDINGS.items():
        for seed, batch in batches.items():
            table.measure(batch, engine, seed, before, rounding=rounding)
    for seed, batch in batches.items():
        table.measure(batch, "bf16, with bf16 kernels", seed, before, rounding=bf16, bf16_kernels=True)

    def plant(name: str, fault: Fault) -> None:
        for engine in fault.beside:
            wrong = before | fault.wrong
            for seed, batch in of_faults.items():
                table.measure(
                    batch, engine, seed, wrong, rounding=ROUNDINGS[engine], name=name, fault=fault, nodes=fault.nodes
                )

    planted = faults(before, gradients_of(model, of_training))
    later = before
    for steps, nodes in STALE_NODES.items():
        model.load_state_dict(before, strict=False)
        train(model, of_training, steps)
        later = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        for seed, batch in batches.items():
            table.measure(batch, f"{steps} steps old", seed, before, nodes=nodes)

    # The trainer has its old weights again, whose responses the batches have; the layer in the engine is the newer one.
    model.load_state_dict(before, strict=False)
    moved = {name: later[name] for name in of_layer(before, 7)}
    planted = {f"a layer {max(STALE_NODES)} steps apart": Fault(moved, [7])} | planted
    for name, fault in planted.items():
        plant(name, fault)
    return 0


if __name__ == "__main__":
    sys.exit(main())
