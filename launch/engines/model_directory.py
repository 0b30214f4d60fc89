"""Directory with a model in Hugging Face's format, through which engines get weights."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from megatron_rc.launch.engines import EngineError
from megatron_rc.launch.engines.rounding import Rounding
from megatron_rc.launch.transformers4 import add_earlier_entries
from megatron_rc.launch.weights.checkpoint_names import checked, checkpoint_tensors, empty_model
from megatron_rc.launch.weights.safetensors_files import SHARD_BYTES, write_tensors


class ModelDirectory:
    """``config.json``, tokenizer and safetensors in one directory, replaced as a whole at every write.

    Tied embeddings are written as two tensors, and the config says that they are not tied. Otherwise an engine that
    repacks the output layer at its start, such as vLLM, would silently keep the first output layer for ever.

    Args:
        path: the directory, whose parent must exist; an older directory at this path is replaced.
        config: ``transformers`` config of the model.
        eos_token_id: the end tokens, as ``config.json`` has them.
        dtype: round weights to this type, one of ``rounding.DTYPES``; default: no rounding.
        shard_bytes: size at which a file is closed and the next one begins.
        save_tokenizer: writes the tokenizer into a folder; None: the directory has none.
    """

    def __init__(
        self,
        path: Path,
        config: Any,
        eos_token_id: int | list[int],
        dtype: str | None = None,
        shard_bytes: int = SHARD_BYTES,
        *,
        save_tokenizer: Callable[[Path], None] | None = None,
    ) -> None:
        self.path = path.absolute()
        self._save_tokenizer = save_tokenizer
        self._shard_bytes = shard_bytes
        self._tied = bool(config.tie_word_embeddings)
        self._config = copy.deepcopy(config)
        self._config.tie_word_embeddings = False
        self._config.eos_token_id = eos_token_id
        model = empty_model(self._config)
        self._config.architectures = [type(model).__name__]
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._embedding = names[id(model.get_input_embeddings().weight)]
        self._head = names[id(model.get_output_embeddings().weight)]
        self._expected = checkpoint_tensors(model)
        if self._tied:
            del self._expected[self._head]
        self._rounded = Rounding(model, dtype) if dtype else None

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> Path:
        """Write all weights, with one shard in memory at a time, and return the path of the directory.

        The old model stays until the new one is complete, so that the file system needs room for both. Raises
        ValueError as :meth:`RolloutEngine.load_weights`, and EngineError if the files cannot be written.
        """
        part, old = (self.path.with_name(self.path.name + end) for end in (".part", ".old"))
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            write_tensors(part, self.tensors(weights), self._shard_bytes)
            self._describe(part)
            shutil.rmtree(old, ignore_errors=True)
            if self.path.exists():
                self.path.rename(old)
            part.rename(self.path)
            shutil.rmtree(old, ignore_errors=True)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"rollout weights cannot be written to {self.path}: {error}: make room there") from error
        return self.path

    def write_config(self, dtype: torch.dtype) -> None:
        """Write all but the weights, for a server that gets weights of this type in another way, or EngineError."""
        self._config.dtype = dtype
        try:
            self._describe(self.path)
        except OSError as error:
            raise EngineError(f"the model's config cannot be written to {self.path}: {error}") from error

    def _describe(self, folder: Path) -> None:
        """Write ``config.json`` and the tokenizer."""
        self._config.save_pretrained(folder)
        add_earlier_entries(folder)
        if self._save_tokenizer is not None:
            self._save_tokenizer(folder)

    def tensors(
        self, weights: Iterable[tuple[str, Tensor]], names: Collection[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Checked and rounded weights, with a separate output layer; ``names``: names of a part of the model."""
        expected = self._expected if names is None else {name: self._expected[name] for name in names}
        for name, tensor in checked(weights, expected):
            if self._rounded is not None:
                tensor = self._rounded(name, tensor)
            self._config.dtype = tensor.dtype
            yield name, tensor
            if self._tied and name == self._embedding:
                yield self._head, tensor.clone()  # safetensors refuses tensors that share memory
