"""Tensors by name from files of other programs: safetensors, PyTorch's and NumPy's. Reading them runs no code."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rc.records.storage import read_safetensors

SUFFIXES = (".safetensors", ".pt", ".pth", ".npz")
MOST_BYTES = 1 << 34  # limit of the unpacked size of a compressed file


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, on the host; equal texts, such as verl's ``uid``, become equal numbers.

    Read are safetensors, ``.pt`` and ``.pth`` (a dict of tensors, alone or below ``batch``) and ``.npz``. ImportError
    without the library for it; ValueError if the file is damaged, holds objects, or unpacks to over ``MOST_BYTES``.
    """
    _check_size(path)
    if path.suffix == ".npz":
        return _of_numpy(path)
    return read_safetensors(path)[0] if path.suffix == ".safetensors" else _of_pytorch(path)


def _check_size(path: Path) -> None:
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as problem:
        raise ValueError(f"{path} is cut off or damaged ({problem}): write it again") from None
    if size > MOST_BYTES:
        raise ValueError(f"{path} unpacks to {size} bytes, above the limit of {MOST_BYTES}: write it in several files")


def _of_pytorch(path: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as problem:  # its unpickler raises many types, for code and for damage alike
        # PyTorch's own sentence about objects proposes to load them without this check.
        why = "it holds other objects" if "weights_only" in str(problem) else str(problem).strip().partition("\n")[0]
        raise ValueError(
            f"{path} is no dict of tensors ({why[:200]}): objects could run code and are not read, write it as "
            'torch.save({"rollout_log_probs": tensor, …}, path)'
        ) from None
    if isinstance(found, Mapping) and isinstance(found.get("batch"), Mapping):
        found = {**found, **found["batch"]}
    if not isinstance(found, Mapping):
        raise ValueError(f"{path} holds a {type(found).__name__}: expected a dict of tensors by name")
    return {str(name): value for name, value in found.items() if isinstance(value, Tensor)}


def _of_numpy(path: Path) -> dict[str, Tensor]:
    try:
        import numpy as np
    except ModuleNotFoundError:
        raise ImportError(f"{path} needs numpy, which is not installed: pip install numpy") from None

    def tensor(array: Any) -> Tensor:
        return torch.from_numpy(np.unique(array, return_inverse=True)[1] if array.dtype.kind in "US" else array)

    try:
        # Opened here: numpy leaves a damaged file open.
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            return {name: tensor(file[name]) for name in file.files}
    except OSError:
        raise
    except Exception as problem:  # errors of zipfile, zlib and numpy for damage, and of numpy for objects
        raise ValueError(
            f"{path} is no .npz file of numbers ({problem}): objects could run code and are not read, write arrays"
        ) from None
