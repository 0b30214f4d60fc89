"""A model as Hugging Face stores it: what engines read weights from that share a file system with the trainer."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from megatron_rc.launch.engines import EngineError
from megatron_rc.launch.engines.rounding import Rounding
from megatron_rc.launch.weights.checkpoint_names import checked, checkpoint_tensors, empty_model
from megatron_rc.launch.weights.safetensors_files import SHARD_BYTES, write_tensors


class ModelDirectory:
    """``config.json`` and safetensors at one path, replaced as a whole at every write.

    Tied embeddings are written as two tensors, and the config says that they are not tied. Engines that repack the
    output layer at start (vLLM) would otherwise keep the first one for ever, silently.

    Args:
        path: of the directory; what stands there is replaced. Its parent must exist.
        config: of the model (a ``transformers`` config).
        eos_token_id: ends a response.
        dtype: what the weights are rounded to, one of ``rounding.DTYPES``; default: as they come.
        shard_bytes: a file is closed once it holds as many.

    Raises:
        ValueError: the parent directory is not there.
    """

    def __init__(
        self,
        path: str | Path,
        config: Any,
        eos_token_id: int,
        dtype: str | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self.path = Path(path).absolute()
        if not self.path.parent.is_dir():
            raise ValueError(f"the directory for rollout weights is {self.path}, but {self.path.parent} does not exist")
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
        """Write all weights, one shard in memory at a time; a reader never finds half of a model.

        The old model stays until the new one is whole: the file system, often memory, must have room for both.

        Args:
            weights: ``(Hugging Face name, tensor)``, all of the model.

        Returns:
            The path of the directory.

        Raises:
            ValueError: a tensor that the model lacks, that comes twice, of another shape, or that never came.
            EngineError: the files cannot be written.
        """
        part = self.path.with_name(self.path.name + ".part")
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            self._write(part, weights)
            old = self.path.with_name(self.path.name + ".old")
            shutil.rmtree(old, ignore_errors=True)
            if self.path.exists():
                self.path.rename(old)
            part.rename(self.path)
            shutil.rmtree(old, ignore_errors=True)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"rollout weights cannot be written to {self.path}: {error}: make room there") from error
        return self.path

    def _write(self, part: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
        write_tensors(part, self._tensors(weights), self._shard_bytes)
        self._config.save_pretrained(part)

    def _tensors(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """What is written: rounded, and with an output layer."""
        for name, tensor in checked(weights, self._expected):
            if self._rounded is not None:
                tensor = self._rounded(name, tensor)
            self._config.dtype = tensor.dtype
            yield name, tensor
            if self._tied and name == self._embedding:
                yield self._head, tensor.clone()  # safetensors refuses tensors that share memory
