"""Attribute the mismatch of recorded rollouts to a checkpoint's parameters, by one process without a GPU.

    python -m megatron_rc.launch.attribute --load CHECKPOINTS --engine-weights DIR records.jsonl

The checkpoint's settings describe the model, which computes in float32. The trainer's log-probs are the recorded ones;
tokens without one get the checkpoint's. The machine needs memory for four times the model in float32. With
``--rollout-url`` the engine's weights are read back from a running server.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rc.attribution import Attribution
from megatron_rc.attribution.picture import write_picture
from megatron_rc.attribution.verdict import where_in_words
from megatron_rc.launch.errors import ConfigurationError, require
from megatron_rc.launch.flags.commands import parse_attribute
from megatron_rc.launch.flags.stored import stored_config
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.train_ppo import cpu_backend, on_one_cpu
from megatron_rc.numerics import is_log_prob
from megatron_rc.parallel import ParallelGroups
from megatron_rc.records.formats.jsonl import read_jsonl
from megatron_rc.records.rollout import RolloutBatch, load_rollouts

if TYPE_CHECKING:
    from megatron_rc.attribution.midpoint import EngineWeights
    from megatron_rc.launch.training.models.chunk import ModelChunk

_CHECKPOINT = re.compile(r"iter_(\d+)")
_MOST_EXCESS = 5
# All records of a file are one batch.
_ANY_NUMBER = 2**20


def main(argv: Sequence[str] | None = None) -> None:
    """Print an attribution; end the process with 2 for unusable flags, 1 for unusable files."""
    with on_one_cpu():
        request = parse_attribute(sys.argv[1:] if argv is None else argv)
        require("megatron.core", "an attribution", "launch")
        if request.picture is not None:
            require("matplotlib", "--picture", "launch")
            _check_picture(request.picture)
        batch = read_records(request.records)
        with cpu_backend():
            result = attribution_of(request, batch)
        sys.stdout.write(_as_json(result) if request.json else _in_words(result))
        if request.picture is not None:
            try:
                write_picture(result, request.picture)
            except OSError as error:
                raise ValueError(f"--picture {request.picture} could not be written ({error})") from error


def _check_picture(path: Path) -> None:
    """Refuse a picture that could not be written, before the passes that it is drawn of."""
    from matplotlib.backend_bases import FigureCanvasBase

    if not path.parent.is_dir():
        raise ConfigurationError(f"--picture {path}: the folder {path.parent} does not exist, create it first")
    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise ConfigurationError(f"--picture {path}: name it with one of the endings {', '.join(sorted(formats))}")


def read_records(paths: Sequence[Path]) -> RolloutBatch:
    """Return the sequences of all files as one batch.

    Raises:
        ValueError: a file cannot be read, no file has a sampled token, or the sequences were sampled differently.
    """
    batches: list[RolloutBatch] = []
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path}: no such file; give JSON lines, or a file of --save-rollouts")
        if path.suffix == ".safetensors":
            batches.append(load_rollouts(path))
        else:
            batches.extend(read_jsonl(path, _ANY_NUMBER))
    if not any(batch.response_mask.any() for batch in batches):
        raise ValueError(f"{', '.join(map(str, paths))}: no response has a sampled token; give the records of a run")
    return RolloutBatch.concatenate(batches).with_sorted_support()


def attribution_of(request: argparse.Namespace, batch: RolloutBatch) -> Attribution:
    """Attribute a batch, with Megatron-Core on the CPU."""
    from megatron_rc.launch.distributed import alone
    from megatron_rc.launch.training.attribution import attribute_batch
    from megatron_rc.launch.training.batches.micro_batches import cut_batch
    from megatron_rc.launch.training.checkpoints.find import checked_checkpoint
    from megatron_rc.launch.training.models.build import wrap_chunks
    from megatron_rc.launch.training.models.passes import ModelPasses
    from megatron_rc.launch.training.models.routing_replay import RoutingReplay

    step, folder = checked_checkpoint(request.load, request.step)
    stored = stored_config(folder)
    config = _config_for(stored, batch)
    with alone(config):
        groups = ParallelGroups.from_megatron()
        chunk = _chunk_of(folder, config)
        engine = _engine(request, config, chunk, groups, step)
        _note_other_versions(batch, engine.step)
        model = wrap_chunks(config, [chunk])
        passes = ModelPasses(config, groups)
        is_replayed = config.replays_rollouts and batch.routed_experts is not None
        replay = RoutingReplay(config, groups, [chunk]) if is_replayed else None

        local_batch = cut_batch(batch, config, groups)
        train_log_probs = batch.label_old_log_probs()
        # Other programs' files may lack the trainer's log-probs, and of several files some may lack them.
        is_missing = local_batch.local.response_mask & ~is_log_prob(train_log_probs)
        if is_missing.any():
            scored = passes.score(model, local_batch, replay=replay)
            assert scored is not None, "one process has the last stage"
            train_log_probs = torch.where(is_missing, scored.log_probs, train_log_probs)
            _note_missing(is_missing, local_batch.local.response_mask)
        return attribute_batch(
            model,
            passes,
            local_batch,
            train_log_probs,
            engine.weights,
            replay=replay,
            nodes=request.nodes,
            intended_weights=engine.intended_weights,
            check=True,
        )


def _note_missing(is_missing: Tensor, response_mask: Tensor) -> None:
    """Say for how many sampled tokens, [n, s] bool, the checkpoint gives the trainer's log-probs."""
    num_missing = int(is_missing.sum())
    num_tokens = int(response_mask.sum())
    if num_missing < num_tokens:
        sys.stderr.write(
            f"note: {num_missing} of {num_tokens} sampled tokens have no log-prob of the trainer in the records: the "
            "checkpoint's are taken for them\n"
        )


