"""A replay with the real model: the angle by which each correction turns the gradient of a checkpoint's weights.

    python -m megatron_rc.launch.replay BATCHES --load CHECKPOINTS --preset A --preset B

The gradient of a loss is the sum over its tokens of (its gradient with respect to log π_θ) × (the gradient of log π_θ
with respect to the weights). A replay knows the first factor of every token; here the model adds the second. One
process on a CPU, in float32, with a copy of the weights for every correction.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rc.launch.errors import require
from megatron_rc.launch.flags.commands import parse_replay
from megatron_rc.launch.flags.stored import stored_config
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.learning import AdvantageSection
from megatron_rc.launch.run_config.options import options_of
from megatron_rc.launch.train_ppo import cpu_backend, on_one_cpu
from megatron_rc.parallel import vocab_parallel_log_probs
from megatron_rc.replay.__main__ import main as replay
from megatron_rc.replay.gradient import Gradient, corrected, cosine_and_length
from megatron_rc.replay.outcome import Outcome
from megatron_rc.replay.tokens import Recorded, Tokens

if TYPE_CHECKING:
    from megatron_rc.launch.training.models.chunk import ModelChunk

Gradients = list[list[Tensor]]  # for each batch and each loss [n, s], with respect to log π_θ of the sampled tokens


def main(argv: Sequence[str] | None = None) -> None:
    """Run the replay of the command line; a failure ends the process with one sentence and 2."""
    with on_one_cpu():
        request = parse_replay(sys.argv[1:] if argv is None else argv)
        require("megatron.core", "a replay with a model", "launch")
        with cpu_backend():
            code = replay(request.rest, lambda *found: with_model(request, *found))
    if code:
        sys.exit(code)


def with_model(request: argparse.Namespace, data: Recorded, base: Gradient, outcomes: list[Outcome]) -> list[Outcome]:
    """Add the angle and the length of the gradient of the checkpoint's weights to the outcomes."""
    from megatron_rc.launch.distributed import alone
    from megatron_rc.launch.training.checkpoints.find import checked_checkpoint
    from megatron_rc.launch.training.checkpoints.saved_settings import SETTINGS, checkpoint_settings

    step, folder = checked_checkpoint(request.load, request.step, checksums=True)
    config = stored_config(checkpoint_settings(folder), str(folder / SETTINGS))
    _check(data, config, request.load)
    with alone(config):
        model = _model(config, folder)
        vectors, distance = _measured(model, config, data, _of_tokens(data, base, outcomes), request.rows)
    words = (
        f"{outcomes[0].effect.of.partition(' with respect to')[0]} with respect to the weights of step {step} of "
        f"{request.load}, whose log-probs are {distance:.2g} nats from the recorded π_θ on average{_otherwise(config)}"
    )
    reference, found = float(vectors[0] @ vectors[0]), []
    for one, vector in zip(outcomes, vectors[1:], strict=True):
        cosine, length = cosine_and_length(float(vector @ vectors[0]), float(vector @ vector), reference)
        effect = dataclasses.replace(one.effect, cosine=cosine, length=length, of=words)
        found.append(dataclasses.replace(one, effect=effect))
    return found


def _otherwise(config: RunConfig) -> str:
    """Return the run's settings that make its advantages differ from the replay's."""
    run = [(one, getattr(config.advantages, one.field)) for one in options_of(AdvantageSection)]
    found = [f"--{one.flag.replace('_', '-')} {value}" for one, value in run if value != one.default]
    return f"; the run's advantages were other ones: {', '.join(found)}" if found else ""


def _check(data: Recorded, config: RunConfig, load: Path) -> None:
    if config.experts is not None and config.experts.num_moe_experts:
        raise ValueError(f"--load {load}: the gradient of a mixture of experts is not measured: leave --load out")
    longest, highest = config.model.max_position_embeddings, config.model.vocab_size
    for part in data.parts:
        if not part.mask.any():
            continue
        token, columns = int(part.records.tokens.max()), part.mask.shape[1]
        if token >= highest or columns > longest:
            raise ValueError(
                f"{part.name} has token ids up to {token} in {columns} columns, the model of {load} knows {highest} "
                f"tokens in {longest}: give the checkpoints of its own run"
            )


def _model(config: RunConfig, folder: Path) -> ModelChunk:
    """Return the checkpoint's model, in float32."""
    from megatron_rc.launch.run_config.megatron_configs import build_transformer_config
    from megatron_rc.launch.training.checkpoints.parameters import CheckpointParameters
    from megatron_rc.launch.training.models.build import build_chunks

    with torch.device("meta"):
        (stored,) = build_chunks(config, build_transformer_config(config))
    parameters = CheckpointParameters(stored, folder)
    config = config.changed(compute={"bf16": False, "fp16": False})
    (model,) = build_chunks(config, build_transformer_config(config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name])
    return model


def _of_tokens(data: Recorded, base: Gradient, outcomes: Sequence[Outcome]) -> Gradients:
    """Return the gradients of all losses with respect to log π_θ, the uncorrected loss first."""
    found = [[one] for one in base]
    for one in outcomes:
        for held in found:
            held.append(torch.empty_like(held[0]))
        for index, rows, gradient in corrected(data, one.config, one.masks, one.token_weights):
            found[index][-1][rows] = gradient
    return found


def _measured(
    model: ModelChunk, config: RunConfig, data: Recorded, gradients: Gradients, rows: int
) -> tuple[list[Tensor], float]:
    """Return each loss's gradient of all weights, float64, and the mean |log π of the model - recorded log π_θ|."""
    parameters = list(model.parameters())
    sums = [[torch.zeros_like(one, dtype=torch.float64) for one in parameters] for _ in gradients[0]]
    distance = 0.0
    for part, losses in zip(data.parts, gradients, strict=True):
        for piece in (slice(start, start + rows) for start in range(0, len(part.mask), rows)):
            held = part.mask[piece, 1:]
            if not held.any():
                continue
            log_probs = _log_probs(model, config, part, piece)
            distance += float((log_probs.detach() - part.theta[piece, 1:])[held].abs().double().sum())
            for total, loss in zip(sums, losses, strict=True):
                found = torch.autograd.grad(log_probs, parameters, loss[piece, 1:], retain_graph=True)
                for one, gradient in zip(total, found, strict=True):
                    one += gradient
    flat = [torch.cat([one.flatten() for one in total]) for total in sums]
    return flat, distance / max(int(data.lengths.sum()), 1)


def _log_probs(model: ModelChunk, config: RunConfig, part: Tokens, rows: slice) -> Tensor:
    """Return [rows, s - 1], log π_θ of every token except the first, at the sampling temperature."""
    tokens = part.records.tokens[rows].long()
    logits = model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)
    return vocab_parallel_log_probs(
        logits[:, :-1],
        tokens[:, 1:],
        vocab_size=config.model.vocab_size,
        mask=part.mask[rows, 1:],
        temperature=part.records.sampling.temperature,
    )


if __name__ == "__main__":
    main()
