"""Write a checkpoint of any parallel layout as a Hugging Face directory, by one process without a GPU.

    python -m megatron_rc.launch.export --load CHECKPOINTS --save-hf DIR

The checkpoint's settings describe the model. Parameters are written one at a time: the machine needs memory for one
file of the directory (4 GiB) and twice the largest parameter, in the checkpoint's form and in the file's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rc.launch.errors import ConfigurationError, require
from megatron_rc.launch.flags.commands import parse_export
from megatron_rc.launch.flags.stored import stored_config
from megatron_rc.launch.python_specs import is_python_spec
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.tasks import Text, make_task
from megatron_rc.launch.tasks.ends import ResponseEnds, choose_ends
from megatron_rc.launch.tasks.text import HUGGING_FACE, CharacterText, HuggingFaceText
from megatron_rc.launch.train_ppo import cpu_backend, on_one_cpu
from megatron_rc.launch.weights import find_family

if TYPE_CHECKING:
    from torch import Tensor


def main(argv: Sequence[str] | None = None) -> None:
    """Run the export of the command line; end the process with 2 for unusable flags, 1 for unusable files."""
    with on_one_cpu():
        request = parse_export(sys.argv[1:] if argv is None else argv)
        for module in ("megatron.core", "transformers", "safetensors"):
            require(module, "an export", "launch")
        with cpu_backend():
            size = export(request)
        sys.stdout.write(f"{request.save_hf}: {size / 1e6:.1f} MB of weights, for transformers and vLLM\n")


def export(request: argparse.Namespace) -> int:
    """Write the directory, with Megatron-Core on the CPU; return the size of the weights in bytes."""
    from megatron_rc.launch.distributed import alone
    from megatron_rc.launch.training.checkpoints.find import checked_checkpoint
    from megatron_rc.launch.training.hugging_face import write_directory
    from megatron_rc.launch.weights.export import export_parameters

    _, folder = checked_checkpoint(request.load, request.step, checksums=request.verify_integrity)
    config = stored_config(folder)
    if find_family(config) is None:
        raise ConfigurationError(
            f"--load {request.load}: no Hugging Face architecture here has the settings of this model"
        )
    text = tokenizer_of(config, request.tokenizer_model, request.task)
    text.ends = _ends_of(config, text)
    with alone(config):
        return write_directory(request.save_hf, config, text, export_parameters(_parameters(config, folder), config))


def tokenizer_of(config: RunConfig, folder: Path | None, own_task: str | None = None) -> Text:
    """Return the run's tokenizer, from the run's folder or from another one.

    A class of the user's own has to be named by the request: a checkpoint alone imports nothing.
    """
    task = config.task
    files = config.checkpoints
    is_own = task.tokenizer_type != HUGGING_FACE and is_python_spec(task.task)
    if own_task != (task.task if is_own else None):
        if not is_own:
            raise ConfigurationError(f"--task {own_task}: the tokenizer is not that of a class of your own: drop it")
        raise ConfigurationError(
            f"the run's tokenizer is that of {task.task}, which is code: give --task {task.task} if you trust it"
        )
    if task.tokenizer_type != HUGGING_FACE:
        if folder is not None:
            raise ConfigurationError(f"--tokenizer-model {folder}: the run had one token a character: drop the flag")
        if task.task is None:
            return CharacterText()
        training = config.training
        response = config.rollouts.max_response_length
        return make_task(task.task, training.seed, None, training.seq_length, response).text
    tokenizer_folder = folder or task.tokenizer_model or files.load_hf
    if tokenizer_folder is None or not Path(tokenizer_folder).is_dir():
        raise ConfigurationError(
            f"the run's tokenizer was in {tokenizer_folder}, which is not there: give --tokenizer-model DIR"
        )
    text = HuggingFaceText(tokenizer_folder, chat=False)
    if text.size > config.model.vocab_size:
        raise ConfigurationError(
            f"the tokenizer in {tokenizer_folder} has {text.size} tokens, the model {config.model.vocab_size}: give "
            "the one that the run had as --tokenizer-model DIR"
        )
    return text


def _ends_of(config: RunConfig, text: Text) -> ResponseEnds:
    """Return what ended a response in the run, by the checkpoint; an older one does not say, and the files do."""
    if config.rollouts.end_token_ids is not None:
        return replace(text.ends, token_ids=config.rollouts.end_token_ids)
    named = text.end_tokens_by_source(config.checkpoints.load_hf)
    return choose_ends(named, decode=text.decode, vocab_size=config.model.vocab_size)


def _parameters(config: RunConfig, folder: Path) -> Mapping[str, Tensor]:
    """Return the checkpoint's parameters, by the names of a model without memory."""
    import torch

    from megatron_rc.launch.run_config.megatron_configs import build_transformer_config
    from megatron_rc.launch.training.checkpoints.parameters import CheckpointParameters
    from megatron_rc.launch.training.models.build import build_chunks

    with torch.device("meta"):
        (model,) = build_chunks(config, build_transformer_config(config))
    return CheckpointParameters(model, folder)


if __name__ == "__main__":
    main()