def _config_for(config: RunConfig, batch: RolloutBatch) -> RunConfig:
    """Return the settings for one pass over this batch: float32, and each sequence a micro-batch."""
    num_sequences, length = batch.tokens.shape
    largest = config.model.max_position_embeddings
    if length > largest:
        raise ConfigurationError(f"the records have {length} columns, the model has positions for {largest}")
    largest_id = int(batch.tokens.max())
    if largest_id >= config.model.padded_vocab_size:
        raise ConfigurationError(
            f"the records have token id {largest_id}, the model a vocabulary of {config.model.padded_vocab_size}: give "
            "records of this model"
        )
    return config.changed(
        compute={"bf16": False, "fp16": False},
        optimizer={"use_distributed_optimizer": False},
        training={
            "seq_length": length,
            "micro_batch_size": 1,
            "global_batch_size": num_sequences,
            "rl_use_sequence_packing": False,
        },
        rollouts={"rl_default_temperature": batch.sampling.temperature},
    )


@dataclass(frozen=True)
class _Engine:
    """The engine's weights.

    Attributes:
        step: the optimizer step that made them; None: unknown, as of a Hugging Face directory.
        weights: its weights by the parameter's name in the trainer, or a function as :func:`attribute` takes it.
        intended_weights: the trainer's weights rounded to the engine's format, if ``weights`` have another source and
            the format is known.
    """

    step: int | None
    weights: EngineWeights
    intended_weights: EngineWeights | None = None


def _engine(
    request: argparse.Namespace, config: RunConfig, chunk: ModelChunk, groups: ParallelGroups, step: int
) -> _Engine:
    """Return the engine that the flags describe; ``step`` is that of the trainer's weights."""
    from megatron_rc.launch.training.attribution import rounded_weights

    rounded = rounded_weights([chunk], request.rollout_dtype)
    # Without a rounding, all of a part would be excess.
    intended = None if request.rollout_dtype == "fp32" else rounded
    if request.rollout_url is not None:
        served = _served_model(request, config, groups)
        return _Engine(None, {name: weight.detach() for name, weight in served.named_parameters()}, intended)
    if request.engine_weights is None:
        return _Engine(step, rounded)
    step_of_engine, engine = _engine_of(request.engine_weights, config, groups)
    weights = {name: weight.detach() for name, weight in engine.named_parameters()}
    return _Engine(step_of_engine, lambda name, _: rounded(name, weights[name]), intended)


