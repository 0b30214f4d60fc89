"""Export of the trained model as a Hugging Face directory (``--save-hf``)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from megatron_rc.launch.checkpoint_folders import put_in_place
from megatron_rc.launch.errors import RunError
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.tasks import Text
from megatron_rc.launch.tasks.text import HuggingFaceText
from megatron_rc.launch.training.trainer import Trainer
from megatron_rc.launch.transformers4 import add_earlier_entries
from megatron_rc.launch.weights.checkpoint_names import checked, checkpoint_tensors, empty_model
from megatron_rc.launch.weights.converter import described_model, export_model
from megatron_rc.launch.weights.safetensors_files import SHARD_BYTES, write_tensors

GENERATION = "generation_config.json"


def write_directory(
    target: Path, config: RunConfig, text: Text, weights: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES
) -> int:
    """Write config, generation config, tokenizer and weights; the directory appears only when it is complete.

    ``weights`` are all the model's, by Hugging Face name, and are read one at a time. An older directory is replaced at
    the end. Returns the bytes of the weights; ValueError if a file cannot be written or a weight is not the model's.
    """
    partial = target.parent / f".{target.name}.partial"
    older = target.parent / f".{target.name}.replaced"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if older.exists() and not target.exists():
            older.rename(target)  # a killed process was replacing it
        for remains in (partial, older):
            shutil.rmtree(remains, ignore_errors=True)
        partial.mkdir()
        model = empty_model(_describe(partial, config, text))
        size = write_tensors(partial, checked(weights, checkpoint_tensors(model)), shard_bytes)
        put_in_place(partial, target, older)
        shutil.rmtree(older, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"--save-hf: the model cannot be written to {target} ({error}): make room there, or name another directory"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return size


def hugging_face_folder(save_hf: str, step: int) -> Path:
    """Directory of a step's model."""
    return Path(save_hf) / f"step-{step}"


class HuggingFaceSaves:
    """Writes ``DIR/step-N`` for ``--save-hf DIR``, every ``--save-hf-interval`` steps and at the end."""

    def __init__(self, config: RunConfig, trainer: Trainer, text: Text) -> None:
        self.config = config
        self.trainer = trainer
        self.text = text
        self._written = -1

    def __call__(self, at_end: bool = False) -> None:
        """Write the model if it is due; RunError on rank 0 if it cannot be written."""
        files = self.config.checkpoints
        step = self.trainer.iteration
        due = at_end or (files.save_hf_interval is not None and step % files.save_hf_interval == 0)
        if files.save_hf is None or not due or step == self._written:
            return
        self._written = step
        weights = export_model(self.trainer.chunks, self.config, self.trainer.groups)
        if dist.get_rank() == 0:
            try:
                write_directory(hugging_face_folder(files.save_hf, step), self.config, self.text, weights)
            except ValueError as error:
                raise RunError(str(error)) from error
        for _ in weights:  # every rank gathers all of them
            pass


def _describe(folder: Path, config: RunConfig, text: Text) -> Any:
    """Write everything but the weights, and return the ``transformers`` config."""
    from transformers import GenerationConfig

    hf_config = described_model(config)
    tokens = _special_tokens(config, text)
    for name, token in tokens.items():
        setattr(hf_config, name, token)
    hf_config.dtype = config.dtype
    hf_config.architectures = [type(empty_model(hf_config)).__name__]
    hf_config.save_pretrained(folder)
    add_earlier_entries(folder)
    text.save(folder)
    published_file = _origin(config, text, GENERATION)
    if published_file is None:
        GenerationConfig(**tokens).save_pretrained(folder)
        return hf_config
    published = json.loads(published_file.read_text(encoding="utf-8"))
    # Copy it as it is if it names this run's end tokens; else change that entry alone.
    if _names_ends(published.get("eos_token_id"), text):
        shutil.copyfile(published_file, folder / GENERATION)
    else:
        changed = published | {"eos_token_id": text.ends.eos_token_id}
        (folder / GENERATION).write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")
    return hf_config


def _special_tokens(config: RunConfig, text: Text) -> dict[str, Any]:
    """Ids of the special tokens: end tokens as the run had them, others of the model that it started from.

    Without such a model the tokenizer says the others.
    """
    tokens = {"bos_token_id": None, "eos_token_id": text.ends.eos_token_id, "pad_token_id": text.pad_token}
    published_file = _origin(config, text, "config.json")
    if published_file is not None:
        published = json.loads(published_file.read_text(encoding="utf-8"))
        tokens["bos_token_id"] = published.get("bos_token_id")
        if _names_ends(published.get("eos_token_id"), text):
            tokens["eos_token_id"] = published["eos_token_id"]  # in the file's own order
        # Add no padding token to a model without one: transformers would not train that token's embedding.
        tokens["pad_token_id"] = published.get("pad_token_id")
    return tokens


def _names_ends(eos_token_id: Any, text: Text) -> bool:
    """Whether an entry ``eos_token_id`` of a file names all end tokens, and no others."""
    ids = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    return set(ids) == set(text.ends.token_ids)


def _origin(config: RunConfig, text: Text, name: str) -> Path | None:
    """Path of a file of ``--load-hf``'s model, searched beside the tokenizer first; None if there is none."""
    source = config.checkpoints.load_hf
    tokenizer_model = config.task.tokenizer_model
    if source is None or not isinstance(text, HuggingFaceText):
        return None
    folders = [text.folder]
    if tokenizer_model in (None, source):
        folders.append(Path(source))
    return next((folder / name for folder in folders if (folder / name).is_file()), None)
