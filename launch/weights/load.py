"""Load a Hugging Face directory into a sharded model; each rank reads its own parameters, one at a time."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.weights import mxfp4
from megatron_rc.launch.weights.family import Rule
from megatron_rc.launch.weights.safetensors_files import INDEX, SINGLE
from megatron_rc.launch.weights.stacked_tensors import name_and_entry
from megatron_rc.launch.weights.units import ExpertGroups, Unit, find_parameter, own_weights, units_of
from megatron_rc.parallel.groups import Group, ParallelGroups, group_rank, group_size

# Files of weights in other formats, and how they become safetensors.
_OTHER_FORMATS = {
    "pytorch_model*.bin": (
        "convert them once with transformers, AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OTHER_DIR), "
        "and copy the tokenizer's files"
    ),
    "*.gguf": "unpack it with python -m megatron_rc.launch.weights.from_gguf FILE DIR",
}
# Rows of two matrices that are compared at a time.
_COMPARED_ROWS = 4096


class WeightFiles:
    """Tensors of a directory by name, read one at a time; opened by :func:`open_weights`."""

    def __init__(self, folder: Path, files: dict[str, Any]) -> None:
        self.folder = folder
        self.files = files

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors, as they are stored."""
        return self.files.keys()

    def read(self, name: str) -> Tensor:
        """Read one tensor, or an entry of a stack; ValueError if the directory has none of this name."""
        whole_name, entry = name_and_entry(name)
        if entry is not None:
            return self._read_entry(whole_name, entry)
        stored = self._stored_name(name)
        tensor: Tensor = self.files[stored].get_tensor(stored)
        return tensor

    def _read_entry(self, name: str, entry: int) -> Tensor:
        """Read one entry of a stack, or its numbers in MXFP4, whose rows are the columns of the entry."""
        quantized = self.stored_names(name)
        if len(quantized) < 2:
            return self._slice_entry(name, entry)
        blocks, scales = (self._slice_entry(stored, entry) for stored in quantized)
        return mxfp4.dequantize(blocks, scales).t()

    def check(self, name: str, shape: tuple[int, ...] | None = None) -> None:
        """Raise ValueError if the tensor is missing or has another shape."""
        stored_shape = tuple(self._slice(name).get_shape())
        if shape is not None and stored_shape != shape:
            raise ValueError(f"{self.folder}: {name} {stored_shape} is not the {shape} that the flags describe")

    def find(self, name: str) -> str | None:
        """Name under which the tensor is stored, if it is; published GPT-2 files lack the prefix ``transformer.``."""
        for stored in (name, name.partition(".")[2]):
            if stored in self.files:
                return stored
        return None

    def stored_names(self, name: str) -> list[str]:
        """Names under which a tensor is stored: one, two if it is in MXFP4, or none."""
        stored = self.find(name)
        if stored is not None:
            return [stored]
        quantized = [self.find(name + end) for end in (mxfp4.BLOCKS, mxfp4.SCALES)]
        return [part for part in quantized if part is not None]

    def largest_difference(self, name: str, other_name: str) -> str | None:
        """Say how two matrices differ; None if they are equal. Reads some rows of both at a time.

        Raises ValueError if one is missing.
        """
        rows = self._slice(name)
        other_rows = self._slice(other_name)
        shape = tuple(rows.get_shape())
        other_shape = tuple(other_rows.get_shape())
        if shape != other_shape:
            return f"{shape} is not {other_shape}"
        largest = 0.0
        is_equal = True
        for begin in range(0, shape[0], _COMPARED_ROWS):
            part = rows[begin : begin + _COMPARED_ROWS].float()
            other_part = other_rows[begin : begin + _COMPARED_ROWS].float()
            is_equal = is_equal and torch.equal(part, other_part)
            largest = max(largest, float((part - other_part).abs().max()))
        return None if is_equal else f"by up to {largest:.3g}"

    def _slice_entry(self, name: str, entry: int) -> Tensor:
        """Read one entry of a stored stack; ValueError if the stack is missing or has fewer entries."""
        stack = self._slice(name)
        shape = tuple(stack.get_shape())
        if not shape or entry >= shape[0]:
            raise ValueError(
                f"{self.folder}: {name} {shape} has no entry {entry}: give the --num-experts of that model"
            )
        tensor: Tensor = stack[entry]
        return tensor

    def _slice(self, name: str) -> Any:
        """A tensor that is not read yet, of safetensors; ValueError if it is missing."""
        stored = self._stored_name(name)
        return self.files[stored].get_slice(stored)

    def _stored_name(self, name: str) -> str:
        stored = self.find(name)
        if stored is None:
            raise ValueError(f"{self.folder} holds no tensor {name}: it is not a model of this architecture")
        return stored