def _served_model(request: argparse.Namespace, config: RunConfig, groups: ParallelGroups) -> ModelChunk:
    """Return the model with the weights that a rollout server has now."""
    from megatron_rc.launch.engines.read_back import read_back
    from megatron_rc.launch.weights.checkpoint_names import checkpoint_tensors, empty_model
    from megatron_rc.launch.weights.converter import load_model
    from megatron_rc.launch.weights.families import family_of
    from megatron_rc.launch.weights.safetensors_files import write_tensors
    from megatron_rc.launch.weights.units import names_of, units_of

    tensors = checkpoint_tensors(empty_model(family_of(config).hugging_face_config(config)))
    shapes = {name: tuple(tensors[name].shape) for name in sorted(names_of(units_of(config)))}
    with tempfile.TemporaryDirectory(prefix="engine-weights-") as folder:
        write_tensors(Path(folder), read_back(request.rollout_engine, request.rollout_url, shapes))
        chunk = _chunk_of(None, config)
        load_model([chunk], config, groups, folder)
    return chunk


def _engine_of(folder: Path, config: RunConfig, groups: ParallelGroups) -> tuple[int | None, ModelChunk]:
    """Return the step and the model of a run's checkpoints or one of these, or of a Hugging Face directory."""
    from megatron_rc.launch.training.checkpoints.find import checked_checkpoint
    from megatron_rc.launch.weights.contents import check_contents
    from megatron_rc.launch.weights.converter import load_model

    if (folder / "config.json").is_file():
        engine = _chunk_of(None, config)
        check_contents(folder, "--engine-weights", config, groups)
        load_model([engine], config, groups, folder)
        return None, engine
    match = _CHECKPOINT.fullmatch(folder.name)
    if match is None:
        step, checkpoint = checked_checkpoint(folder)
    else:
        step, checkpoint = checked_checkpoint(folder.parent, int(match[1]))
    return step, _chunk_of(checkpoint, config)


def _chunk_of(checkpoint: Path | None, config: RunConfig) -> ModelChunk:
    """Return the whole model on the CPU, with a checkpoint's weights, or with random ones if it is None."""
    from megatron_rc.launch.training.checkpoints.parameters import CheckpointParameters
    from megatron_rc.launch.training.models.build import build_chunks, transformer_config
    from megatron_rc.launch.weights.named_weights import named_weights

    (chunk,) = build_chunks(config, transformer_config(config))
    if checkpoint is not None:
        stored = CheckpointParameters(chunk, checkpoint)
        for name, weight in named_weights(chunk).items():
            weight.copy_(stored[name])
    return chunk


def _note_other_versions(batch: RolloutBatch, step: int | None) -> None:
    """Note if the records say that other weights than those of this step sampled their tokens."""
    versions = batch.policy_versions[batch.response_mask].unique().tolist()
    if step is not None and versions != [step]:
        shown = ", ".join(str(version) for version in versions)
        sys.stderr.write(f"note: weights of step {shown} sampled the records, the engine's are of step {step}\n")


def _in_words(result: Attribution) -> str:
    """Return the result as text."""
    lines = [
        f"explained by the weights  {result.explained:>8.1%}",
        f"rest                      {result.rest:>8.1%}",
        f"completeness              {result.completeness:>8.3f}",
        f"{where_in_words(result.metrics())}",
        "",
        "largest parts",
        *(f"  {share:>7.1%}  {name}" for name, share in result.largest()),
    ]
    if result.excess is not None:
        differing = result.largest_excess(_MOST_EXCESS)
        lines.append("")
        if differing:
            lines.append("largest excess: parts of weights that are not the trainer's in this format")
            lines += [f"  {share:>7.1%}  {name}" for name, share in differing]
        else:
            lines.append("no excess: the engine has the trainer's weights in this format")
    return "\n".join(lines) + "\n"


def _as_json(result: Attribution) -> str:
    """Return the metrics of a run, and the share and excess of each parameter, as one JSON object."""
    shares: dict[str, object] = {"parts": {name: result.share(part) for name, part in result.parts.items()}}
    if result.excess is not None:
        shares["excess"] = {name: result.share(excess) for name, excess in result.excess.items()}
    return json.dumps(result.metrics() | shares, indent=1) + "\n"


if __name__ == "__main__":
    main()