@contextmanager
def open_weights(folder: str | Path) -> Iterator[WeightFiles]:
    """Open a directory with ``model.safetensors``, or with several files and their index; ValueError if it fails."""
    from safetensors import SafetensorError, safe_open

    folder = Path(folder)
    with ExitStack() as stack:
        files = {}
        for path in _files_of(folder):
            if path.exists() and not path.is_file():  # opening a pipe would block all threads
                raise ValueError(f"{path} is no regular file: put the safetensors file of the model there")
            try:
                opened = stack.enter_context(safe_open(str(path), framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path} cannot be read as safetensors: {error}") from error
            files.update(dict.fromkeys(opened.keys(), opened))
        yield WeightFiles(folder, files)


def load_weights(
    chunks: Sequence[torch.nn.Module],
    config: RunConfig,
    groups: ParallelGroups,
    folder: str | Path,
    experts: ExpertGroups,
) -> None:
    """Load this rank's weights from a Hugging Face directory; arguments as in :func:`export_weights`. No collectives.

    Raises ValueError if a file or a tensor is missing or has another shape (other ranks may succeed, so agree before
    going on), and RuntimeError if no rule names a parameter of the model.
    """
    units = units_of(config)
    own = [unit for unit in units if unit.is_here(groups, experts)]
    parameters = own_weights(chunks, own)
    with open_weights(folder) as files:
        for unit in own:
            for rule in unit.rules:
                parameter = find_parameter(parameters[unit.chunk], unit, rule)
                _copy(files, unit, rule, parameter, config, unit.tp_group(groups, experts))
        copy = parameters[-1].get("output_layer.weight")
        if copy is not None and not config.model.untie_embeddings_and_output_weights:
            # With tied embeddings the last stage holds a copy of the embeddings.
            _copy(files, units[0], units[0].rules[0], copy, config, groups.tp)


def _copy(
    files: WeightFiles, unit: Unit, rule: Rule, parameter: Tensor, config: RunConfig, tp_group: Group | None
) -> None:
    names = unit.names(rule)
    tensors = [files.read(name) for name in names]
    try:
        shard = rule.conversion.cut(tensors, config, group_rank(tp_group), group_size(tp_group))
    except (RuntimeError, IndexError):
        shard = tensors[0].new_empty(0)  # the tensors' shapes cannot be cut
    if shard.shape != parameter.shape:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in zip(names, tensors, strict=True))
        raise ValueError(
            f"{files.folder}: {shapes} does not fit the {tuple(parameter.shape)} that the flags describe for this "
            "rank: give the flags of that model"
        )
    parameter.copy_(shard)


def _files_of(folder: Path) -> list[Path]:
    """``model.safetensors``, which transformers reads first too, or else the files of the index; ValueError."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        try:
            names = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{folder / INDEX} is no index of safetensors files ({type(error).__name__}: {error})"
            ) from error
        # The index came from elsewhere: no name of it may lead out of the folder.
        for name in names:
            if not isinstance(name, str) or name in ("", ".", "..") or len(name) > 255 or set(name) & set("/\\\0"):
                raise ValueError(f"{folder / INDEX} names {str(name)[:80]!r}, which is no file of its own folder")
        return [folder / name for name in sorted(set(names))]
    for pattern, remedy in _OTHER_FORMATS.items():
        path = min(folder.glob(pattern), default=None)
        if path is not None:
            raise ValueError(f"{folder} holds {path.name}, but weights are read from safetensors alone: {remedy}")
    raise ValueError(f"{folder} holds neither {SINGLE} nor {INDEX}: give the directory of a Hugging Face model")
